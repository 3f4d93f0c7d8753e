"""Trees and chains through layers with states equal the recurrence, token by token on each path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from magicjax.kv_cache import state_layers
from magicjax.kv_cache.state_layers import LayerState
from models.gated_delta import DeltaNetInputs, DeltaNetShape

SHAPE = DeltaNetShape(key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv_width=4)
TREES, NODES, CHAIN = 500, 32, 150
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}


def drawn(rows: int, tokens: int, dtype) -> tuple[DeltaNetInputs, LayerState]:
    """Returns random inputs, with decays from 1 to nearly 0, and states before them."""
    rng, s = np.random.default_rng(0), SHAPE
    heads = rows, tokens, s.value_heads
    inputs = DeltaNetInputs(
        rng.normal(size=(rows, tokens, s.channels)),
        -rng.exponential(rng.choice([0.01, 0.3, 9.0], heads)),
        rng.uniform(size=heads),
        rng.normal(size=(s.channels, s.conv_width)),
        s,
    )
    sizes = rows, s.value_heads, s.key_dim, s.value_dim
    before = rng.normal(size=(rows, s.conv_width - 1, s.channels))
    state = LayerState(rng.normal(size=sizes), before)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (inputs, state))


def random_trees() -> np.ndarray:
    """Returns parents [B, N] of trees of 1 to N nodes, -1 for the root and padding.

    Every size comes as a chain, as a star, and with random parents among few or all earlier nodes.
    """
    rng = np.random.default_rng(1)
    parents = np.full((TREES, NODES), -1)
    for number, row in enumerate(parents):
        size, kind = 1 + number % NODES, number // NODES % 6
        for node in range(1, size):
            nearest = NODES if kind == 4 else 2**kind  # kind 0 is a chain
            row[node] = 0 if kind == 5 else rng.integers(max(0, node - nearest), node)
    return parents


def paths_of(parents) -> list[list[int]]:
    """Returns the nodes from the root to each node."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    return paths


def tree_arguments(parents) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mask [B, N, N] and the positions [B, N] of trees whose roots are at 7."""
    mask, positions = np.zeros((*parents.shape, NODES), bool), np.zeros(parents.shape, np.int32)
    for row, row_parents in enumerate(parents):
        for node, path in enumerate(paths_of(row_parents)):
            mask[row, node, path] = True
            positions[row, node] = 7 + len(path) - 1
    return mask, positions


def by_paths(
    inputs, state, parents, decay_late: int = 0, convolve_late: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the outputs of nodes [B, N, ...], and `s` and `inputs` after each, token by token.

    For controls, a node takes the decay of an earlier node, or the convolution ends one before it.

    Args:
      inputs, state: of B rows.
      parents: int [B, N], -1 for those that follow the state.
    """
    x, g, beta, kernel, s, old = (
        np.asarray(y, np.float64)
        for y in (inputs.x, inputs.log_decay, inputs.beta, inputs.kernel, state.s, state.inputs)
    )
    shape, rows = inputs.shape, np.arange(len(parents))
    groups = shape.value_heads // shape.key_heads
    out = np.zeros((*parents.shape, *s.shape[1:2], s.shape[3]))
    states, windows = (np.stack([y] * (parents.shape[1] + 1), 1) for y in (s, old))
    for node in range(parents.shape[1]):
        parent = parents[:, node]  # -1: the last one, before the text
        window = np.concatenate([windows[rows, parent], x[:, node, None]], 1)
        mixed = (np.roll(window, convolve_late, 1) * kernel.T).sum(1)
        mixed = mixed / (1 + np.exp(-mixed))
        mixed = mixed.reshape(len(mixed), shape.key_heads, -1)
        q, k, v = np.split(mixed, [shape.key_dim, 2 * shape.key_dim], -1)
        q, k = (y.repeat(groups, 1) for y in (q, k))
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        v = v.reshape(len(v), shape.value_heads, -1)
        now = np.exp(g[:, max(0, node - decay_late)])[..., None, None] * states[rows, parent]
        update = beta[:, node, :, None] * (v - np.einsum("bhdv,bhd->bhv", now, k))
        now = now + k[..., None] * update[:, :, None]
        out[:, node] = np.einsum("bhdv,bhd->bhv", now, q) / np.sqrt(shape.key_dim)
        states[:, node], windows[:, node] = now, window[:, 1:]
    return out, states, windows


def largest_error(found, expected) -> float:
    return float(np.abs(np.asarray(found, np.float64) - expected).max())


_run_tree = jax.jit(state_layers.run_tree)
_commit = jax.jit(state_layers.commit)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_tree_in_one_pass_is_the_recurrence_on_every_path(dtype):
    with jax.enable_x64(dtype == "float64"):
        parents, rng = random_trees(), np.random.default_rng(2)
        inputs, state = drawn(TREES, NODES, dtype)
        out, nodes = _run_tree(inputs, state, *tree_arguments(parents))
        expected, *states = by_paths(inputs, state, parents)
        assert largest_error(out, expected) < TOLERANCE[dtype]
        ends, counts, paths = [], [], np.zeros((TREES, NODES), np.int32)
        for row, row_parents in enumerate(parents):
            path = paths_of(row_parents)[rng.integers(NODES)]
            counts.append(rng.integers(len(path) + 1))
            paths[row, : len(path)], paths[row, len(path) :] = path, path[-1]
            ends.append(path[counts[-1] - 1] if counts[-1] else -1)
        after = _commit(state, nodes, paths, np.array(counts, np.int32))
        for found, wanted in zip((after.s, after.inputs), states, strict=True):
            assert largest_error(found, wanted[np.arange(TREES), ends]) < TOLERANCE[dtype]


