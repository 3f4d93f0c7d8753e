"""An engine that does not fit the free memory is refused before its caches are allocated."""

import re
from types import SimpleNamespace

import pytest

import magicjax
from magicjax import EngineConfig
from magicjax.decoding import memory, program_cache
from magicjax.decoding.preparation import capacity_of
from magicjax.decoding.request import Request
from magicjax.engine import engine as engine_module
from magicjax.engine import memory_check, setup
from magicjax.engine.config import MAX_PREFILLS
from magicjax.engine.memory_check import check, proportionate_slots
from magicjax.parallel import offloading
from tests.magicjax import tiny
from tests.magicjax.engine import engines

SLOTS, CAPACITY = 6, 300


def validated(name: str = "small", **options) -> tuple[EngineConfig, Request]:
    drafter, tree = engines.DRAFTERS[name]
    defaults = dict(slots=SLOTS, capacity=CAPACITY, max_tokens=engines.NEW)
    return setup.validated_row(tiny.model(), drafter, tree, EngineConfig(**defaults | options))


def check_engine(available: float, name: str = "small", **options) -> None:
    config, row = validated(name, **options)
    check(row, config, available)


def row_bytes(name: str = "small", capacity: int = CAPACITY) -> int:
    return sum(validated(name, slots=1, capacity=capacity)[1].kv_bytes)


@pytest.mark.parametrize("name", ["plain", "small", "streaming"])
@pytest.mark.parametrize("stored", [None, 0, 3])
def test_slots_prefill_and_prefixes_count(name, stored):
    size = row_bytes(name)
    prefix_bytes = None if stored is None else stored * size + (stored > 0)
    rows = SLOTS + MAX_PREFILLS + (4 if stored is None else stored)
    check_engine(rows * size, name, prefix_bytes=prefix_bytes)
    with pytest.raises(memory.OutOfMemoryError, match=f"an engine with slots={SLOTS} of capacity"):
        check_engine(rows * size - 1, name, prefix_bytes=prefix_bytes)


@pytest.mark.parametrize("name", ["plain", "small", "streaming"])
def test_caches_are_in_proportion_to_the_weights(name, monkeypatch):
    def slots(limit: float, **options) -> int:
        monkeypatch.setattr(memory_check, "SMALL_BYTES", limit)
        config, row = validated(name, slots=8, **options)
        return proportionate_slots(row, config)

    size = row_bytes(name)
    weights = (4 + MAX_PREFILLS + 4) * size
    counted = SimpleNamespace(weights=weights - size, streamed=size)
    monkeypatch.setattr(memory, "count", lambda _: counted)
    assert slots(0) == slots(weights + size) == 4
    counted.weights = counted.streamed = 0
    assert slots((8 + MAX_PREFILLS + 4) * size) == 8
    assert slots((8 + MAX_PREFILLS + 4) * size - 1) == 4
    assert slots((4 + MAX_PREFILLS + 4) * size - 1) == 2
    assert slots((8 + MAX_PREFILLS) * size, prefix_bytes=0) == 8
    assert slots(0) == 1


@pytest.mark.parametrize("stored", [None, 3])
def test_the_remedies_fit_and_more_does_not(stored):
    size = row_bytes()
    available = (SLOTS + MAX_PREFILLS + 2) * size  # 2 of the prefixes, or fewer slots
    prefix_bytes = None if stored is None else stored * size
    with pytest.raises(memory.OutOfMemoryError) as refused:
        check_engine(available, prefix_bytes=prefix_bytes)
    remedies = dict(re.findall(r"(slots|capacity|prefix_bytes)=(\d+)", str(refused.value)))
    slots, capacity = int(remedies["slots"]), int(remedies["capacity"])
    assert slots == SLOTS + 2 - (4 if stored is None else stored)
    assert int(remedies["prefix_bytes"]) == 2 * size

    def fits(**options) -> bool:
        try:
            check_engine(available, **dict(prefix_bytes=prefix_bytes) | options)
        except memory.OutOfMemoryError:
            return False
        return True

    assert fits(slots=slots) and not fits(slots=slots + 1)
    assert fits(capacity=capacity) and not fits(capacity=capacity + 64)
    assert fits(prefix_bytes=2 * size) and not fits(prefix_bytes=3 * size)


def test_what_cannot_help_is_not_named():
    with pytest.raises(memory.OutOfMemoryError, match="use slots=1 or capacity=.*, or more dev"):
        check_engine((1 + MAX_PREFILLS) * row_bytes(), prefix_bytes=0)
    with pytest.raises(
        memory.OutOfMemoryError, match="use a smaller model, a smaller dtype or kv_dtype, off"
    ):
        check_engine(100)


def test_an_engine_is_refused_before_allocation(monkeypatch):
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 1000)
    monkeypatch.setattr(engine_module, "empty_state", lambda setup: pytest.fail("allocated"))
    before = program_cache.totals()
    with pytest.raises(
        memory.OutOfMemoryError, match="2 rows for prefill and 2 for prefixes needs"
    ):
        magicjax.Engine(tiny.model(), config=EngineConfig(slots=2, capacity=64))
    assert program_cache.totals() == before


@pytest.mark.parametrize(
    ("tokens", "depth", "chunk", "slots"),
    [(500, 4, 64, 576), (448, 4, 64, 512), (449, 4, 64, 576), (503, 4, 0, 512), (504, 4, 0, 576)]
    + [(440, 40, 64, 576)],
)
def test_slots_hold_the_text_and_a_chunk_or_a_path(tokens, depth, chunk, slots):
    assert capacity_of(tokens, depth, chunk) == slots
