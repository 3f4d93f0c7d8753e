"""Compares caches with a model in plain Python: the position in each slot.

The value of a key tells its row, head and position, so a misplaced entry cannot go unseen.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicjax.kv_cache import full_cache, sparse_cache

ROWS, HEADS, SLOTS, NODES, PATH = 3, 2, 40, 6, 4
RINGS = ((2, 9), (1, 5), (4, 24))  # (P, C): small, as small as a path allows, hardly wrapping


def code(position, head=0, row=0, layer=0, value=0):
    """Returns the number that encodes an entry."""
    return ((layer * 2 + value) * ROWS + row) * HEADS * 1000.0 + head * 1000 + position


def positions_cache(lengths) -> full_cache.KVCache:
    """Returns two layers whose live slots hold their position, and dead slots -1."""
    lengths = jnp.asarray(lengths, jnp.int32)

    def layer(index, value):
        row, head, slot = np.ix_(range(ROWS), range(HEADS), range(SLOTS))
        live = slot < np.asarray(lengths)[:, None, None]
        return jnp.asarray(np.where(live, code(slot, head, row, index, value), -1.0))[..., None]

    k, v = (tuple(layer(i, value) for i in range(2)) for value in range(2))
    return full_cache.KVCache(k, v, lengths, (None, None))


def nodes_at(positions) -> tuple:
    """Returns for each layer k, v [B,N,K,1] of nodes at positions [B,N]."""

    def layer(index, value):
        row = np.arange(ROWS)[:, None, None]
        head = np.arange(HEADS)
        return jnp.asarray(
            code(np.asarray(positions)[..., None], head, row, index, value), jnp.float32
        )[..., None]

    return tuple((layer(i, 0), layer(i, 1)) for i in range(2))


def held(count: int, pinned, P: int, C: int) -> dict[int, int]:
    """Returns the expected position in each live slot, by the definition of the draft cache."""
    if count <= C:
        return {position: position for position in range(count)}
    newest = range(count - (C - P), count)
    ring = {P + (position - P) % (C - P): position for position in newest}
    return dict(enumerate(pinned)) | ring


def check_draft(draft: sparse_cache.DraftCache, counts, P: int, C: int) -> None:
    """Asserts that every live slot is correct, in both layers, keys and values."""
    assert draft.count.tolist() == list(counts)
    for layer in range(2):
        assert draft.live(layer).tolist() == [min(count, C) for count in counts]
    for row, count in enumerate(counts):
        for head in range(HEADS):
            for layer in range(2):
                pinned = np.asarray(draft.pinned[layer])[row, head].tolist()
                expected = held(count, pinned, P, C)
                assert len(set(expected.values())) == min(count, C)  # pins and ring are disjoint
                for value, arrays in enumerate((draft.k, draft.v)):
                    found = np.asarray(arrays[layer])[row, head, :, 0]
                    for slot, position in expected.items():
                        assert found[slot] == code(position, head, row, layer, value)


gather_pins = jax.jit(sparse_cache.gather, static_argnums=2)


def gather(P, C, cache):
    """Returns the draft cache that pins the first P."""
    first = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (ROWS, HEADS, P))
    return gather_pins(cache, (first, first), (C - P, C - P))


append = jax.jit(full_cache.append)
append_ring = jax.jit(sparse_cache.append_ring)
lengths_of_rows = st.lists(st.integers(1, SLOTS - 1), min_size=ROWS, max_size=ROWS)


@given(ring=st.sampled_from(RINGS), lengths=lengths_of_rows)
def test_gathering_keeps_the_sinks_and_the_newest_or_all_that_fits(ring, lengths):
    P, C = ring
    draft = gather(P, C, positions_cache(lengths))
    check_draft(draft, lengths, P, C)
    assert all(np.array_equal(np.asarray(p)[0, 0], np.arange(P)) for p in draft.pinned)


@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_prompts_around_the_budget_are_gathered_correctly(edge):
    for P, C in RINGS:
        lengths = [C + edge] * ROWS
        check_draft(gather(P, C, positions_cache(lengths)), lengths, P, C)


@given(st.data())
def test_gathering_keeps_any_positions_that_a_policy_pins(data):
    P, C = RINGS[0]
    lengths = data.draw(lengths_of_rows)
    pins = []
    for _ in range(2):
        chosen = np.zeros((ROWS, HEADS, P), np.int32)
        for row, head in np.ndindex(ROWS, HEADS):
            old = list(range(max(lengths[row] - (C - P), P)))
            chosen[row, head] = data.draw(
                st.lists(st.sampled_from(old), min_size=P, max_size=P, unique=True)
            )
        pins.append(jnp.asarray(chosen))
    draft = gather_pins(positions_cache(lengths), tuple(pins), (C - P, C - P))
    check_draft(draft, lengths, P, C)
    for layer, chosen in enumerate(pins):
        for row in range(ROWS):
            if lengths[row] > C:
                assert np.array_equal(draft.pinned[layer][row], chosen[row])


@st.composite
def rounds(draw):
    """Draws up to eight rounds: per row a path of nodes, and the number that is committed."""
    path = st.lists(st.integers(0, NODES - 1), min_size=PATH, max_size=PATH, unique=True)
    one = st.tuples(
        st.lists(path, min_size=ROWS, max_size=ROWS),
        st.lists(st.integers(0, PATH), min_size=ROWS, max_size=ROWS),
    )
    return draw(st.lists(one, min_size=1, max_size=8))


def positions_of(counts, paths) -> np.ndarray:
    """Returns the position of every node: those on a row's path continue its text."""
    positions = np.full((ROWS, NODES), 999)
    for row, path in enumerate(paths):
        positions[row, path] = counts[row] + np.arange(PATH)
    return positions


