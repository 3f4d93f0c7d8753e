"""`drafter="auto"`: exact text, the choice that times and acceptance imply, clear errors."""

import dataclasses

import numpy as np
import pytest

import magicjax
from magicjax.decoding import memory, program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.paired_timing import PrefilledPrompts, time_decoders
from magicjax.decoding.request import RequestOptions
from magicjax.drafters.spec import text_of
from magicjax.model import RING_SPARE
from magicjax.prediction import choosing, cost_model, trials
from magicjax.prediction.choosing import Auto
from magicjax.prediction.trials import Trial
from magicjax.trees.sequoia import expected_tokens
from magicjax.trees.token_tree import ROOT_ONLY, chain
from tests.magicjax import keywords, tiny
from tests.magicjax.decoding import test_rings
from tests.quick import quick

SELF = "self:streaming:12:sinks=2"  # the name of the small cache below
TREE = tiny.TREES["chain4"]
PLAIN_S = 2e-3


@pytest.fixture(autouse=True)
def no_profile(tmp_path, monkeypatch):
    """No candidate is skipped by the profile of the machine that runs the tests."""
    monkeypatch.setattr(cost_model, "default_profile", lambda: tmp_path / "none.json")


@pytest.fixture
def known_times(monkeypatch):
    """Replaces measured times by those of `round_seconds`, so that nothing depends on noise."""

    def rounds(decoder, prefilled):
        (counted, seconds), *others = rounds_of(decoder, prefilled)
        return (counted, seconds and round_seconds(decoder)), *others

    def timed(prefilled, decoders, repeats, min_seconds=0.0):
        _, *others = time_decoders(prefilled, decoders, 1)
        return [[round_seconds(one)] for one in decoders], *others

    rounds_of = trials.run_trial
    monkeypatch.setattr(choosing, "run_trial", rounds)
    monkeypatch.setattr(trials, "time_decoders", timed)
    monkeypatch.setattr(choosing, "RUN_ROUNDS", 2)  # the outputs are short
    # Every tree is a program.
    monkeypatch.setattr(trials, "DEPTHS", (1, 2, 4))
    monkeypatch.setattr(trials, "NODES", (8,))


def round_seconds(decoder) -> float:
    if decoder.drafter is None:
        return PLAIN_S
    level = 3e-3 if getattr(decoder.drafter, "budget", None) == 16 else 2e-4
    return 1.05 * PLAIN_S + level * decoder.loop_settings.shape.depth


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


@pytest.mark.usefixtures("known_times")
def test_the_text_is_exact_and_the_choice_can_be_reused(tally):
    first = generate(Auto(drafters("cheap", "expensive", "prompt-lookup"), TREE))
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(first))
    choice = first.choice
    assert choice.name == SELF and choice.skipped == {}
    assert {trial.name for trial in choice.trials} == {SELF, "prompt-lookup:4", "self:snapkv:16"}
    assert len({name for name, _ in choice.timed}) == choosing.FINALISTS
    assert [*choice.timed.values()] == sorted(choice.timed.values(), reverse=True)
    assert [*choice.times] == [d for d in (0, 1, 2, 4) if d <= choice.tree.depth]
    assert first.stats.plan_s > 0 and first.stats.depths[0] == choice.tree.depth
    assert len(first.stats.depths) > 2
    assert str(choice).splitlines()[3].startswith(f"chosen: {SELF}, depth")
    again = generate(choice)
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(again))
    assert again.choice is choice and again.stats.plan_s == 0


KINDS = {
    "a cascade": lambda: tiny.drafter("cascade"),
    "suffix": lambda: tiny.drafter("suffix"),
    "eagle": lambda: tiny.drafter("eagle"),
    "an ensemble": lambda: magicjax.Ensemble((tiny.drafter("self"), magicjax.PromptLookup())),
    "an ensemble with trees": lambda: magicjax.Ensemble(
        (tiny.drafter("self"), magicjax.PromptLookup()), (chain(3), chain(2))
    ),
}


