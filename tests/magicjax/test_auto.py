"""`drafter="auto"`: the same text, the choice that costs and acceptance ask for, clear refusals."""

import dataclasses
import re

import numpy as np
import pytest

import magicjax
from magicjax import cost_model, planner
from magicjax.autotune import auto, search
from magicjax.autotune.auto import Auto
from magicjax.autotune.known_text import KnownText, look_up_counts
from magicjax.autotune.trial import Trial
from magicjax.decoding.paired_timing import take_turns
from magicjax.planner import candidates
from magicjax.planner.candidates import sizes_of_model
from magicjax.trees.token_tree import ROOT_ONLY
from tests.magicjax import tiny

TREE = tiny.TREES["chain4"]
# A pass of the tiny target takes 2 ms, a round 0.1 ms more, and a draft as long as its budget says.
LEVELS = {12: 2e-4, 16: 3e-3}
HERE = cost_model.Device(
    *("here", 2e10, 1e11, 1e10, None),
    dtype="float32",
    layer_seconds=1e-3,
    round_seconds=1e-4,
    measured=(
        cost_model.Steps(
            sizes_of_model(tiny.model(), None).key,
            *(cost_model.DRAFT, (8,), tuple(LEVELS), (1,), tuple(LEVELS.values())),
        ),
    ),
)


@pytest.fixture
def profile(tmp_path):
    """A profile of this device."""
    path = tmp_path / "here.json"
    cost_model.save_profile(path, HERE, {})
    return path


@pytest.fixture
def foretold(monkeypatch):
    """Makes every measured time the one that is foretold, so that nothing depends on noise."""

    def trial(request, name, behind, rounds, tree=None):
        found, compiling = run_trial(request, name, behind, rounds, tree)
        drafter = None if tree is ROOT_ONLY else request.drafter
        return dataclasses.replace(found, seconds=seconds(drafter, TREE.depth)), compiling

    def turns(variants, state, count, least_seconds=0.0):
        state = take_turns(variants, state, 1)
        for variant in variants:
            drafter, depth = variant.request.drafter, variant.settings.shape.depth
            variant.seconds[:] = [seconds(drafter, depth)]
        return state

    run_trial = search.run_trial
    monkeypatch.setattr(search, "run_trial", trial)
    monkeypatch.setattr(search, "take_turns", turns)


def seconds(drafter, depth: int) -> float:
    """Returns what a round takes; of no drafter a plain step."""
    if drafter is None:
        return 2e-3
    level = 0.0 if isinstance(drafter, magicjax.LookUp) else 1e-3
    return depth * LEVELS.get(getattr(drafter, "budget", None), level) + 2.1e-3


@pytest.fixture
def short_calls(monkeypatch):
    """Calls of two rounds, because the outputs here are short."""
    run = auto.run_replanned
    monkeypatch.setattr(auto, "run_replanned", lambda *given: run(*given[:-1], 2))


def generate(drafter, **options):
    given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return magicjax.generate(tiny.model(), tiny.prompts(8), drafter=drafter, **given)


def drafters(*kinds):
    made = {
        "cheap": tiny.drafter("self"),
        "dear": magicjax.SelfSpeculation("snapkv", budget=16),
        "other": tiny.drafter("other"),
        "look-up": magicjax.LookUp(),
    }
    return [made[kind] for kind in kinds]


@pytest.mark.usefixtures("foretold")
def test_the_text_is_the_same_and_the_choice_is_used_again(profile, tally, short_calls):
    how = Auto(drafters("other", "cheap", "look-up"), profile, tree=TREE, trial_rounds=16)
    first = generate(how)
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(first))
    assert first.choice.name == "self:streaming:12"
    tried = {trial.name for trial in first.choice.trials} | {*first.choice.skipped}
    assert tried == {"", "self:streaming:12", candidates.name_of(how.drafters[0]), "look-up:4"}
    assert first.stats.plan_s > 0 and first.stats.depths[0] == first.choice.tree.depth
    assert len(first.stats.depths) > 2
    assert {*first.choice.foretold} <= tried
    unsure = dataclasses.replace(first.choice, drafter=None)  # what gains, but less than it must
    assert "off, the gain is too small: self:streaming:12" in str(unsure)
    # The look-up was tried first, and is judged on what the last trial came to: all text.
    text = KnownText([*tiny.prompts(8)], np.full(8, tiny.NEW), [*tiny.expected(8)], [tiny.NEW] * 8)
    judged = next(trial for trial in first.choice.trials if trial.name == "look-up:4")
    assert judged.tokens == look_up_counts(magicjax.LookUp(), text, TREE.depth)[1]
    again = generate(first.choice)
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(again))
    assert again.choice is first.choice and again.stats.plan_s == 0