@given(ring=st.sampled_from(RINGS), lengths=lengths_of_rows, played=rounds())
def test_every_commit_leaves_the_pins_and_the_newest_in_the_ring(ring, lengths, played):
    P, C = ring
    draft, counts = gather(P, C, positions_cache(lengths)), np.array(lengths)
    for paths, committed in played:
        new = nodes_at(positions_of(counts, paths))
        draft = append_ring(draft, new, jnp.asarray(paths), jnp.asarray(committed))
        counts = counts + committed
        check_draft(draft, counts.tolist(), P, C)


@given(lengths=st.lists(st.integers(1, 8), min_size=ROWS, max_size=ROWS), played=rounds())
def test_the_targets_cache_holds_the_committed_nodes_in_order(lengths, played):
    cache, counts = positions_cache(lengths), np.array(lengths)
    for paths, committed in played:
        new = nodes_at(positions_of(counts, paths))
        cache = append(cache, new, jnp.asarray(paths), jnp.asarray(committed))
        counts = counts + committed
        assert cache.lengths.tolist() == counts.tolist()
    for row, head, layer in np.ndindex(ROWS, HEADS, 2):
        live = np.arange(counts[row])
        for value, arrays in enumerate((cache.k, cache.v)):
            found = np.asarray(arrays[layer])[row, head, : counts[row], 0]
            np.testing.assert_array_equal(found, code(live, head, row, layer, value))


def test_a_commit_that_ignores_the_ring_is_detected():
    P, C = RINGS[0]
    lengths = [C + 3] * ROWS
    draft = gather(P, C, positions_cache(lengths))
    new = nodes_at(positions_of(lengths, [[0, 1, 2, 3]] * ROWS))
    k = tuple(old.at[:, :, C - 1].set(n[:, 0]) for old, (n, _) in zip(draft.k, new))
    with pytest.raises(AssertionError):
        check_draft(draft.replace(k=k, count=draft.count + 1), [C + 4] * ROWS, P, C)


def test_slots_of_positions_are_those_of_the_documented_example():
    assert sparse_cache.slot_of(jnp.arange(9), 2, 5).tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 2]


def test_an_index_of_each_head_writes_what_one_of_all_heads_does():
    """TPUs and other devices: of more rows the first, and nothing out of bounds."""
    draw = np.random.default_rng(0)
    slots = jnp.asarray(draw.normal(0, 1, (ROWS, HEADS, SLOTS, 4)), jnp.float32)
    new = jnp.asarray(draw.normal(0, 1, (ROWS - 1, HEADS, PATH, 4)), jnp.float32)
    index = jnp.asarray([[3, 4, 5, SLOTS], [SLOTS - 2, SLOTS - 1, SLOTS, SLOTS]])
    found = full_cache.set_heads(slots, index, new, mode="drop")
    expected = np.array(slots)
    expected[0, :, 3:6], expected[1, :, SLOTS - 2 :] = new[0, :, :3], new[1, :, :2]
    for x in (found, full_cache.set_rows(slots, index, new, mode="drop")):
        np.testing.assert_array_equal(x, expected)