@pytest.mark.usefixtures("known_times")
@pytest.mark.parametrize("kind", quick(KINDS, "a cascade"))
@pytest.mark.slow
def test_a_candidate_can_be_any_drafter(kind, tally, monkeypatch):
    monkeypatch.setattr(choosing, "LEAST_GAIN", 0.0)  # whether or not it gains
    drafter = KINDS[kind]()
    output = generate(Auto((drafter, *drafters("expensive")), TREE))
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(output))
    assert output.choice.name == text_of(drafter) and output.stats.drafted > 0
    again = generate(output.choice)
    np.testing.assert_array_equal(again.tokens, output.tokens)
    sampling = dict(temperature=1e-3, seed=1)  # as good as greedy
    np.testing.assert_array_equal(generate(output.choice, **sampling).tokens, output.tokens)


@pytest.mark.usefixtures("known_times")
@pytest.mark.parametrize(
    ("kind", "ranks"), quick([("cheap", 2), ("prompt-lookup", 1)], ("cheap", 2))
)
@pytest.mark.slow
def test_the_tree_of_one_drafter_is_chosen(kind, ranks, tally):
    (drafter,) = drafters(kind)
    output = generate(drafter, tree="auto")
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(output))
    (trial,) = output.choice.trials
    assert {len(row) for row in trial.acceptance} == {ranks}
    trees = [tree for _, tree in output.choice.timed]
    assert any(tree.width > 1 for tree in trees) == (ranks > 1)
    assert {chain(1), chain(2), trial.tree} <= {*trees}
    assert output.choice.tree in (None, ROOT_ONLY, trees[0])


@pytest.mark.parametrize("drafter", [None, "auto"])
def test_a_tree_of_no_drafter_is_not_chosen(drafter):
    with pytest.raises(ValueError, match="tree='auto' chooses the tree of one drafter: name it"):
        generate(drafter, tree="auto")


def test_an_engine_refuses_to_choose_a_tree():
    with pytest.raises(ValueError, match="tree='auto' is not supported here"):
        magicjax.Engine(tiny.model(), tiny.drafter("self"), "auto")


@pytest.mark.usefixtures("known_times")
def test_if_no_drafter_is_faster_it_decodes_plainly():
    output = generate(Auto(drafters("expensive"), TREE))
    choice = output.choice
    assert choice.drafter is None and choice.name == "off" and not choice.times
    assert choice.timed and max(choice.timed.values()) < choosing.LEAST_GAIN
    assert output.stats.depths == (0,) and output.stats.tau == 1.0
    assert "chosen: plain decoding; the fastest drafter is self:snapkv:16" in str(choice)
    np.testing.assert_array_equal(output.tokens, generate(None).tokens)


@pytest.mark.usefixtures("known_times")
@pytest.mark.slow
def test_a_lookup_may_gain_later_in_the_text(tally, monkeypatch):
    monkeypatch.setattr(choosing, "LEAST_GAIN", 99.0)
    first = generate(Auto(drafters("prompt-lookup", "cheap"), TREE))
    choice = first.choice
    assert choice.name == "prompt-lookup:4" and choice.tree == ROOT_ONLY and 0 in choice.times
    assert "chosen: plain decoding until prompt-lookup:4 gains; the fastest" in str(choice)
    assert first.stats.depths[0] == 0
    for output in (first, generate(choice)):
        tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(output))
    texts, output = streamed(choice)
    assert output.stats.drafted == 0
    for row, expected in zip(texts, tiny.expected(8), strict=True):
        np.testing.assert_array_equal(row, expected)
    sampling = dict(temperature=1.0, seed=1)
    plain = generate(None, **sampling)
    np.testing.assert_array_equal(generate(choice, **sampling).tokens, plain.tokens)


@pytest.mark.usefixtures("known_times")
@pytest.mark.slow
def test_rings_that_a_trial_overwrites_are_prefilled_again():
    """A trial in which all drafts are accepted goes beyond the spare slots of a ring."""
    target, prompts = test_rings.model(), test_rings.prompts()[:1]
    options = dict(max_tokens=2 * RING_SPARE, eos_token_id=[])
    plain = keywords.generate(target, prompts, **options)
    settings = Auto([magicjax.FullCacheSpeculation()], chain(8))
    auto = keywords.generate(target, prompts, drafter=settings, **options)
    assert auto.choice.trials[0].tau > 5
    np.testing.assert_array_equal(auto.tokens, plain.tokens)


