"""Requests that come and go get the texts of plain decoding, whoever shares the batch."""

import numpy as np
import pytest

import magicjax
from magicjax import SamplingParams
from magicjax.decoding import program_cache
from tests.magicjax import oracle, tiny
from tests.magicjax.engine import engines
from tests.quick import quick


def check_result(handle, index: int, eos: int, limit: int, tally) -> None:
    """Asserts that a finished request has its text alone, or a beginning of it if cancelled."""
    result, whole = handle.result(), oracle.cut(engines.expected(index), eos, limit)
    if result.finish_reason == "cancelled":
        whole = whole[: len(result.tokens)]
    else:
        ends = "eos" if len(result.tokens) and result.tokens[-1] == eos else "length"
        assert result.finish_reason == ends
    tally.compare(tiny.model(), [engines.prompts()[index]], [whole], [result.tokens])
    arrived = [new.tokens for new in handle.arrived()]
    np.testing.assert_array_equal(np.concatenate([[], *arrived]), result.tokens)


def run_schedule(engine, eos: int, seed: int, requests: int, tally) -> None:
    """Submits and cancels requests at random steps, and checks rows and results."""
    rng, submitted, rows = np.random.default_rng(seed), [], 0
    while len(submitted) < requests or engine.unfinished:
        for _ in range(min(rng.poisson(1.0), requests - len(submitted))):
            index = int(rng.integers(len(engines.prompts())))
            room = engines.CAPACITY - len(engines.prompts()[index])
            limit = int(rng.integers(1, min(engines.NEW, room) + 1))
            prompt = engines.prompts()[index].tolist()
            priority = int(rng.integers(2))
            params = SamplingParams(max_tokens=limit)
            handle = engine.submit(prompt, params, priority=priority)
            submitted.append((handle, index, limit))
        if rng.random() < 0.2 and submitted:
            submitted[rng.integers(len(submitted))][0].cancel()
        engine.step()
        assert len(engine._scheduler.running) <= engine.config.slots
        rows += engines.check_rows(engine)
    for handle, index, limit in submitted:
        check_result(handle, index, eos, limit, tally)
    assert rows >= 5
    stats = engine.stats
    assert sum(stats.finished.values()) == len(submitted) and stats.running == stats.waiting == 0
    assert stats.finished["cancelled"] and stats.finished["eos"] and stats.finished["length"]


@pytest.mark.parametrize("name", quick(engines.DRAFTERS, "ensemble"))
def test_random_schedules_give_each_request_its_text_alone_and_compile_nothing(name, tally):
    eos = int(engines.expected(4)[6])
    engine = engines.engine(name, eos_token_id=eos, rounds_per_step=1)
    engine.warm_up()
    compiled = program_cache.totals()
    run_schedule(engine, eos, seed=0, requests=20, tally=tally)
    assert program_cache.totals() == compiled
    assert engine._ended.all()  # no slot is leaked


@pytest.mark.slow
@pytest.mark.parametrize("name", engines.DRAFTERS)
def test_many_random_schedules(name, tally):
    eos = int(engines.expected(4)[6])
    for seed, slots in enumerate((1, 2, 5)):
        engine = engines.engine(name, eos_token_id=eos, slots=slots, rounds_per_step=seed + 1)
        run_schedule(engine, eos, seed + 1, requests=60, tally=tally)


def test_iterating_over_one_request_also_serves_the_others(tally):
    engine = engines.engine()
    handles = [engine.submit(prompt) for prompt in engines.prompts()[:5]]
    parts = [new.tokens for new in handles[4]]
    assert len(parts) > 2  # it waited for a slot, and streamed
    engine.run()
    rows = [handle.result().tokens for handle in handles]
    np.testing.assert_array_equal(np.concatenate(parts), rows[4])
    tally.compare(tiny.model(), engines.prompts()[:5], map(engines.expected, range(5)), rows)


class Long:
    """Prompts of several pieces, prefilled while other rows are decoded."""

    LENGTH, NEW = 300, 12

    @classmethod
    def prompt(cls, length: int) -> np.ndarray:
        rng = np.random.default_rng(length)
        return rng.integers(0, tiny.VOCAB - 1, length).astype(np.int32)

    @classmethod
    def engine(cls, name: str, **options) -> magicjax.Engine:
        options = dict(capacity=400, max_tokens=engines.NEW, prefill_chunk=100) | options
        return engines.engine(name, **options)


LONG = ["streaming", "snapkv", "h2o", "small", "ensemble"]


@pytest.mark.parametrize("name", quick(LONG, "ensemble"))
def test_long_prompts_are_prefilled_in_pieces_between_calls_of_the_loop(name, tally):
    engine = Long.engine(name, rounds_per_step=1)
    short = engine.submit(engines.prompts()[0])
    engine.step()
    handle = engine.submit(Long.prompt(Long.LENGTH), SamplingParams(max_tokens=Long.NEW))
    arrived_before = [len(short.arrived())]
    while handle.started_at is None or engine._scheduler.prefilling:
        engine.step()
        arrived_before.append(sum(len(new.tokens) for new in short.arrived()))
    in_pieces = len(arrived_before) - 1
    assert in_pieces == (1 if name == "h2o" else 3)
    assert all(arrived_before[1:])  # the running row advanced between the pieces
    found = handle.result()
    plain = oracle.greedy(tiny.model(), Long.prompt(Long.LENGTH), Long.NEW)
    tally.compare(tiny.model(), [Long.prompt(Long.LENGTH)], [plain], [found.tokens])
    window = engine._setup.prefill_rule.window
    assert Long.LENGTH <= found.stats.prefilled_tokens <= Long.LENGTH + window


def forget(monkeypatch, what: str) -> None:
    """Breaks the insertion of a row."""
    from magicjax.decoding import slots

    if what == "the drafter's state":
        cls = magicjax.SelfSpeculation
        monkeypatch.setattr(cls, "insert", lambda self, state, row, slot: state)
        return
    whole = slots.insert_row

    def insert_row(state, row, slot):
        inserted = whole(state, row, slot)
        if what == "lengths":
            cache = inserted.cache.replace(lengths=state.cache.lengths)
        else:
            cache = inserted.cache.replace(v=state.cache.v)
        return inserted.replace(cache=cache)

    monkeypatch.setattr(slots, "insert_row", insert_row)


@pytest.mark.parametrize("what", quick(["the drafter's state", "lengths", "values"], "values"))
def test_an_insertion_that_forgets_a_part_is_detected(what, monkeypatch):
    forget(monkeypatch, what)
    # Settings of no other test, because programs are compiled once per settings.
    engine = engines.engine("streaming", max_tokens=7 + len(what))
    for prompt in engines.prompts()[:3]:
        engine.submit(prompt)
    with pytest.raises(AssertionError):
        while engine.unfinished:
            engine.step()
            engines.check_rows(engine)


def test_a_bound_on_pauses_changes_no_text():
    engine = engines.engine("streaming", max_stall_ms=1e-3)  # a round and a chunk at a time
    handles = [engine.submit(prompt) for prompt in engines.prompts()]
    while engine.unfinished:
        before = sum(engine.stats.rounds_by_arm.values())
        prefilled = [handle.prefilled_tokens for handle in handles]
        running = engine.stats.running
        engine.step()
        assert sum(engine.stats.rounds_by_arm.values()) - before <= 1
        new = sum(handle.prefilled_tokens for handle in handles) - sum(prefilled)
        assert new <= 16 or not running
    for index, handle in enumerate(handles):
        np.testing.assert_array_equal(handle.result().tokens, engines.expected(index))
