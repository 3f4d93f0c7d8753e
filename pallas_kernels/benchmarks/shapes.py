"""The shapes on which attention is tested and timed, and random inputs for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call of `tree_attention`.

    Attributes:
      batch: B.
      nodes: T, the queries.
      new: N, the tokens that are not in the cache.
      kv_heads: K.
      group: G, query heads for each key/value head.
      head_dim: D.
      slots: S, the capacity of the cache.
    """

    batch: int
    nodes: int
    new: int
    kv_heads: int
    group: int
    head_dim: int
    slots: int

    def __str__(self) -> str:
        letters = zip("BTNKGDS", dataclasses.astuple(self), strict=True)
        return "-".join(f"{letter}{size}" for letter, size in letters)


# For the Hopper kernel, whose blocks have 64 slots and whose tiles have 64 rows.
HOPPER_SHAPES = (
    Shape(6, 1, 1, 2, 4, 128, 165),  # plain decoding
    Shape(6, 5, 5, 1, 5, 64, 165),  # verification of a chain
    Shape(6, 1, 5, 1, 4, 64, 165),  # a chain's draft level
    Shape(6, 16, 16, 1, 8, 128, 165),  # verification of a tree, two tiles
    Shape(6, 5, 5, 2, 4, 256, 130),  # warpgroups that share the columns of the values
    Shape(6, 33, 33, 1, 5, 64, 40),  # less than a block of slots, an odd number of tiles
    Shape(6, 70, 70, 1, 1, 64, 1),  # more new tokens than a block
)

# For a check that takes a minute.
SMALL_SHAPES = (HOPPER_SHAPES[1], HOPPER_SHAPES[3])

# Full sizes for a GPU: a layer of llama-3.1-8b at (batch, slots), with T = N nodes.
FULL_SIZES = ((16, 32768), (1, 131072), (64, 8192))
FULL_NODES = (1, 5, 16)  # plain decoding, a chain of 4, a tree
FULL_HEADS = (8, 4, 128)  # K, G, D


def bench_shape(
    batch: int, context: int, kv_heads: int, group: int, head_dim: int, nodes: int
) -> Shape:
    """Returns the shape of a verification pass: T = N nodes and a cache of `context` slots."""
    return Shape(batch, nodes, nodes, kv_heads, group, head_dim, context)


PRESETS = {
    "hopper": tuple(
        bench_shape(batch, slots, *FULL_HEADS, nodes)
        for batch, slots in FULL_SIZES
        for nodes in FULL_NODES
    ),
}


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of q, k_prefix, v_prefix, k_new, v_new, by argument name."""
    prefix = (shape.batch, shape.kv_heads, shape.slots, shape.head_dim)
    new = (shape.batch, shape.new, shape.kv_heads, shape.head_dim)
    queries = (shape.batch, shape.nodes, shape.kv_heads * shape.group, shape.head_dim)
    return {"q": queries, "k_prefix": prefix, "v_prefix": prefix, "k_new": new, "v_new": new}


def tree_mask(nodes: int) -> np.ndarray:
    """Returns bool [T, T], the ancestors of each node of a complete binary tree."""
    seen = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        seen[node] |= seen[(node - 1) // 2]
    return seen


def random_inputs(shape: Shape, dtype: jnp.dtype, seed: int = 0) -> dict[str, Array]:
    """Returns normal q, k_prefix, v_prefix, k_new, v_new of a shape, by argument name."""
    rng = np.random.default_rng(seed)  # nothing to compile, unlike jax.random
    drawn = np.float64 if dtype == jnp.float64 else np.float32
    return {
        name: jax.device_put(rng.standard_normal(size, drawn).astype(dtype))
        for name, size in _sizes(shape).items()
    }


def device_inputs(shape: Shape, dtype: jnp.dtype, seed: int = 0) -> dict[str, Array]:
    """Returns normal inputs as `random_inputs` does, drawn on the device, which is faster."""
    keys = jax.random.split(jax.random.key(seed), 5)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return {name: draw(key, size, dtype) for key, (name, size) in zip(keys, _sizes(shape).items())}


def emphasize_new_tokens(inputs: dict[str, Array]) -> dict[str, Array]:
    """Returns the inputs with the scores of new tokens raised by 9.

    The few new tokens then matter beside a long prefix, so that a wrong mask causes a large error.
    """
    shift = 3 * inputs["q"].shape[-1] ** -0.25  # D * shift^2 / sqrt(D) = 9
    return inputs | {name: inputs[name] + shift for name in ("q", "k_new")}
