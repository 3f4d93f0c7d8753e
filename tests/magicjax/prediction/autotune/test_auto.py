"""`drafter="auto"`: exact text, the choice that costs and acceptance imply, clear errors."""

import dataclasses
import re

import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.paired_timing import PrefilledPrompts, time_decoders
from magicjax.decoding.request import RequestOptions
from magicjax.prediction import cost_model
from magicjax.prediction.autotune import auto, search
from magicjax.prediction.autotune.auto import Auto
from magicjax.prediction.autotune.trial import Trial
from magicjax.prediction.planner.candidates import model_sizes, name_of
from magicjax.trees.token_tree import ROOT_ONLY
from tests.magicjax import keywords, tiny

SELF = "self:streaming:12:sinks=2"  # the name of the small cache below

TREE = tiny.TREES["chain4"]
# A pass of the tiny target takes 2 ms, a round 0.1 ms more, and a draft the time of its budget.
LEVELS = {12: 2e-4, 16: 3e-3}
HERE = cost_model.Device(
    *("here", 2e10, 1e11, 1e10, None),
    dtype="float32",
    layer_seconds=1e-3,
    round_seconds=1e-4,
    measured=(
        cost_model.Steps(
            model_sizes(tiny.model(), None).key,
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
def predicted_times(monkeypatch):
    """Replaces every measured time by the predicted one, so that nothing depends on noise."""

    def trial(request, name, prefilled, rounds, tree=None):
        result, *others = run_trial(request, name, prefilled, rounds, tree)
        drafter = None if tree is ROOT_ONLY else request.drafter
        depth = (tree or TREE).depth
        return dataclasses.replace(result, seconds=round_seconds(drafter, depth)), *others

    def timed(prefilled, variants, repeats, min_seconds=0.0):
        _, *others = time_decoders(prefilled, variants, 1)
        shapes = [(one.request.drafter, one.settings.shape.depth) for one in variants]
        return [[round_seconds(*shape)] for shape in shapes], *others

    run_trial = search.run_trial
    monkeypatch.setattr(search, "run_trial", trial)
    monkeypatch.setattr(search, "time_decoders", timed)


def round_seconds(drafter, depth: int) -> float:
    """Returns the predicted seconds of a round; without a drafter of a plain step."""
    if drafter is None:
        return 2e-3
    level = 0.0 if isinstance(drafter, magicjax.PromptLookup) else 1e-3
    return depth * LEVELS.get(getattr(drafter, "budget", None), level) + 2.1e-3


@pytest.fixture
def short_calls(monkeypatch):
    """Calls of two rounds, because the outputs are short."""
    run = auto.run_adaptive
    monkeypatch.setattr(auto, "run_adaptive", lambda *arguments: run(*arguments[:-1], 2))


def generate(drafter, **options):
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return keywords.generate(tiny.model(), tiny.prompts(8), drafter=drafter, **arguments)


def drafters(*kinds):
    made = {
        "cheap": tiny.drafter("self"),
        "expensive": magicjax.SelfSpeculation("snapkv", budget=16),
        "other": tiny.drafter("other"),
        "prompt-lookup": magicjax.PromptLookup(),
    }
    return [made[kind] for kind in kinds]


@pytest.mark.usefixtures("predicted_times")
def test_the_text_is_exact_and_the_choice_can_be_reused(profile, tally, short_calls):
    settings = Auto(drafters("cheap", "prompt-lookup"), profile, tree=TREE, trial_rounds=16)
    first = generate(settings)
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(first))
    choice = first.choice
    assert choice.name == SELF
    names = {trial.name for trial in choice.trials} | {*choice.skipped}
    assert names == {"", SELF, "prompt-lookup:4"}
    assert first.stats.plan_s > 0 and first.stats.depths[0] == choice.tree.depth
    assert len(first.stats.depths) > 2
    assert {*choice.predicted_speedup} <= names
    assert [*choice.round_seconds] == [0, 1, 2, 4]
    again = generate(choice)
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(again))
    assert again.choice is choice and again.stats.plan_s == 0


@pytest.mark.usefixtures("predicted_times")
@pytest.mark.parametrize(("kind", "ranks"), [("cheap", 2), ("prompt-lookup", 1)])
def test_the_tree_of_one_drafter_is_chosen(kind, ranks, tmp_path, monkeypatch, tally):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cost_model.save_profile(cost_model.default_profile(), HERE, {})
    (drafter,) = drafters(kind)
    output = generate(drafter, tree="auto")
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(output))
    choice = output.choice
    assert [trial.name for trial in choice.trials] == ["", name_of(drafter)]
    assert {len(row) for row in choice.trials[1].acceptance} == {ranks}
    assert (choice.drafter is None) == (choice.timed[0].speedup < search.LEAST_GAIN)
    assert choice.tree in (None, choice.timed[0].tree)


