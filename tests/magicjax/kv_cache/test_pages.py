"""A draft on pages reads the pages that NumPy chooses by sorting, exactly up to the last token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from magicjax.kv_cache import attend, full_cache, pages
from tests.quick import quick

HEADS, SIZE, SLOTS = 2, 4, 64
# Slots of a page, pages that are chosen, pages of the newest tokens, queries of a KV head.
SHAPES = [
    *((4, 3, 2, 3), (1, 5, 1, 1), (8, 1, 3, 2), (2, 9, 4, 3), (16, 1, 1, 1)),
    *((64, 1, 1, 2), (4, 20, 2, 1)),  # every text fits
]


def lengths_of(page_size: int, chosen: int, newest: int) -> list[int]:
    """Returns eight lengths: of one page, around what fits, and up to all slots."""
    fits = page_size * (1 + chosen + newest)
    around = [page_size, fits - 1, fits, fits + 1, fits + page_size, SLOTS - 1, SLOTS]
    return [1, *(int(np.clip(n, 1, SLOTS)) for n in around)]


def cache_of(rng, lengths, layers: int = 1) -> full_cache.KVCache:
    shape = (len(lengths), HEADS, SLOTS, SIZE)
    k, v = (
        tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(layers))
        for _ in "kv"
    )
    return full_cache.KVCache(k, v, jnp.asarray(lengths, jnp.int32), (None,) * layers)


def wanted_pages(keys, query, page_size: int, chosen: int, newest: int) -> list[int]:
    """Returns the pages of one row and KV head, by Quest's rule, from its keys [n, D].

    The score of a page is the mean over the queries [G, D] of the bound of its keys' scores.
    """
    parts = [keys[i : i + page_size] for i in range(0, len(keys), page_size)]
    if len(parts) <= 1 + chosen + newest:
        return list(range(len(parts)))

    def bound(q, part):
        low, high = part.min(0), part.max(0)
        return sum(max(x * a, x * b) for x, a, b in zip(q, low, high, strict=True))

    between = range(1, len(parts) - newest)
    score = {i: np.mean([bound(q, parts[i]) for q in query]) for i in between}
    best = sorted(between, key=lambda i: -score[i])[:chosen]
    return [0, *sorted(best), *range(len(parts) - newest, len(parts))]


def attention(query, keys, values):
    """Returns the attention of queries [G, D]."""
    scores = query @ keys.T * SIZE**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


def paged(cache, page_size, chosen, newest, due=None) -> pages.PagedCache:
    bounds = pages.bounds_of(cache, page_size, cache.k[0].dtype)
    start = pages.in_order(cache, chosen)
    of_pages = dict(bounds=bounds, chosen_pages=start, due=due, newest=newest, page_size=page_size)
    return pages.PagedCache(**vars(cache), **of_pages)


@jax.jit
def read(view, q, first_row=None):
    """Returns the attention of one token with queries [B, 1, H, D], hiding its own key."""
    zeros, start = jnp.zeros((len(q), 1, HEADS, SIZE)), 0 if first_row is None else first_row

    def of_rows(attend):
        return attend if first_row is None else attend.rows(first_row, len(q))

    positions = view.lengths[:, None]
    root = attend.ChoosePages(view, None, positions=positions)
    _, (_, chosen) = of_rows(root)(0)(q, zeros, zeros)
    pages = jax.lax.dynamic_update_slice_in_dim(view.chosen_pages[0], chosen, start, 0)
    view = view.replace(chosen_pages=(pages,))
    drafted = attend.empty_nodes(view, 1, jnp.float32)
    node, mask = jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), bool)
    level = of_rows(attend.AttendLevel(view, drafted, node, mask, None, positions=positions))
    return level(0)(q, zeros, zeros)[0], chosen


def check(view, q, rows, found) -> int:
    """Compares attention and pages with NumPy's; returns the number of pages that are not read."""
    (out, chosen), group, skipped = found, q.shape[2] // HEADS, 0
    for i, row in enumerate(rows):
        for head in range(HEADS):
            count = int(view.lengths[row])
            k, v = (np.asarray(x[0][row, head, :count], np.float64) for x in (view.k, view.v))
            query = np.asarray(q[i, 0, head * group : (head + 1) * group], np.float64)
            shape = view.page_size, view.chosen_pages[0].shape[2], view.newest
            wanted = wanted_pages(k, query, *shape)
            slots = [n for n in range(count) if n // view.page_size in wanted]
            mine = out[i, 0, head * group : (head + 1) * group]
            np.testing.assert_allclose(mine, attention(query, k[slots], v[slots]), atol=1e-5)
            if len(slots) < count:
                assert chosen[i, head].tolist() == wanted[1 : 1 + shape[1]]
            skipped += count - len(slots)
    return skipped


@pytest.mark.parametrize(
    ("page_size", "chosen", "newest", "group"), quick(SHAPES, *SHAPES[:2], SHAPES[-1])
)
def test_pages_and_attention_are_those_of_sorting_all_bounds(page_size, chosen, newest, group):
    rng, shape = np.random.default_rng(group), (page_size, chosen, newest)
    cache = cache_of(rng, lengths_of(*shape))
    view = paged(cache, *shape)
    q = jnp.asarray(rng.standard_normal((8, 1, HEADS * group, SIZE)), jnp.float32)
    skipped = check(view, q, range(8), read(view, q))
    assert skipped > 0 or page_size * (1 + chosen + newest) >= SLOTS


def test_rows_of_a_micro_batch_read_their_own_pages():
    rng = np.random.default_rng(0)
    view = paged(cache_of(rng, lengths_of(4, 3, 2)), 4, 3, 2, due=jnp.ones(8, bool))
    q = jnp.asarray(rng.standard_normal((3, 1, HEADS, SIZE)), jnp.float32)
    check(view, q, range(5, 8), read(view, q, 5))


def test_rows_that_are_not_due_read_what_they_chose_before():
    rng = np.random.default_rng(1)
    cache = cache_of(rng, [SLOTS] * 4)
    q, other = (
        jnp.asarray(rng.standard_normal((4, 1, HEADS, SIZE)), jnp.float32) for _ in range(2)
    )
    _, before = read(paged(cache, 4, 3, 2), q)
    due = jnp.array([True, False, True, False])
    view = paged(cache, 4, 3, 2, due).replace(chosen_pages=(before,))
    out, after = read(view, other)
    check(view, other[::2], (0, 2), (out[::2], after[::2]))
    np.testing.assert_array_equal(after[1::2], before[1::2])
    assert not np.array_equal(after, before)
    view = view.replace(due=jnp.zeros(4, bool))  # a round in which no row is due
    np.testing.assert_array_equal(read(view, other)[1], before)


def append_paths(rng, cache, bounds, rounds: int, nodes: int, depth: int, update):
    """Commits random paths, and yields the cache and the bounds after each round."""
    batch, layers, dtype = len(cache.lengths), len(cache.k), cache.k[0].dtype

    @jax.jit
    def commit(cache, bounds, kv, path, count):
        after = full_cache.append(cache, kv, path, count)
        return after, update(bounds, kv, path, count, after)

    for _ in range(rounds):
        shape = (2, layers, batch, nodes, HEADS, SIZE)
        new = [tuple(map(jnp.asarray, pair)) for pair in zip(*rng.standard_normal(shape))]
        new = jax.tree.map(lambda x: x.astype(dtype), new)
        path = jnp.asarray(rng.integers(0, nodes, (batch, depth + 1)), jnp.int32)
        room = SLOTS - depth - 1 - np.asarray(cache.lengths)
        count = np.minimum(rng.integers(0, depth + 2, batch), np.maximum(room, 0))
        cache, bounds = commit(cache, bounds, new, path, jnp.asarray(count, jnp.int32))
        yield cache, bounds


def check_bounds(bounds, cache) -> None:
    """Asserts that the bounds are exactly those of the committed keys of each page."""
    layers = zip(bounds.low, bounds.high, cache.k, cache.windows, strict=True)
    for low, high, keys, window in layers:
        if keys is None:  # a layer with a state
            assert low is None and high is None
            continue
        if window is not None:  # has no pages
            assert low.shape[2] == high.shape[2] == 0
            continue
        keys = np.asarray(full_cache.elements(keys, np.float32), np.float64)
        slots = keys.shape[2]
        page_size = slots // low.shape[2]
        live = (np.arange(slots) < np.asarray(cache.lengths)[:, None])[:, None, :, None]
        for page in range(low.shape[2]):
            part = np.s_[:, :, page * page_size : (page + 1) * page_size]
            wanted_low = np.where(live, keys, np.inf)[part].min(2)
            wanted_high = np.where(live, keys, -np.inf)[part].max(2)
            np.testing.assert_array_equal(np.float64(low[:, :, page]), wanted_low)
            np.testing.assert_array_equal(np.float64(high[:, :, page]), wanted_high)


BOUNDS = [("float32", 4), ("bfloat16", 8), ("float32", 1), ("float32", 64)]


@pytest.mark.parametrize(("dtype", "page_size"), quick(BOUNDS, *BOUNDS[:2]))
def test_bounds_after_any_accepted_paths_are_those_of_a_prefill(dtype, page_size):
    rng = np.random.default_rng(page_size)
    cache = cache_of(rng, [1, 4, 7, 8, 9, 31, 50, 58], layers=2)
    cache = jax.tree.map(lambda x: x.astype(dtype) if x.ndim == 4 else x, cache)
    bounds, update = pages.bounds_of(cache, page_size, cache.k[0].dtype), pages.update_bounds
    check_bounds(bounds, cache)
    for after in append_paths(rng, cache, bounds, 8, nodes=7, depth=4, update=update):
        check_bounds(*reversed(after))


@pytest.mark.parametrize("wrong", ["never updated", "rejected nodes", "overwritten"])
def test_wrong_updates_of_bounds_are_detected(wrong):
    def update(bounds, new, path, count, cache):
        if wrong == "never updated":
            return bounds
        if wrong == "rejected nodes":
            moved = dataclasses.replace(cache, lengths=cache.lengths - count + path.shape[1])
            return pages.update_bounds(
                bounds, new, path, jnp.full_like(count, path.shape[1]), moved
            )
        fresh = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), bounds.low)
        emptied = bounds.replace(low=fresh)
        return pages.update_bounds(emptied, new, path, count, cache)

    rng = np.random.default_rng(0)
    cache = cache_of(rng, [1, 4, 7, 30])
    bounds = pages.bounds_of(cache, 4, cache.k[0].dtype)
    with pytest.raises(AssertionError):
        for after in append_paths(rng, cache, bounds, 4, nodes=7, depth=4, update=update):
            check_bounds(*reversed(after))


def test_a_view_is_not_written():
    """Its bounds would not be those of the new keys."""
    view = paged(cache_of(np.random.default_rng(0), [4, 9]), 4, 1, 1)
    nodes = jnp.zeros((2, 1, HEADS, SIZE))
    kv, path, count = ((nodes, nodes),), jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)
    for write in (
        lambda: full_cache.append(view, kv, path, count),
        lambda: full_cache.write_chunk(view, kv, jnp.int32(0), count),
        lambda: full_cache.restore(view, view),
    ):
        with pytest.raises(TypeError, match="a PagedCache is only read: pass the KVCache"):
            write()
