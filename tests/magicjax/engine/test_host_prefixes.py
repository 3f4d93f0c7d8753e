"""Prefixes that leave the device are kept in host memory, and return on a hit."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.decoding import memory, program_cache
from magicjax.engine import prefix_store
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.full_cache import KVCache
from magicjax.parallel import offloading
from pallas_kernels import Quantized
from sharding import make_mesh
from tests.magicjax import mesh_cases, oracle, tiny
from tests.magicjax.engine import engines
from tests.magicjax.engine.test_schedules import Long
from tests.quick import quick

NEW, SLOTS = 8, 16
GREEDY = magicjax.SamplingParams(max_tokens=NEW)
DRAFTERS = ("plain", "streaming", "snapkv", "small", "sparse small", "ensemble", "eagle", "cascade")
AMPLE = 10**9


def entry(tokens, in_8_bits: bool = False) -> prefix_store.Prefix:
    """Returns a prefix whose keys are its tokens, and values minus them; -9 in dead slots."""
    keys = np.full((1, 1, SLOTS, 1), -9.0, np.float32)
    keys[0, 0, : len(tokens), 0] = tokens
    k, v = jnp.array(keys), jnp.array(-keys)
    if in_8_bits:
        k, v = (Quantized(x.astype(jnp.int8), jnp.ones(x.shape[:-1]), 8) for x in (k, v))
    cache = KVCache((k,), (v,), jnp.array([len(tokens)]), (None,))
    return prefix_store.Prefix(np.array(tokens, np.int32), cache, {"seen": jnp.arange(3)})


def shapes_of(row):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), row)


def store_of(entries: int, max_host_bytes: int, min_shared: int = 3) -> prefix_store.PrefixStore:
    shapes = shapes_of(entry([1]).row)
    return prefix_store.PrefixStore(100 * entries, 100, min_shared, max_host_bytes, shapes)


def host_bytes(*lengths: int) -> int:
    """Returns the bytes of texts in host memory: keys, values, the length, and `seen`."""
    return sum(2 * 4 * length + 4 + 3 * 4 for length in lengths)


def tiers(store) -> tuple[list[int], list[int]]:
    """Returns the first token of each prefix (in host memory, on the device), oldest first."""
    found = [(int(e.tokens[0]), e.on_host) for e in store._entries]
    assert found == sorted(found, key=lambda x: not x[1])  # those in host memory are older
    return [token for token, host in found if host], [t for t, host in found if not host]


def test_prefixes_go_from_the_device_to_host_memory_and_leave_by_their_last_use():
    store = store_of(2, host_bytes(3, 3))
    texts = [[n] * 3 for n in range(6)]
    for text in texts[:4]:
        store.add(entry(text))
    assert tiers(store) == ([0, 1], [2, 3])
    assert (store.num_bytes, store.num_host_bytes) == (200, host_bytes(3, 3))
    row, common = store.copy_longest(np.array([0, 0, 0, 7]))
    assert common == 3 and tiers(store) == ([1, 2], [3, 0])
    keys = np.array(row[0].k[0])[0, 0, :, 0]
    np.testing.assert_array_equal(keys, [0] * SLOTS)
    assert int(row[0].lengths[0]) == 3 and np.array(row[1]["seen"]).tolist() == [0, 1, 2]
    store.add(entry(texts[4]))
    assert tiers(store) == ([2, 3], [0, 4])
    assert store.copy_longest(np.array(texts[1])) == (None, 0)
    store.copy_longest(np.array(texts[4]))
    assert (store.lookups, store.hits, store.host_hits) == (3, 2, 1)
    store.clear()
    assert tiers(store) == ([], []) and store.num_host_bytes == store.host_hits == 0


def test_a_longer_text_replaces_its_prefix_in_host_memory():
    store = store_of(1, host_bytes(9))
    store.add(entry([1, 1, 1]))
    store.add(entry([2, 2, 2]))
    assert tiers(store) == ([1], [2])
    unused = store.add(entry([1, 1, 1, 4]))
    assert tiers(store) == ([2], [1]) and int(unused[0].lengths[0]) == 3


def test_both_tiers_are_bounded_whatever_is_stored():
    store, rng = store_of(3, host_bytes(SLOTS, 5), min_shared=1), np.random.default_rng(0)
    newest: list[list[int]] = []
    for _ in range(200):
        tokens = rng.integers(0, 3, int(rng.integers(1, SLOTS + 1)))
        if rng.random() < 0.4:
            row, common = store.copy_longest(tokens)
            if row is not None:
                keys = np.array(row[0].k[0])[0, 0, :common, 0]
                np.testing.assert_array_equal(keys, tokens[:common])
        else:
            store.add(entry(tokens))
        newest = [e.tokens.tolist() for e in store._entries]
        assert store.num_bytes <= 300 and store.num_host_bytes <= store.max_host_bytes
        tiers(store)
    assert store.host_hits > 5 and len(newest) > 3


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_arrays_in_host_memory_share_none_with_the_device(in_8_bits):
    prefix = entry([4, 5, 6], in_8_bits)
    stored, shapes = prefix_store.to_host(prefix), shapes_of(prefix.row)
    overwrite = jax.jit(lambda row: jax.tree.map(lambda x: x * 0 + 7, row), donate_argnums=0)
    overwrite(prefix.row)
    for _ in range(2):
        row = prefix_store.to_device(stored, shapes).row
        keys = full_cache.elements(row[0].k[0], jnp.float32)
        assert np.array(keys)[0, 0, :4, 0].tolist() == [4, 5, 6, 0]
        assert np.array(row[1]["seen"]).tolist() == [0, 1, 2]
        overwrite(row)


def row_bytes(name: str) -> int:
    return sum(Long.engine(name, prefix_bytes=0)._setup.row.kv_bytes)


def documents() -> list[np.ndarray]:
    """Returns questions on two documents by turns."""
    texts = [Long.prompt(250), Long.prompt(200)]
    return [np.concatenate([texts[n % 2], Long.prompt(10 + n)]) for n in range(5)]


@pytest.mark.parametrize("name", quick(DRAFTERS, "ensemble"))
def test_a_hit_in_host_memory_gives_the_text_without_a_store(name, tally, caplog):
    size, asked = row_bytes(name), documents()
    plain = [oracle.greedy(tiny.model(), prompt, NEW) for prompt in asked]
    engine = Long.engine(name, prefix_bytes=size, host_prefix_bytes=AMPLE)
    engine.warm_up()
    compiled = program_cache.totals()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = [engine.submit(prompt, GREEDY).result() for prompt in asked]
    assert not [r for r in caplog.records if "Compiling" in r.message]
    assert program_cache.totals() == compiled
    tally.compare(tiny.model(), asked, plain, [result.tokens for result in found])
    assert [result.stats.reused_tokens for result in found] == [0, 0, 250, 200, 250]
    stats = engine.stats
    assert (stats.prefix_hits, stats.prefix_host_hits) == (3, 3)
    assert stats.prefix_bytes == size and 0 < stats.prefix_host_bytes < 4 * size
    engine._prefixes.clear()
    assert engine.stats.prefix_host_bytes == engine.stats.prefix_host_hits == 0


def reused(case: str, mesh: list[int] | None) -> tuple[list[list[int]], int]:
    """Returns the tokens of questions on two documents, and the hits in host memory."""
    drafter, tree, _, kv_heads = mesh_cases.CASES[case]

    def engine(**options):
        config = magicjax.EngineConfig(
            slots=2, capacity=192, max_tokens=NEW, eos_token_id=63, prefill_chunk=32, **options
        )
        made = None if mesh is None else make_mesh(*mesh)
        target = mesh_cases.target(kv_heads)
        return magicjax.Engine(target, drafter(kv_heads, None), tree, config, mesh=made)

    size = sum(engine(prefix_bytes=0)._setup.row.kv_bytes)
    served = engine(prefix_bytes=size, host_prefix_bytes=AMPLE)
    asked = [np.concatenate([text[:100], text[-10 - n :]]) for n, text in enumerate(documents())]
    tokens = [served.submit(prompt % 60, GREEDY).result().tokens for prompt in asked]
    return [row.tolist() for row in tokens], served.stats.prefix_host_hits


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "snapkv", "several"])
@pytest.mark.parametrize("mesh", [[1, 2], [2, 2]])
def test_prefixes_in_host_memory_return_to_all_devices(case, mesh, eight):
    (found, hits), (expected, _) = eight(reused, case=case, mesh=mesh), reused(case, None)
    assert hits == 3 and found == expected


REFUSED = {
    "too few": (dict(host_prefix_bytes=5), "host_prefix_bytes=5: the longest prefix has"),
    "negative": (
        dict(host_prefix_bytes=-1),
        "host_prefix_bytes=-1: it must be an integer of at least 0",
    ),
    "no store": (
        dict(host_prefix_bytes=AMPLE, prefix_bytes=0),
        "host_prefix_bytes=1000000000 has no effect without prefixes on the device",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_host_memory_that_has_no_effect_is_an_error(what):
    options, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        engines.engine("streaming", **options)


def test_more_bytes_than_the_host_has_are_an_error(monkeypatch):
    monkeypatch.setattr(offloading, "free_host_memory", lambda: AMPLE - 1)
    with pytest.raises(memory.OutOfMemoryError, match="999999999 bytes of host memory are free"):
        engines.engine("streaming", host_prefix_bytes=AMPLE)