@pytest.mark.parametrize("drafter", [None, "auto"])
def test_a_tree_of_no_drafter_is_not_chosen(drafter):
    with pytest.raises(ValueError, match="tree='auto' chooses the tree of one drafter: name it"):
        generate(drafter, tree="auto")


def test_an_engine_refuses_to_choose_a_tree():
    with pytest.raises(ValueError, match="tree='auto' is not supported here"):
        magicjax.Engine(tiny.model(), tiny.drafter("self"), "auto")


@pytest.mark.usefixtures("predicted_times")
def test_if_no_drafter_is_faster_it_decodes_plainly(profile):
    output = generate(Auto(drafters("expensive", "other"), profile, tree=TREE, trial_rounds=16))
    choice = output.choice
    assert choice.drafter is None and choice.name == "off" and not choice.round_seconds
    assert choice.timed and choice.timed[0].speedup < search.LEAST_GAIN
    assert "speedup at most 0.79" in choice.skipped["self:snapkv:16"]
    assert output.stats.depths == (0,) and output.stats.tau == 1.0
    np.testing.assert_array_equal(output.tokens, generate(None).tokens)


@pytest.mark.usefixtures("predicted_times")
@pytest.mark.slow
def test_under_sampling_the_depth_is_adaptive_only_on_request(profile, short_calls):
    settings = Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16)
    sampling = dict(temperature=1.0, seed=1)
    first, again = (generate(settings, **sampling) for _ in range(2))
    assert len(first.stats.depths) == 1
    arguments = dict(drafter=first.choice.drafter, tree=first.choice.tree)
    fixed = generate(**arguments, **sampling)
    np.testing.assert_array_equal(first.tokens, fixed.tokens)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    adaptive = generate(dataclasses.replace(settings, adaptive_depth=True), **sampling)
    assert len(adaptive.stats.depths) > 1  # calls


def streamed(drafter):
    """Returns (the new tokens of each row, the output) of a stream."""
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    rounds = keywords.stream(tiny.model(), tiny.prompts(8), drafter=drafter, **options)
    first = next(rounds)
    assert [len(row) for row in first] == [1] * 8
    texts = [[row] for row in first]
    while True:
        try:
            for row, more in zip(texts, next(rounds), strict=True):
                row.append(more)
        except StopIteration as end:
            return [np.concatenate(row) for row in texts], end.value


@pytest.mark.usefixtures("predicted_times")
def test_a_stream_runs_the_choice_after_one_prefill(profile, monkeypatch):
    prefills, prefill = [], Decoder.prefill

    def recorded(*arguments, **options):
        prefills.append(arguments)
        return prefill(*arguments, **options)

    monkeypatch.setattr(Decoder, "prefill", recorded)
    settings = Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16)
    drafter = settings
    for _ in range(2):  # the second stream reuses the choice
        compiled, _ = program_cache.totals()
        texts, output = streamed(drafter)
        assert output.stats.compilations == program_cache.totals()[0] - compiled
        drafter = output.choice
        assert len(prefills) == 1
        prefills.clear()
        for row, expected in zip(texts, tiny.expected(8), strict=True):
            np.testing.assert_array_equal(row, expected)
        assert output.choice.name == SELF
        assert len(output.stats.acceptance_by_depth) == output.choice.tree.depth
        assert output.stats.prefill_s > 0


