"""Mixtures of experts: each token runs the MLPs that a router chooses for it.

No token is dropped and none has a limit, so its result does not depend on its neighbours. The pairs
of a token and an expert are sorted by expert and cut into blocks of one expert each. A loop runs
the blocks, so that the weights of experts that no token chose are not read, and those of the others
once for each block. A token adds the outputs of its experts in the order of their numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.linear import Projection, products
from pallas_kernels.cpu.linear import Matrix

# Pairs of a token and an expert that are computed at once: the least and the most.
SMALLEST_BLOCK, LARGEST_BLOCK = 6, 64


class Blocks(NamedTuple):
    """Pairs of a token and an expert, sorted by expert and cut into blocks.

    Attributes:
      pairs: int32 [P], indices of pairs; those of an expert are adjacent, in order of tokens.
      first: int32 [X], where the pairs of each expert begin.
      counts: int32 [X], how many there are.
      ends: int32 [X], the blocks of each expert and of those before it.
    """

    pairs: Int[Array, "P"]
    first: Int[Array, "X"]
    counts: Int[Array, "X"]
    ends: Int[Array, "X"]


def blocks_of(experts: Int[Array, "P"], num_experts: int, size: int) -> Blocks:
    """Returns the blocks of pairs, given the expert of each; others than 0 to X - 1 are omitted.

    With blocks of 2, the experts 1 0 1 3 1 of five pairs and X = 3 give the pairs 1 0 2 4 3, the
    counts 1 3 0, and the ends 1 3 3: block 0 has the pair 1, block 1 the pairs 0 2, block 2 pair 4.
    """
    is_known = (experts >= 0) & (experts < num_experts)
    experts = jnp.where(is_known, experts, num_experts)
    pairs = jnp.argsort(experts, stable=True).astype(jnp.int32)
    counts = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
    first = (jnp.cumsum(counts) - counts).astype(jnp.int32)
    return Blocks(pairs, first, counts, jnp.cumsum(-(-counts // size)).astype(jnp.int32))


def block_size(tokens: int, mean: float) -> int:
    """Returns the pairs of a block, given how many an expert has on average.

    Padding costs products, and a second block of an expert reads its weights again: twice the mean
    is enough for most experts.
    """
    return min(tokens, max(SMALLEST_BLOCK, min(math.ceil(2 * mean), LARGEST_BLOCK)))


def choose(
    logits: Float[Array, "N X"], count: int, normalize: bool
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Returns the experts of each token with the largest logits, and their weights in float32.

    Args:
      logits: the router's logits.
      count: k.
      normalize: the weights sum to 1; False: they are those of the softmax over all experts.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen, experts = jax.lax.top_k(logits, count)
    if normalize:
        return experts, jax.nn.softmax(chosen)
    return experts, jnp.exp(chosen - jax.nn.logsumexp(logits, -1, keepdims=True))


def run_experts(
    x: Float[Array, "N E"],
    experts: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    up_projections: Sequence[Projection],
    activate: Callable[..., Array],
    down_projection: Projection,
    num_experts: int,
    first_expert: Int[Array, ""] | int = 0,
) -> Float[Array, "N E"]:
    """Returns the weighted sum of each token's experts among those of this device.

    Args:
      x: tokens.
      experts, weights: the experts of each token and their weights.
      up_projections: the first linear maps, with the experts as first axis of their outputs.
      activate: returns the hidden units, given the results of `up_projections`.
      down_projection: the last linear map, likewise.
      num_experts: X, on all devices.
      first_expert: the number of this device's first expert.
    """
    tokens, count = experts.shape
    up_maps, down_map = [_Map.of(each) for each in up_projections], _Map.of(down_projection)
    size = block_size(tokens, tokens * count / num_experts)
    local_experts = down_map.matrix.weight.shape[0]
    blocks = blocks_of(experts.reshape(-1) - first_expert, local_experts, size)
    flat_weights = weights.reshape(-1)

    def run(i, total):
        expert = jnp.searchsorted(blocks.ends, i, side="right").astype(jnp.int32)
        num_blocks = -(-blocks.counts[expert] // size)
        first_block = blocks.ends[expert] - num_blocks
        position = (i - first_block) * size + jnp.arange(size)
        is_pair = position < blocks.counts[expert]
        pair = blocks.pairs[jnp.minimum(blocks.first[expert] + position, tokens * count - 1)]
        token = jnp.where(is_pair, pair // count, tokens)  # out of bounds: dropped
        rows = jnp.take(x, token, axis=0, mode="fill", fill_value=0)
        hidden = activate(*_project(rows, up_maps, expert))
        (out,) = _project(hidden, [down_map], expert)
        out = out.astype(total.dtype) * flat_weights[pair][:, None]
        return total.at[token].add(out, mode="drop")

    return jax.lax.fori_loop(0, blocks.ends[-1], run, jnp.zeros(x.shape, weights.dtype))


class _Map(NamedTuple):
    """A linear map for each expert.

    Attributes:
      matrix: with an axis of experts.
      bias: [X, O], or None.
      backend: backend of the product.
    """

    matrix: Matrix
    bias: Float[Array, "X O"] | None
    backend: str | None

    @classmethod
    def of(cls, projection: Projection) -> "_Map":
        """Returns the parameters of a projection, outside of the loop that uses them."""
        bias = projection.bias if projection.use_bias else None
        assert isinstance(projection.matrix, Matrix)  # experts are never packed
        return cls(projection.matrix, bias, projection.backend)


def _project(
    x: Float[Array, "B I"], maps: Sequence[_Map], expert: Int[Array, ""]
) -> list[Float[Array, "B O"]]:
    """Returns the results of an expert's linear maps of the same x."""
    outs = products(x, [each.matrix for each in maps], 1, maps[0].backend, expert=expert)
    return [
        out if each.bias is None else out + each.bias[expert]
        for each, out in zip(maps, outs, strict=True)
    ]