@pytest.mark.usefixtures("foretold")
def test_where_nothing_pays_it_decodes_plainly(profile):
    found = generate(Auto(drafters("dear", "other"), profile, tree=TREE, trial_rounds=16))
    assert found.choice.drafter is None and found.choice.name == "off"
    assert found.choice.plan is not None and not found.choice.plan.pays
    assert "at most 0.79 times" in found.choice.skipped["self:snapkv:16"]
    assert found.stats.depths == (0,) and found.stats.tau == 1.0
    np.testing.assert_array_equal(found.tokens, generate(None).tokens)
    assert "off; the least slow is" in str(found.choice)


@pytest.mark.usefixtures("foretold")
@pytest.mark.slow
def test_under_sampling_the_depth_is_not_planned_anew_unless_asked_for(profile, short_calls):
    how = Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16)
    sampling = dict(do_sample=True, seed=1)
    first, again = (generate(how, **sampling) for _ in range(2))
    assert len(first.stats.depths) == 1
    given = dict(drafter=first.choice.drafter, tree=first.choice.tree)
    plain = generate(**given, **sampling)
    np.testing.assert_array_equal(first.tokens, plain.tokens)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    asked = generate(dataclasses.replace(how, replan=True), **sampling)
    assert len(asked.stats.depths) > 1  # calls


@pytest.mark.usefixtures("foretold")
@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["mss", "naive"])
def test_a_verifier_is_for_those_that_draft(profile, verifier):
    """Plain decoding has none, neither in trials nor as what is chosen."""
    sampling = dict(do_sample=True, seed=1, verifier=verifier)
    for tried in (None, drafters("dear")):
        found = generate(Auto(tried, profile, tree=TREE, trial_rounds=16), **sampling)
        again = generate(found.choice, **sampling)
        if found.choice.drafter is None:
            plain = generate(None, **sampling | {"verifier": None})
            np.testing.assert_array_equal(found.tokens, plain.tokens)
            np.testing.assert_array_equal(again.tokens, plain.tokens)


@pytest.mark.usefixtures("foretold")
def test_a_stream_runs_what_was_chosen(profile):
    how = Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16)
    given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    rounds = magicjax.stream(tiny.model(), tiny.prompts(8), drafter=how, **given)
    first = next(rounds)
    assert [len(row) for row in first] == [1] * 8
    whole = [[row] for row in first]
    while True:
        try:
            for row, more in zip(whole, next(rounds), strict=True):
                row.append(more)
        except StopIteration as end:
            output = end.value
            break
    for row, wanted in zip(whole, tiny.expected(8), strict=True):
        np.testing.assert_array_equal(np.concatenate(row), wanted)
    assert output.choice.name == "self:streaming:12"
    for again in (how, output.choice):
        wrong = dict(drafter=again, tree=TREE)
        with pytest.raises(ValueError, match="leave tree out"):
            magicjax.stream(tiny.model(), tiny.prompts(8), **given, **wrong)
    with pytest.raises(ValueError, match="a stream has one tree"):
        anew = dataclasses.replace(how, replan=True)
        magicjax.stream(tiny.model(), tiny.prompts(8), **given, drafter=anew)


def test_what_cannot_pay_even_if_all_were_right_is_not_tried(profile):
    """A target of one layer whose draft is itself: no draft step is cheaper than a plain one."""
    slow = dataclasses.replace(HERE, round_seconds=1e3)
    cost_model.save_profile(profile, slow, {})
    found = generate(Auto(drafters("cheap", "dear"), profile, tree=TREE, trial_rounds=16))
    assert found.choice.name == "off" and found.choice.plan is None
    assert [trial.name for trial in found.choice.trials] == [""]
    assert all("at most 0.00 times" in why for why in found.choice.skipped.values())
    assert "no drafter could pay here" in str(found.choice)


def test_rows_that_end_with_prefills_token_need_no_trial(profile):
    found = generate(Auto(drafters("cheap"), profile, tree=TREE), max_new_tokens=1)
    assert found.choice.skipped == {"self:streaming:12": "all rows ended with prefill's token"}
    np.testing.assert_array_equal(found.tokens, generate(None, max_new_tokens=1).tokens)


