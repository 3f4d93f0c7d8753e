"""Layers with a state in place of keys and values (`models.gated_delta`): trees, commits, prefill.

A token tree goes through such a layer in one pass, without a state for each node. Let S be the
state before the root, G_ij the product of the decays below node j down to node i, G_i that from S
to i, and d the update of a node. On a path, d_i = beta_i (v_i - (a_i S_parent)^T k_i), so that

    d_i + beta_i sum_j G_ij (k_i . k_j) d_j = beta_i (v_i - G_i S^T k_i)

with sums over the ancestors j of i: a triangular system, since parents come before their children.
The output of a node is G_i S^T q_i + sum_j G_ij (q_i . k_j) d_j, over itself too, and the state
after it is G_i S + sum_j G_ij k_j d_j^T. Substitution is stable; a product of powers of the matrix
is not, since keys of similar tokens are nearly equal. Nothing is rolled back: a commit adds the
accepted nodes to the state, and others leave no trace. A prompt is a chain, and runs in parts of
`CHUNK`. Decays are sums of logarithms along paths; a state is at least float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from models.gated_delta import DeltaNetInputs, DeltaNetShape
from sharding import HEADS, LAYER_BATCH, logical_axes

CHUNK = 64  # tokens of a chain in one system, whose size is the square
# Rows of a system that are solved by one call. On a CPU, BLAS divides larger systems over threads
# that wait for each other, and is up to several hundred times slower beside other programs.
BLOCK = 16

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@struct.dataclass
class LayerState:
    """The state of a layer after the committed tokens of each row.

    Attributes:
      s: [R, H, Dk, Dv], at least float32; R as in `KVCache`.
      inputs: [R, W - 1, C], the newest inputs of the convolution, oldest first; zeros before the
        text.
    """

    s: Float[Array, "R H Dk Dv"] = struct.field(metadata=logical_axes(LAYER_BATCH, HEADS))
    inputs: Float[Array, "R W-1 C"] = struct.field(metadata=logical_axes(LAYER_BATCH, None, HEADS))


@struct.dataclass
class StateNodes:
    """What a pass keeps of its nodes, in place of keys and values.

    Attributes:
      x: [B, N, C], inputs of the convolution.
      k: [B, N, Hk, Dk], keys.
      d: [B, N, H, Dv], updates.
      log_decay: [B, N, H], each node's own.
      positions: int32 [B, N], in a draft; None after the pass of a whole tree.
    """

    x: Float[Array, "B N C"]
    k: Float[Array, "B N Hk Dk"]
    d: Float[Array, "B N H Dv"]
    log_decay: Float[Array, "B N H"]
    positions: Int[Array, "B N"] | None = None


def empty(shape: DeltaNetShape, batch: int, dtype) -> LayerState:
    """Returns the states before a text."""
    s = shape.value_heads, shape.key_dim, shape.value_dim
    inputs = jnp.zeros((batch, shape.conv_width - 1, shape.channels), dtype)
    return LayerState(jnp.zeros((batch, *s), jnp.promote_types(dtype, jnp.float32)), inputs)


def empty_nodes(state: LayerState, batch: int, nodes: int) -> StateNodes:
    """Returns what `run_level` fills: zeros for `nodes` tokens of each row."""
    _, heads, key_dim, value_dim = state.s.shape
    channels, state_dtype = state.inputs.shape[-1], state.s.dtype
    key_heads = (channels - heads * value_dim) // (2 * key_dim)

    def zeros(*shape: int, dtype=state_dtype) -> Array:
        return jnp.zeros((batch, nodes, *shape), dtype)

    x, positions = zeros(channels, dtype=state.inputs.dtype), zeros(dtype=jnp.int32)
    k, d = zeros(key_heads, key_dim), zeros(heads, value_dim)
    return StateNodes(x, k, d, zeros(heads), positions)


def run_tree(
    inputs: DeltaNetInputs,
    state: LayerState,
    mask: Bool[Array, "*B N N"],
    positions: Int[Array, "B N"],
) -> tuple[Float[Array, "B N H Dv"], StateNodes]:
    """Returns the outputs of the nodes of a tree, and what a commit needs of them.

    Args:
      inputs: of the nodes, parents before their children, the root first.
      state: before the root.
      mask: the ancestors of each node and itself; padding may see nothing.
      positions: of the nodes.
    """
    identity = jnp.eye(mask.shape[-1], dtype=bool)
    mask = jnp.broadcast_to(mask | identity, (len(positions), *mask.shape[-2:]))
    distances = positions[:, :, None] - positions[:, None]
    depth = positions - positions[:, :1]
    q, k, v = inputs.heads(_convolve(inputs, inputs.x, state, mask, distances, depth))
    decays = _Decays.between(mask, inputs.log_decay, mask & ~identity)
    for_k, for_q = _from_state((k, q), state.s, decays)
    d = _solve(k, v - for_k, inputs.beta, decays, mask & ~identity)
    out = for_q + _from_nodes(q, k, d, decays, mask)
    return out, StateNodes(inputs.x, k, d, inputs.log_decay)


def run_level(
    inputs: DeltaNetInputs,
    state: LayerState,
    drafted: StateNodes,
    nodes: Int[Array, "T"],
    mask: Bool[Array, "*B T N"],
    positions: Int[Array, "B T"],
    first: Int[Array, "B"],
) -> tuple[Float[Array, "B T H Dv"], StateNodes]:
    """Returns the outputs of some nodes of a tree, and all drafted nodes with them filled in.

    Args:
      inputs: of the tokens, parents before their children.
      state: before the position `first`.
      drafted: the nodes that have run.
      nodes: the node of each token; N and above mark padding.
      mask: the nodes that each token sees: its ancestors and itself.
      positions: of the tokens.
      first: int32 [B], of the first token after those in the state.
    """
    count = drafted.x.shape[1]
    mask = jnp.broadcast_to(mask, (len(positions), *mask.shape[-2:]))

    def put(old, new):
        return old.at[:, nodes].set(new.astype(old.dtype), mode="drop")

    x, node_positions = put(drafted.x, inputs.x), put(drafted.positions, positions)
    log_decay = put(drafted.log_decay, inputs.log_decay)
    distances = positions[:, :, None] - node_positions[:, None]
    convolved = _convolve(inputs, x, state, mask, distances, positions - first[:, None])
    q, k_new, v = inputs.heads(convolved)
    k = put(drafted.k, k_new)
    # What a token sees is on one path, so that positions say which node is below another.
    decays = _Decays.between(mask, log_decay, node_positions[:, :, None] > node_positions[:, None])
    level_decays = decays.to_nodes(nodes)
    outside_level = mask.at[:, :, nodes].set(False, mode="drop")
    for_k, for_q = _from_state((k_new, q), state.s, decays)
    v = v - for_k - _from_nodes(k_new, k, drafted.d, decays, outside_level)
    level_ancestors = jnp.take(mask, nodes, 2, mode="clip") & (nodes < count)
    level_ancestors &= ~jnp.eye(len(nodes), dtype=bool)
    d = put(drafted.d, _solve(k_new, v, inputs.beta, level_decays, level_ancestors))
    out = for_q + _from_nodes(q, k, d, decays, mask)
    return out, StateNodes(x, k, d, log_decay, node_positions)


def run_chain(
    inputs: DeltaNetInputs, state: LayerState, count: Int[Array, "B"]
) -> tuple[Float[Array, "B T H Dv"], LayerState]:
    """Returns the outputs of the tokens of a chain, and the state after the first `count` of a row.

    The others are padding, whose outputs are undefined.
    """
    batch, length, _ = inputs.x.shape
    live = (jnp.arange(length) < count[:, None])[..., None]
    # In padding nothing decays, and nothing is added, not even 0 times what is not finite.
    token_inputs = inputs.x, inputs.beta, inputs.log_decay
    x, beta, log_decay = (jnp.where(live, y, 0) for y in token_inputs)
    conv_inputs = jnp.concatenate([state.inputs, x.astype(state.inputs.dtype)], 1)
    newest = _newest(conv_inputs, count, state.inputs.shape[1])
    conv_inputs, kernel = conv_inputs.astype(beta.dtype), inputs.kernel.astype(beta.dtype).T
    convolved: Any = sum(conv_inputs[:, i : i + length] * w for i, w in enumerate(kernel))
    q, k, v = inputs.heads(convolved)
    size = min(length, CHUNK)
    num_chunks = -(-length // size)
    lower_triangle = jnp.tril(jnp.ones((1, size, size), bool))
    strict_triangle = jnp.tril(lower_triangle, -1)

    def divide(x):
        x = jnp.pad(x, [(0, 0), (0, num_chunks * size - length), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch, num_chunks, size, *x.shape[2:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(batch, num_chunks * size, *x.shape[3:])[:, :length]

    def run_chunk(s, chunk):
        q, k, v, beta, log_decay = chunk
        decays = _Decays.between(lower_triangle, log_decay, strict_triangle)
        for_k, for_q = _from_state((k, q), s, decays)
        d = _solve(k, v - for_k, beta, decays, strict_triangle)
        out = for_q + _from_nodes(q, k, d, decays, lower_triangle)
        return _advance(s, k, d, log_decay), out

    s, out = jax.lax.scan(run_chunk, state.s, tuple(map(divide, (q, k, v, beta, log_decay))))
    return join(out), LayerState(s, newest)


def commit(
    state: LayerState, nodes: StateNodes, path: Int[Array, "B A"], count: Int[Array, "B"]
) -> LayerState:
    """Returns the state after the first `count` nodes of each row's path.

    Of more rows than those of the path, the first are advanced in place.
    """

    def on_path(x):
        return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), 1)

    x, k, d, log_decay = map(on_path, (nodes.x, nodes.k, nodes.d, nodes.log_decay))
    rows, steps = x.shape[:2]
    live = (jnp.arange(steps) < count[:, None])[:, :, None]
    k, d = (jnp.where(live[..., None], y, 0) for y in (k, d))
    s = _advance(state.s[:rows], k, d, jnp.where(live, log_decay, 0))
    old_inputs = state.inputs[:rows]
    conv_inputs = jnp.concatenate([old_inputs, x.astype(old_inputs.dtype)], 1)
    new = LayerState(s, _newest(conv_inputs, count, old_inputs.shape[1]))

    def put(old, new):
        return new if len(old) == rows else jax.lax.dynamic_update_slice_in_dim(old, new, 0, 0)

    return jax.tree.map(put, state, new)


def _newest(
    inputs: Float[Array, "B T C"], count: Int[Array, "B"], size: int
) -> Float[Array, "B W-1 C"]:
    """Returns the last `size` inputs of each row, given as many of before and `count` new ones."""
    return jnp.take_along_axis(inputs, (count[:, None] + jnp.arange(size))[..., None], 1)


def _convolve(
    inputs: DeltaNetInputs,
    x: Float[Array, "B N C"],
    state: LayerState,
    mask: Bool[Array, "B T N"],
    distances: Int[Array, "B T N"],
    depth: Int[Array, "B T"],
) -> Float[Array, "B T C"]:
    """Returns the convolution of each token over its newest ancestors.

    Args:
      inputs: have the kernel.
      x: of the nodes.
      state: has the inputs before the first token.
      mask: the nodes that each token sees.
      distances: by how much each node's position precedes the token's.
      depth: the tokens between the state and each token.
    """
    width, old_inputs = inputs.shape.conv_width, state.inputs[: len(x)]
    conv_inputs = jnp.concatenate([old_inputs, x.astype(old_inputs.dtype)], 1)
    conv_inputs = conv_inputs.astype(inputs.beta.dtype)
    kernel = inputs.kernel.astype(conv_inputs.dtype)

    def term(distance: int) -> Array:
        at_distance = mask & (distances == distance)
        before = jnp.clip(width - 1 + depth - distance, 0, width - 2)
        index = jnp.where(at_distance.any(-1), width - 1 + at_distance.argmax(-1), before)
        node_inputs = jnp.take_along_axis(conv_inputs, index[..., None], 1)
        return node_inputs * kernel[:, width - 1 - distance]

    return sum(map(term, range(1, width)), term(0))


class _Decays(NamedTuple):
    """The logarithms of decays to tokens.

    Attributes:
      from_state: [B, T, H], from the state.
      from_nodes: [B, H, T, N], from each node; undefined for nodes that a token does not see.
    """

    from_state: Float[Array, "B T H"]
    from_nodes: Float[Array, "B H T N"]

    @classmethod
    def between(
        cls,
        mask: Bool[Array, "B T N"],
        log_decay: Float[Array, "B N H"],
        ancestors: Bool[Array, "B N N"],
    ) -> "_Decays":
        """Returns the decays of tokens that see nodes.

        Differences of sums from the root would lose precision after a node that decays much, so
        that the sums from below an ancestor are taken over the nodes that descend from it.

        Args:
          mask: the nodes that each token sees.
          log_decay: of the nodes.
          ancestors: of each node, without itself; among those that one token sees.
        """
        path_decay = mask[:, None] * log_decay.swapaxes(1, 2)[:, :, None]  # [B, H, T, N]
        nodes = _einsum("bhtn,bnm->bhtm", path_decay, ancestors.astype(path_decay.dtype))
        return cls(path_decay.sum(-1).swapaxes(1, 2), nodes)

    def to_nodes(self, nodes: Int[Array, "U"]) -> "_Decays":
        """Returns the decays from some of the nodes."""
        return self._replace(from_nodes=jnp.take(self.from_nodes, nodes, 3, mode="clip"))


def _weights(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B N Hk Dk"],
    decays: _Decays,
    mask: Bool[Array, "B T N"],
) -> Float[Array, "B H T N"]:
    """Returns G (q . k) of each token and node that it sees, zeros for others."""
    products, log = _einsum("btkd,bnkd->bktn", q, k), decays.from_nodes
    mask = mask[:, None]
    decay = jnp.where(mask, jnp.exp(jnp.where(mask, log, 0)), 0)
    grouped = decay.reshape(len(decay), q.shape[2], -1, *decay.shape[2:])
    return (grouped * products[:, :, None]).reshape(decay.shape)


def _from_nodes(q, k, d, decays, mask) -> Float[Array, "B T H Dv"]:
    """Returns the sum over the nodes that each token sees of G (q . k) d."""
    return _einsum("bhtn,bnhv->bthv", _weights(q, k, decays, mask), d)


def _from_state(
    queries: tuple[Array, ...], s: Float[Array, "R H Dk Dv"], decays: _Decays
) -> list[Float[Array, "B T H Dv"]]:
    """Returns what queries [B, T, Hk, Dk] read of the state, which has decayed until then.

    They read it at once, and as it is stored: it is larger than all else.
    """
    stacked = jnp.concatenate(queries, 1)
    stacked = jnp.repeat(stacked, s.shape[1] // stacked.shape[2], 2)
    out = _einsum("bthd,bhdv->bthv", stacked, s[: len(stacked)])
    decay = jnp.exp(decays.from_state)[..., None]
    return [values * decay for values in jnp.split(out, len(queries), 1)]


def _solve(
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T H Dv"],
    beta: Float[Array, "B T H"],
    decays: _Decays,
    ancestors: Bool[Array, "B T T"],
) -> Float[Array, "B T H Dv"]:
    """Returns the updates of tokens by substitution.

    Args:
      k: keys.
      v: values less what the keys read of the state and of other nodes.
      beta, decays: of the tokens.
      ancestors: strictly lower triangular.
    """
    rhs = beta[..., None] * v
    matrix = _weights(k, k, decays, ancestors) * beta.swapaxes(1, 2)[..., None]
    rhs = rhs.swapaxes(1, 2)
    updates = rhs[:, :, :0]
    for start in range(0, rhs.shape[2], BLOCK):
        rows = slice(start, start + BLOCK)
        from_earlier = _einsum("bhtn,bhnv->bhtv", matrix[:, :, rows, :start], updates)
        block = jax.lax.linalg.triangular_solve(
            *(matrix[:, :, rows, rows], rhs[:, :, rows] - from_earlier),
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
        updates = jnp.concatenate([updates, block], 2)
    return updates.swapaxes(1, 2)


def _advance(
    s: Float[Array, "B H Dk Dv"],
    k: Float[Array, "B T Hk Dk"],
    d: Float[Array, "B T H Dv"],
    log_decay: Float[Array, "B T H"],
) -> Float[Array, "B H Dk Dv"]:
    """Returns the state after the tokens of a path."""
    suffix_decay = jnp.cumsum(log_decay[:, ::-1], 1)[:, ::-1]
    later_decay = jnp.concatenate([suffix_decay[:, 1:], jnp.zeros_like(suffix_decay[:, :1])], 1)
    k = jnp.repeat(k, s.shape[1] // k.shape[2], 2)
    added = _einsum("bthd,bthv->bhdv", k, d * jnp.exp(later_decay)[..., None])
    return s * jnp.exp(suffix_decay[:, 0])[..., None, None] + added