@pytest.mark.usefixtures("predicted_times")
def test_a_stream_refuses_a_tree_and_an_adaptive_depth(profile):
    settings = Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16)
    choice = magicjax.Choice(drafters("cheap")[0], TREE, (), (), {}, {}, {}, settings)
    for drafter in (settings, choice):
        with pytest.raises(ValueError, match="omit tree"):
            magicjax.stream(tiny.model(), tiny.prompts(8), drafter=drafter, tree=TREE)
    adaptive = dataclasses.replace(settings, adaptive_depth=True)
    with pytest.raises(ValueError, match="a stream has a fixed tree"):
        magicjax.stream(tiny.model(), tiny.prompts(8), drafter=adaptive)


def test_a_candidate_below_its_upper_bound_has_no_trial(profile):
    slow = dataclasses.replace(HERE, round_seconds=1e3)
    cost_model.save_profile(profile, slow, {})
    settings = Auto(drafters("cheap", "expensive"), profile, tree=TREE, trial_rounds=16)
    choice = generate(settings).choice
    assert choice.name == "off" and choice.timed == ()
    assert [trial.name for trial in choice.trials] == [""]
    assert all("speedup at most 0.00" in reason for reason in choice.skipped.values())
    assert "chosen: plain decoding; no drafter was timed" in str(choice)


@pytest.mark.slow
def test_rows_that_end_with_prefills_token_need_no_trial(profile):
    output = generate(Auto(drafters("cheap"), profile, tree=TREE), max_tokens=1)
    assert output.choice.skipped == {SELF: "prefill's token ended all rows"}
    np.testing.assert_array_equal(output.tokens, generate(None, max_tokens=1).tokens)


def test_memory_limits_candidates_and_the_target(profile):
    sizes, slots = model_sizes(tiny.model(), None), 64  # of the longest row at its end, rounded
    need = cost_model.memory_bytes(sizes, cost_model.Machine(HERE), 8, slots, sizes.kv_bytes) + 1
    cost_model.save_profile(profile, dataclasses.replace(HERE, memory=need), {})
    choice = generate(Auto(drafters("cheap"), profile, tree=TREE, trial_rounds=16)).choice
    assert "GB per device; the target leaves" in choice.skipped[SELF]
    cost_model.save_profile(profile, dataclasses.replace(HERE, memory=1.0), {})
    with pytest.raises(ValueError, match="not one row fits"):
        generate(Auto(drafters("cheap"), profile, tree=TREE))


def problem_of(settings):
    params = magicjax.SamplingParams(max_tokens=tiny.NEW)
    options = RequestOptions(drafter=settings, eos_token_id=tiny.NEVER)
    return search.placed(search.make_problem(tiny.model(), tiny.prompts(8), params, options))


@pytest.mark.usefixtures("predicted_times")
def test_finalists_are_timed_and_then_chains_of_the_fastest(profile, monkeypatch):
    depths, timed = [], search.time_decoders
    trials, run_trial = [], search.run_trial

    def tried(request, name, prefilled, rounds, tree=None):
        trials.append((name, tree or TREE))
        return run_trial(request, name, prefilled, rounds, tree)

    def recorded(prefilled, variants, *arguments):
        depths.append([variant.settings.shape.depth for variant in variants])
        return timed(prefilled, variants, *arguments)

    monkeypatch.setattr(search, "time_decoders", recorded)
    monkeypatch.setattr(search, "run_trial", tried)
    settings = Auto(drafters("cheap", "prompt-lookup"), profile, tree=TREE, trial_rounds=16)
    output = generate(settings)
    assert [sorted(each) for each in depths[1:]] == [[0, 1, 2, 4]]
    assert len(depths[0]) == 3 and depths[0][0] == 0
    drafted = [trial for trial in trials if trial[0]]
    assert len({*drafted}) == len(drafted) >= 4  # no tree runs two trials
    for row, expected in zip(tiny.rows_of(output), tiny.expected(8), strict=True):
        np.testing.assert_array_equal(row, expected)


def test_interleaved_timing_has_no_effect_on_later_runs(profile):
    problem = problem_of(Auto(drafters("cheap", "other"), profile, tree=TREE))
    prefilled = PrefilledPrompts.create(problem.request, drafters("cheap", "other"))
    decoders = [
        Decoder(request, request.settings.with_tree(tree))
        for request in problem.requests.values()
        for tree in (TREE, tiny.TREES["chain2"])
    ]
    times, prefilled = time_decoders(prefilled, decoders, 2)
    assert np.array(times).shape == (4, 2) and np.min(times) > 0
    for request in problem.requests.values():
        decoder = Decoder(request)
        state = decoder.decode(prefilled.start(decoder))
        np.testing.assert_array_equal(
            np.asarray(state.output)[:, : tiny.NEW], np.stack(tiny.expected(8))
        )
        prefilled = prefilled.reset(state)


