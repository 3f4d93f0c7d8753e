"""Texts of an adaptive engine, which do not depend on what drafts."""

import dataclasses

import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.decoding.controller import PLAIN, Controller, RoundTimes
from magicjax.drafters.text_lookup import TextLookup
from magicjax.engine import loops
from tests.magicjax import keywords, tiny
from tests.magicjax.engine import engines, test_sampled, test_schedules
from tests.quick import quick


@dataclasses.dataclass(frozen=True)
class Forced(Controller):
    """Runs all modes, whatever they cost: first as the best one, then as probes beside plain."""

    call: int = 0

    def chosen(self, live):
        order = (*self.modes[::-1], *self.modes)
        n = self.call % len(order)
        best = order[n] if n < len(self.modes) else PLAIN
        return dataclasses.replace(self.running(order[n], best, live), call=self.call + 1)


def forced(name: str, **options) -> magicjax.Engine:
    """Returns an engine that has compiled all modes and runs them in a fixed order."""
    engine = engines.engine(name, adaptive=True, **options)
    engine.warm_up()
    engine._loops.controller = Forced(**vars(engine._loops.controller))
    return engine


CHAIN = tiny.TREES["chain1"]  # one depth, because each of several is compiled
SPECULATING = [name for name in engines.DRAFTERS if name != "plain"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECULATING)
def test_greedy_texts_and_caches_do_not_depend_on_the_modes(name, tally):
    eos = int(engines.expected(4)[6])
    engine = forced(name, eos_token_id=eos, rounds_per_step=1)
    compiled = program_cache.totals()
    test_schedules.run_schedule(engine, eos, seed=0, requests=12, tally=tally)
    assert program_cache.totals() == compiled
    drafter, tree = engines.DRAFTERS[name]
    deepest = tree.shape.depth
    rounds = engine.stats.rounds_by_arm
    whole_only = isinstance(tree, magicjax.DynamicTree) or isinstance(drafter, magicjax.Cascade)
    depths = {mode.depth for mode in rounds}
    assert depths == ({0, deepest} if whole_only else {0, 1, 2, deepest})
    members = len(loops.names_of(drafter))
    assert len(rounds) == 1 + (len(depths) - 1) * members + (members > 1)
    assert all(rounds.values())
    assert 0 < engine.stats.probe_rounds < sum(rounds.values()) - rounds[PLAIN]
    simulated = [
        one for one in engine._loops.controller.acceptance.values() if one.simulated is not None
    ]
    named = drafter.members() if members > 1 else [drafter]
    assert len(simulated) == sum(isinstance(each, TextLookup) for each in named)


@pytest.mark.slow
def test_warm_up_compiles_the_programs_of_drafts_even_if_plain_decoding_is_faster(monkeypatch):
    monkeypatch.setattr(Controller, "would_disable", lambda self, *_: self.can_be_disabled)
    engine = engines.engine("small", CHAIN, adaptive=True, slots=2)
    program_cache.clear()
    before = program_cache.totals()[0]
    engine.warm_up()
    assert engine._loops.controller.can_be_disabled
    compiled = program_cache.totals()
    assert compiled[0] - before == engine.num_programs
    monkeypatch.setattr(Controller, "would_disable", lambda self, *_: False)
    for prompt in engines.prompts()[:2]:
        engine.submit(prompt).result()
    assert program_cache.totals() == compiled


def test_after_plain_rounds_a_draft_model_drafts_for_new_requests_only(tally):
    engine = engines.engine("small", CHAIN, adaptive=True, slots=2, rounds_per_step=1)
    engine.warm_up()
    controller, prompts = engine._loops.controller, engines.prompts()[:3]
    order = iter([PLAIN] * 2 + [max(controller.modes, key=lambda mode: mode.depth)] * 100)

    class InOrder(Controller):
        def chosen(self, live):
            return self.running(*[next(order)] * 2, live)

        def would_disable(self, live, joining):
            return False

    engine._loops.controller = InOrder(**vars(controller))
    handles = [engine.submit(prompts[0]), engine.submit(prompts[1])]
    for _ in range(6):
        engine.step()
        assert engines.check_rows(engine)
    state, texts = engines.rows_of(engine)
    missing = np.array([len(text) - 1 for text in texts]) - np.asarray(state.drafter.tokens)
    assert engine.stats.rounds_by_arm[PLAIN] and engine._loops.controller.disabled == {0, 1}
    assert (missing > 0).all() and (np.asarray(state.drafter.tokens) > 0).all()
    engine.run()
    handles.append(engine.submit(prompts[2]))
    engine.run()
    results = [handle.result() for handle in handles]
    rows = [result.tokens for result in results]
    tally.compare(tiny.model(), prompts, map(engines.expected, range(3)), rows)
    accepted = [result.stats.accepted for result in results]
    assert accepted[2] > 2 * max(accepted[:2])