@pytest.mark.usefixtures("known_times")
@pytest.mark.slow
def test_under_sampling_the_tree_is_fixed():
    settings, sampling = Auto(drafters("cheap"), TREE), dict(temperature=1.0, seed=1)
    first, again = (generate(settings, **sampling) for _ in range(2))
    assert len(first.stats.depths) == 1
    fixed = generate(first.choice.drafter, tree=first.choice.tree, **sampling)
    np.testing.assert_array_equal(first.tokens, fixed.tokens)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.tokens, generate(first.choice, **sampling).tokens)


def streamed(drafter):
    """Returns (the new tokens of each row, the output) of a stream."""
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    rounds = keywords.stream(tiny.model(), tiny.prompts(8), drafter=drafter, **options)
    texts = [[row] for row in next(rounds)]
    while True:
        try:
            for row, more in zip(texts, next(rounds), strict=True):
                row.append(more)
        except StopIteration as end:
            return [np.concatenate(row) for row in texts], end.value


@pytest.mark.usefixtures("known_times")
def test_a_stream_runs_the_choice_after_one_prefill(monkeypatch):
    prefills, prefill = [], Decoder.prefill

    def recorded(*arguments, **options):
        prefills.append(arguments)
        return prefill(*arguments, **options)

    monkeypatch.setattr(Decoder, "prefill", recorded)
    drafter = Auto(drafters("cheap"), TREE)
    for _ in range(2):  # the second stream reuses the choice
        compiled, _ = program_cache.totals()
        texts, output = streamed(drafter)
        assert output.stats.compilations == program_cache.totals()[0] - compiled
        drafter = output.choice
        assert len(prefills) == 1
        prefills.clear()
        for row, expected in zip(texts, tiny.expected(8), strict=True):
            np.testing.assert_array_equal(row, expected)
        assert output.choice.name == SELF and output.stats.prefill_s > 0


def test_a_choice_of_a_drafter_excludes_a_tree():
    choice = choosing.Choice(drafters("cheap")[0], TREE, (), {}, {}, {})
    for drafter in (Auto(drafters("cheap"), TREE), choice):
        with pytest.raises(ValueError, match="omit tree"):
            magicjax.stream(tiny.model(), tiny.prompts(8), drafter=drafter, tree=TREE)


def test_a_candidate_that_cannot_be_faster_is_not_compiled(tmp_path):
    here = cost_model.Device(
        *("here", 2e10, 1e11, 1e10, None), dtype="float32", layer_seconds=1e-3, round_seconds=1e3
    )
    cost_model.save_profile(tmp_path / "here.json", here, {})
    settings = Auto(drafters("cheap", "expensive"), TREE, tmp_path / "here.json")
    choice = generate(settings).choice
    assert choice.name == "off" and choice.timed == {} and choice.trials == ()
    assert all("speedup at most 0.00" in reason for reason in choice.skipped.values())
    assert "chosen: plain decoding; no drafter was timed" in str(choice)
    with pytest.raises(FileNotFoundError):
        generate(dataclasses.replace(settings, profile=tmp_path / "none.json"))


@pytest.mark.slow
def test_rows_that_end_with_prefills_token_need_no_trial():
    output = generate(Auto(drafters("cheap"), TREE), max_tokens=1)
    assert output.choice.skipped == {SELF: "prefill's token ended all rows"}
    np.testing.assert_array_equal(output.tokens, generate(None, max_tokens=1).tokens)


def test_a_candidate_that_does_not_fit_the_memory_has_no_trial(monkeypatch):
    def check(request, *arguments):
        if request.drafter is not None:
            raise memory.OutOfMemoryError("too large")

    monkeypatch.setattr(memory, "check", check)
    assert generate(Auto(drafters("cheap"), TREE)).choice.skipped == {SELF: "too large"}