def test_what_leaves_no_room_is_not_tried_and_a_target_that_does_not_fit_is_refused(profile):
    sizes, slots = sizes_of_model(tiny.model(), None), 64  # of the longest row at its end, rounded
    need = cost_model.memory_bytes(sizes, cost_model.Machine(HERE), 8, slots, sizes.kv_bytes) + 1
    cost_model.save_profile(profile, dataclasses.replace(HERE, memory=need), {})
    found = generate(Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16))
    assert "GB on each device, and the target leaves" in found.choice.skipped["self:streaming:12"]
    cost_model.save_profile(profile, dataclasses.replace(HERE, memory=1.0), {})
    with pytest.raises(ValueError, match="not one row fits"):
        generate(Auto(drafters("cheap"), profile, tree=TREE))


def asked(how):
    given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    return search.question(tiny.model(), tiny.prompts(8), how, given)


@pytest.mark.usefixtures("foretold")
def test_those_that_are_near_run_off_longer_and_a_turn_leaves_no_trace(profile, monkeypatch):
    """The second time only what was within NEAR of the fastest; the text stays the oracle's."""
    ran = []

    def turns(variants, state, count, least_seconds=0.0):
        ran.append([variant.settings.shape.depth for variant in variants])
        return of_fixture(variants, state, count, least_seconds)

    of_fixture = search.take_turns
    monkeypatch.setattr(search, "take_turns", turns)
    monkeypatch.setattr(search, "NEAR", 0.99)
    how = Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16)
    found = generate(how)
    assert ran[1:] == [[0, 1, 2, 4]] * 2  # the one finalist, then its chains, all of them near
    monkeypatch.setattr(search, "NEAR", 0.0)
    assert generate(how).choice.tree == found.choice.tree
    assert ran[3:] == [ran[0], [0, 1, 2, 4]]
    for row, wanted in zip(tiny.rows_of(found), tiny.expected(8), strict=True):
        np.testing.assert_array_equal(row, wanted)


def test_a_busy_moment_of_the_machine_misleads_a_trial_little(profile):
    """It is three times as slow until some trial's begin or end, from there on, or throughout.

    Where plain steps before and behind a trial differ, it is off by the root of that at most.
    """
    question = asked(Auto(drafters("cheap", "other"), profile, tree=TREE))

    def foretold(*busy, seconds=5e-3):
        """Busy are plain steps, the first trial, plain steps, the second, plain steps."""
        ways = search.Ways(question, Trial("", busy[0] * 2e-3, 1.0))
        for name, slow, after in zip(question.requests, busy[1::2], busy[2::2], strict=True):
            found = Trial(name, slow * seconds, 1.0, ((0.9,),), (1.9,), 1.9)
            ways.add(found, Trial("", after * 2e-3, 1.0))
        one, two = ([p.speed_up for p in ways._predictions(way)] for way in ways.found)
        return np.array(one), np.array(two)

    first, second = foretold(1, 1, 1, 1, 1)
    np.testing.assert_allclose(foretold(3, 3, 3, 3, 3), (first, second))
    np.testing.assert_allclose(foretold(3, 3, 3, 1, 1)[0], first)
    np.testing.assert_allclose(foretold(1, 1, 3, 3, 3)[1], second)
    for busy in ((3, 3, 1, 1, 1), (3, 1, 1, 1, 1), (1, 1, 3, 3, 3), (1, 3, 3, 3, 3)):
        off = np.abs(np.log(foretold(*busy)[0] / first))
        assert (off < np.log(3) / 2 + 1e-6).all()
    slower = foretold(1, 3, 1, 3, 1)  # a drafter that is slow by itself
    assert (slower[0] < 0.7 * first).all() and (slower[1] < 0.7 * second).all()


def test_finalists_fit_beside_each_other(profile):
    def ways_and_finalists(memory):
        cost_model.save_profile(profile, dataclasses.replace(HERE, memory=memory), {})
        question = asked(Auto(drafters("cheap", "other"), profile, tree=TREE))
        ways = search.Ways(question, Trial("", 1e-3, 1.0))
        best_first = [
            next(planner.predictions(question.sizes, ways._candidate(name), *question.where))
            for name in question.requests
        ]
        return ways, [p.drafter for p in ways._that_fit_together(best_first)]

    ways, both = ways_and_finalists(1e9)
    assert len(both) == 2
    need = 1e9 - ways.free + sum(ways._need(name) for name in both)
    assert ways_and_finalists(need + 1)[1] == both
    assert ways_and_finalists(need - 1)[1] == both[:1]