def test_a_busy_moment_of_the_machine_has_little_effect_on_a_trial(profile):
    """The machine is three times slower before or after some trial, or throughout.

    If the plain steps before and after a trial differ, its error is at most the square root.
    """
    problem = problem_of(Auto(drafters("cheap", "other"), profile, tree=TREE))

    def speedups(*busy, seconds=5e-3):
        """Busy are plain steps, the first trial, plain steps, the second trial, plain steps."""
        state = search.DrafterSearch(problem, None, plain_seconds=busy[0] * 2e-3)
        for name, slow, after in zip(problem.requests, busy[1::2], busy[2::2], strict=True):
            trial = Trial(name, slow * seconds, 1.0, ((0.9,),), (1.9,), 1.9)
            state = search.add_trial(state, trial, Trial("", after * 2e-3, 1.0))
        one, two = ([p.speedup for p in planner_order(problem, each)] for each in state.candidates)
        return np.array(one), np.array(two)

    first, second = speedups(1, 1, 1, 1, 1)
    np.testing.assert_allclose(speedups(3, 3, 3, 3, 3), (first, second))
    np.testing.assert_allclose(speedups(3, 3, 3, 1, 1)[0], first)
    np.testing.assert_allclose(speedups(1, 1, 3, 3, 3)[1], second)
    for busy in ((3, 3, 1, 1, 1), (3, 1, 1, 1, 1), (1, 1, 3, 3, 3), (1, 3, 3, 3, 3)):
        off = np.abs(np.log(speedups(*busy)[0] / first))
        assert (off < np.log(3) / 2 + 1e-6).all()
    slower = speedups(1, 3, 1, 3, 1)  # a drafter that is slow by itself
    assert (slower[0] < 0.7 * first).all() and (slower[1] < 0.7 * second).all()


def planner_order(problem, candidate):
    return sorted(problem.predictions(candidate), key=lambda p: p.tree.depth)


REFUSED = {
    "a string": (lambda p: "automatic", {}, "'automatic' is not a drafter (drafters: "),
    "a tree": (
        lambda p: Auto(profile=p),
        dict(tree=TREE),
        "drafter='auto' chooses the tree: omit tree",
    ),
    "no default": (
        lambda p: Auto(profile=p, tree=magicjax.TokenTree.from_parents((-1, 0, 1, 1))),
        {},
        "no default drafter supports these options; prompt-lookup:4: prompt lookup proposes chains",
    ),
    "a dtype": (lambda p: Auto(profile="h100"), {}, "the rates of h100 are for bfloat16"),
    "no file": (
        lambda p: Auto(profile="no.json"),
        {},
        "magicjax calibrate --target YOUR_TARGET --out no.json",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_requests_are_refused_before_prefill(what, profile, monkeypatch):
    monkeypatch.setattr(search, "PrefilledPrompts", None)
    make, options, message = REFUSED[what]
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        generate(make(profile), **options)


WRONG = {
    "none": (dict(drafters=[]), "drafters=() is empty: give at least one"),
    "an ensemble": (
        dict(drafters=[tiny.drafter("ensemble")]),
        "the cost of Ensemble is not modelled",
    ),
    "few rounds": (dict(trial_rounds=8), "trial_rounds=8 is too small: at least 16"),
    "short calls": (dict(rounds_per_call=8), "rounds_per_call=8 is too small: at least 32"),
    "no tree": (dict(tree=magicjax.DynamicTree(9, 4, 3)), "must be a static tree"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_settings_are_refused(what):
    arguments, message = WRONG[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        Auto(**arguments)


def test_without_a_profile_the_error_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match="magicjax calibrate --target YOUR_TARGET --out .*profile-.*json"
    ):
        generate("auto")
    cost_model.save_profile(cost_model.default_profile(), HERE, {})
    assert cost_model.load_profile(cost_model.default_profile()) == HERE