REFUSED = {
    "no drafter": (dict(drafters=()), "drafters=.. is empty"),
    "the same drafter twice": (dict(drafters=drafters("cheap", "cheap")), "remove duplicates"),
    "a text in place of a list": (dict(drafters="prompt-lookup:4"), "is one drafter: pass a list"),
    "a drafter in place of a list": (
        dict(drafters=magicjax.PromptLookup()),
        "is one drafter: pass a list",
    ),
    "what is no drafter": (dict(drafters=[4]), "drafters has 4: pass drafters, or texts"),
    "a tree of a root": (dict(tree=ROOT_ONLY), "at least one child"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_are_checked(case):
    settings, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        Auto(**settings)


def test_a_candidate_can_be_a_text():
    options = RequestOptions(drafter=Auto(["prompt-lookup:3", "suffix:4"]))
    found = choosing.validated_candidates(
        tiny.model(), tiny.prompts(8), magicjax.SamplingParams(max_tokens=4), options
    )
    assert [*found.requests] == ["prompt-lookup:3", "suffix:4"]


def test_a_shallower_chain_can_be_expected_to_be_faster():
    """Of a trial of chain:4, whose round takes 3 plain steps: a chain of 1 takes 1.8."""
    rates = ((0.9,), (0.1,), (0.1,), (0.1,))
    trial = Trial("a", chain(4), 3.0, rates, expected_tokens(chain(4), rates))
    assert trial.tokens(chain(1)) == pytest.approx(1.9)
    assert trial.best == pytest.approx(1.9 / (1 + 2 * 2 / 5))
    assert trial.best > trial.tau / trial.ratio


@pytest.mark.slow
def test_a_sampled_trial_draws_other_numbers_than_the_run(monkeypatch):
    """The naive text of a run is that of plain sampling; a trial's text differs in every row."""
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, temperature=1.0, seed=3)
    request = keywords.prepare(
        tiny.model(),
        tiny.prompts(8),
        drafter=tiny.drafter("near"),
        tree=TREE,
        verifier="naive",
        **arguments,
    )
    decoder, outputs, decode = Decoder(request), [], Decoder.decode

    def recorded(*arguments, **options):
        state = decode(*arguments, **options)
        outputs.append(np.array(state.output))
        return state

    prefilled = PrefilledPrompts.create(request, [request.drafter])
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "decode", recorded)
        _, prefilled = trials.run_trial(decoder, prefilled)
    output = np.asarray(decoder.decode(prefilled.start(decoder)).output)[:, : tiny.NEW]
    plain = keywords.generate(tiny.model(), tiny.prompts(8), **arguments)
    for row, (length, expected) in enumerate(zip(plain.lengths, plain.tokens, strict=True)):
        np.testing.assert_array_equal(output[row, :length], expected[:length])
        if length > 4:
            assert (outputs[-1][row, 1:length] != expected[1:length]).any()


@pytest.mark.slow
def test_interleaved_timing_has_no_effect_on_later_runs():
    requests = [
        keywords.prepare(
            tiny.model(),
            tiny.prompts(8),
            drafter=drafter,
            tree=TREE,
            max_tokens=tiny.NEW,
            eos_token_id=tiny.NEVER,
        )
        for drafter in drafters("cheap", "other")
    ]
    prefilled = PrefilledPrompts.create(requests[0], [each.drafter for each in requests])
    decoders = [
        Decoder(request, request.settings.with_tree(tree))
        for request in requests
        for tree in (TREE, tiny.TREES["chain2"])
    ]
    times, prefilled = time_decoders(prefilled, decoders, 2)
    assert np.array(times).shape == (4, 2) and np.min(times) > 0
    for request in requests:
        decoder = Decoder(request)
        state = decoder.decode(prefilled.start(decoder))
        np.testing.assert_array_equal(
            np.asarray(state.output)[:, : tiny.NEW], np.stack(tiny.expected(8))
        )
        prefilled = prefilled.reset(state)