def test_usual_drafters_that_options_do_not_allow_are_told_with_the_reason(profile, monkeypatch):
    monkeypatch.setattr(search, "usual", lambda shortest: drafters("look-up", "cheap"))
    branches = magicjax.TokenTree.from_parents((-1, 0, 1, 1))
    question = asked(Auto(profile=profile, tree=branches))
    assert [*question.requests] == ["self:streaming:12"]
    assert "a look-up proposes chains" in question.refused["look-up:4"]
    found = generate(Auto(profile=profile, tree=branches, trial_rounds=16))
    assert found.choice.skipped["look-up:4"] == question.refused["look-up:4"]


def test_only_what_fits_the_prompts_is_tried_if_nothing_is_named():
    names = [
        [candidates.name_of(drafter) for drafter in search.usual(shortest)]
        for shortest in (10, 100, 5000)
    ]
    streams = ["self:streaming:64", "self:streaming:256", "self:streaming:1024"]
    snaps = ["self:snapkv:64", "self:snapkv:256", "self:snapkv:1024"]
    assert names == [
        ["look-up:4"],
        ["look-up:4", streams[0], snaps[0]],
        ["look-up:4", *streams, *snaps],
    ]


def test_names_and_costs_are_those_of_the_drafter():
    sizes = sizes_of_model(tiny.model(), None)
    small = magicjax.SmallModel(tiny.model("near"), policy="streaming", budget=40, kv_dtype="int8")
    draft = candidates.candidate_of(small, sizes, None, [[0.5]]).draft
    assert (draft.budget, draft.bits) == (40, 8)
    assert candidates.name_of(small) == f"small:{tiny.model('near').name}:streaming:40"
    assert candidates.name_of(tiny.drafter("near")).endswith(":full")
    assert candidates.candidate_of(tiny.drafter("near"), sizes, None, [[0.5]]).draft.budget is None
    assert candidates.candidate_of(magicjax.LookUp(), sizes, None, [[0.5]]).draft.sizes is None


REFUSED = {
    "a text": (lambda p: "automatic", {}, "drafter='automatic': of texts only 'auto' is one"),
    "a tree": (
        lambda p: Auto(profile=p),
        dict(tree=TREE),
        "drafter='auto' chooses the tree itself",
    ),
    "two of a name": (
        lambda p: Auto([*drafters("cheap"), *drafters("cheap")], p),
        {},
        "two of the drafters have one name: self:streaming:12",
    ),
    "none of the usual": (
        lambda p: Auto(profile=p, tree=magicjax.TokenTree.from_parents((-1, 0, 1, 1))),
        {},
        "none of the usual drafters fits; look-up:4: a look-up proposes chains",
    ),
    "a budget": (
        lambda p: Auto(drafters("cheap"), p, tree=magicjax.chain(16)),
        {},
        "budget=12 leaves",
    ),
    "a device": (lambda p: Auto(profile="h10"), {}, "device 'h10' does not exist: the nearest is"),
    "a dtype": (lambda p: Auto(profile="h100"), {}, "the rates of h100 are those of bfloat16"),
    "no file": (
        lambda p: Auto(profile="no.json"),
        {},
        "magicjax calibrate --target YOUR_TARGET --out no.json",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_requests_are_refused_before_anything_runs(what, profile, monkeypatch):
    monkeypatch.setattr(search, "behind_prompts", None)
    make, options, message = REFUSED[what]
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        generate(make(profile), **options)


WRONG = {
    "none": (dict(drafters=[]), "give at least one to try"),
    "an ensemble": (dict(drafters=[tiny.drafter("ensemble")]), "Ensemble cannot be planned with"),
    "few rounds": (dict(trial_rounds=8), "trial_rounds=8 must be at least 16: the first 8 load"),
    "short calls": (dict(rounds=8), "rounds=8: a call of the loop has at least 32"),
    "no tree": (dict(tree=magicjax.DynamicTree(9, 4, 3)), "must be a static tree"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_ways_to_choose_are_refused(what):
    given, message = WRONG[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        Auto(**given)


def test_without_a_profile_it_says_how_to_measure_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match="magicjax calibrate --target YOUR_TARGET --out .*profile-.*json"
    ):
        generate("auto")
    cost_model.save_profile(cost_model.default_profile(), HERE, {})
    assert cost_model.this_device() == HERE