def test_requests_that_join_a_busy_engine_do_not_draft(tally):
    engine = engines.engine("small", CHAIN, adaptive=True, slots=2)
    engine.warm_up()
    compiled, controller, prompts = (
        program_cache.totals(),
        engine._loops.controller,
        engines.prompts(),
    )
    plain, drafts = ((1.0, 9.0), (1.1, 90.0)), max(controller.modes, key=lambda mode: mode.depth)
    seconds = dict(zip((PLAIN, drafts), plain, strict=True))  # drafts pay for a single row
    times = RoundTimes((1,), seconds, (1, 2))
    modes: dict = dict(modes=(PLAIN, drafts), mode=drafts, best=drafts, times=times)
    engine._loops.controller = dataclasses.replace(controller, **modes)
    handles = [engine.submit(prompt) for prompt in prompts[:2]]
    while len(engine._scheduler.running) < 2:
        engine.step()
    assert engine._loops.controller.disabled == {0, 1} and engines.check_rows(engine) == 2
    engine.run()
    handles.append(engine.submit(prompts[2]))
    engine.run()
    assert engine._loops.controller.disabled == {1} and program_cache.totals() == compiled
    results = [handle.result() for handle in handles]
    rows = [result.tokens for result in results]
    tally.compare(tiny.model(), prompts[:3], map(engines.expected, range(3)), rows)
    accepted = [result.stats.accepted for result in results]
    assert accepted[:2] == [0, 0] and accepted[2] > 0


@pytest.mark.slow
def test_a_request_counts_the_trees_that_ran():
    engine = forced("prompt lookup", slots=1, rounds_per_step=1)
    stats = engine.submit(engines.prompts()[0]).result().stats
    rounds = engine.stats.rounds_by_arm
    deepest = max(mode.depth for mode in rounds)
    assert stats.rounds == sum(rounds.values()) and rounds[PLAIN]
    assert stats.perfect == sum(mode.depth * n for mode, n in rounds.items())
    assert stats.tried[0] == stats.rounds - rounds[PLAIN] and stats.perfect < deepest * stats.rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(["streaming", "prompt lookup", "small"], "prompt lookup"))
def test_sampled_texts_do_not_depend_on_the_modes(name):
    engine = forced(name, sampling=True, slots=2, rounds_per_step=1)
    handles = [test_sampled.submit(engine, number) for number in range(5)]
    engine.run()
    for number, handle in enumerate(handles):
        text = test_sampled.alone("plain", test_sampled.prompts()[number], number)
        np.testing.assert_array_equal(handle.result().tokens, text)
    assert all(engine.stats.rounds_by_arm.values()) and engine.stats.probe_rounds


@pytest.mark.slow
def test_an_engine_chooses_by_its_own_times_and_acceptance(tally):
    """The drafter of another model is never right; times are set, because those of tests vary."""
    config = magicjax.EngineConfig(
        slots=2,
        capacity=engines.CAPACITY,
        max_tokens=engines.NEW,
        adaptive=True,
        eos_token_id=tiny.NEVER,
        rounds_per_step=2,
    )
    engine = magicjax.Engine(tiny.model(), tiny.drafter("other"), tiny.TREES["chain1"], config)
    handles = [engine.submit(prompt) for prompt in engines.prompts()[:4]]
    engine.step()  # without warm-up, rounds are timed here
    times = engine._loops.controller.times
    assert times.lengths == (1, 3 * engines.CAPACITY // 4) and times.rows == (1, 2)
    assert [mode.depth for mode in times.seconds] == [0, 1]
    assert all(0 < s < 60 for seconds in times.seconds.values() for s in seconds)
    costs = {mode: (9.0 if mode.depth else 1.0,) for mode in times.seconds}
    controller = dataclasses.replace(engine._loops.controller, times=RoundTimes((1,), costs))
    engine._loops.controller = controller
    engine.run()
    rows = [handle.result().tokens for handle in handles]
    tally.compare(tiny.model(), engines.prompts()[:4], map(engines.expected, range(4)), rows)
    stats = engine.stats
    assert stats.rounds_by_arm[PLAIN] > 0.7 * sum(stats.rounds_by_arm.values())


def test_the_depths_of_a_cascade_are_those_of_its_chains():
    """A tree of depth 4 for both drafters makes a chain of 5."""
    drafter = magicjax.Cascade(magicjax.PromptLookup(), tiny.drafter("self"))
    options = dict(drafter=drafter, tree=tiny.TREES["chain4"], max_tokens=tiny.NEW)
    request = keywords.prepare(tiny.model(), tiny.prompts(1), **options)
    found = loops.modes_of(request, adaptive=True)
    depths = [mode.depth for mode in found]
    assert depths == [each.shape.depth for each in found.values()] == [0, 2, 3, 5]
    assert [each.tree.depth for each in found.values()] == [0, 1, 2, 4]


REFUSED = {
    "no drafter": (dict(drafter=None), "adaptive=True has no effect without a drafter"),
    "a verifier": (
        dict(sampling=True, verifier="mss"),
        "verifier='mss' with adaptive=True: .* use verifier='naive'",
    ),
    "rounds that differ in length": (
        dict(drafter=tiny.drafter("near"), tree=magicjax.DynamicTree(6, 5, 2, min_prob=0.6)),
        "min_prob=0.6: adaptive=True times rounds before the first request, .* use adaptive=False",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_adapt_is_an_error_before_anything_is_compiled(what):
    options, message = dict(REFUSED[what][0]), REFUSED[what][1]
    compiled = program_cache.totals()
    drafter, tree = options.pop("drafter", magicjax.PromptLookup()), options.pop("tree", None)
    config = magicjax.EngineConfig(adaptive=True, slots=2, capacity=64, **options)
    with pytest.raises(ValueError, match=message):
        magicjax.Engine(tiny.model(), drafter, tree, config=config)
    assert program_cache.totals() == compiled