@pytest.mark.parametrize("rule", ["sibling", "decay_late", "convolve_late"])
def test_a_wrong_rule_has_other_outputs(rule):
    """Negative control."""
    parents = random_trees()
    inputs, state = drawn(TREES, NODES, "float32")
    mask, positions = tree_arguments(parents)
    wrong: dict = {}
    siblings = (parents[:, :, None] == parents[:, None]) & (parents >= 0)[:, None]
    if rule == "sibling":  # a node also sees those before it below the same parent
        mask |= siblings & np.tril(np.ones((NODES, NODES), bool), -1)
    else:
        wrong[rule] = 1
    out, _ = _run_tree(inputs, state, mask, positions)
    expected, *_ = by_paths(inputs, state, parents, **wrong)
    rows = [row for row in range(TREES) if siblings[row].sum() > NODES]
    assert len(rows) > 100
    for row in rows:
        size = (parents[row] >= 0).sum() + 1
        assert largest_error(out[row, :size], expected[row, :size]) > 1e-3


def test_levels_are_the_tree_and_padding_is_dropped():
    """A draft fills the nodes level by level; each row has a tree of its own."""
    parents = random_trees()[2 * NODES :][:40]
    inputs, state = jax.tree.map(
        lambda x: x[:40] if x.ndim > 2 else x, drawn(TREES, NODES, "float32")
    )
    mask, positions = tree_arguments(parents)
    expected, _ = _run_tree(inputs, state, mask, positions)
    parents = np.broadcast_to(parents[20], parents.shape)  # one shape for all, as of a static tree
    mask, positions = tree_arguments(parents)
    expected, of_tree = _run_tree(inputs, state, mask, positions)
    level = jax.jit(state_layers.run_level)
    drafted = state_layers.empty_nodes(state, 40, NODES)
    size, first = int((parents[0] >= 0).sum()) + 1, np.full(40, 7, np.int32)
    for depth in range(NODES):
        nodes = np.flatnonzero(positions[0, :size] == 7 + depth)
        if not len(nodes):
            break
        nodes = np.pad(nodes, (0, 6 - len(nodes)), constant_values=NODES)  # padding
        at = np.minimum(nodes, NODES - 1)
        level_inputs = jax.tree.map(lambda x, at=at: x[:, at] if x.ndim > 2 else x, inputs)
        seen = mask[:, at] & (nodes < NODES)[:, None]
        out, drafted = level(level_inputs, state, drafted, nodes, seen, positions[:, at], first)
        live = nodes[nodes < NODES]
        assert largest_error(out[:, : len(live)], np.asarray(expected)[:, live]) < 2e-5
    for name in ("x", "k", "d", "log_decay"):
        found, wanted = (np.asarray(getattr(y, name))[:, :size] for y in (drafted, of_tree))
        assert largest_error(found, wanted) < 2e-5


def test_a_chain_in_parts_is_the_recurrence_and_padding_leaves_the_state():
    inputs, state = drawn(3, CHAIN, "float32")
    parents = np.arange(-1, CHAIN - 1)
    counts = np.array([CHAIN, 1, 0], np.int32)
    padding = np.arange(CHAIN) >= counts[:, None]
    poisoned = jax.tree.map(
        lambda x: jnp.where(padding[..., None], jnp.nan, x) if x.ndim > 2 else x, inputs
    )
    out, after = jax.jit(state_layers.run_chain)(poisoned, state, counts)
    expected, *states = by_paths(inputs, state, np.tile(parents, (3, 1)))
    for row, count in enumerate(counts):
        if count:
            assert largest_error(out[row, :count], expected[row, :count]) < 2e-5
        for found, values in zip((after.s, after.inputs), states, strict=True):
            assert largest_error(found[row], values[row, count - 1]) < 2e-5


def test_a_part_of_the_rows_is_advanced_in_place():
    inputs, state = drawn(4, 8, "float32")
    part = jax.tree.map(lambda x: x[:2] if x.ndim > 2 else x, inputs)
    mask, positions = np.tril(np.ones((8, 8), bool)), np.tile(np.arange(8), (2, 1))
    _, nodes = _run_tree(part, state, mask, positions)
    path = positions, np.array([8, 3], np.int32)
    after = _commit(state, nodes, *path)
    alone = _commit(jax.tree.map(lambda x: x[:2], state), nodes, *path)
    for found, expected, old in zip(*map(jax.tree.leaves, (after, alone, state)), strict=True):
        np.testing.assert_array_equal(found[:2], expected)
        np.testing.assert_array_equal(found[2:], old[2:])
