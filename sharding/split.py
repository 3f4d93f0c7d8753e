"""How one model is divided over the devices of a mesh: one table, and the numbers that follow."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from sharding.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB
from sharding.mesh import AnyMesh, first_axes, model_axes, prime_factors


@dataclasses.dataclass(frozen=True)
class Split:
    """How a model is divided; the default: not at all.

    Attributes:
      axes: mesh axes over which heads, MLP and vocabulary are divided.
      kv_axes: the first of them, over which KV heads are divided; along the others they are the
        same, and the query heads of a KV head are divided instead.
      shards: devices along `axes`.
      kv_shards: devices along `kv_axes`.
    """

    axes: tuple[str, ...] = ()
    kv_axes: tuple[str, ...] = ()
    shards: int = 1
    kv_shards: int = 1

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which KV heads are the same."""
        return self.axes[len(self.kv_axes) :]

    def spec(self, names: tuple[str | None, ...]) -> PartitionSpec:
        """Returns where a parameter lies, by the logical names of its axes.

        The table. Heads, the MLP's hidden width and the vocabulary are divided: the two products
        of attention and the two of the MLP then need one sum over devices each pair, after the
        second, and logits none. The width E is not: every device needs all of it to begin a
        layer. Nor is the head size D: rotation and softmax go over it.
        """
        table = {
            HEADS: self.axes,
            KV_HEADS: self.kv_axes,
            MLP: self.axes,
            VOCAB: self.axes,
            EMBED: (),
            HEAD_DIM: (),
            None: (),
        }
        return PartitionSpec(*(table[name] or None for name in names))


def part_bytes(tree: Any) -> int:
    """Returns the bytes of a device's part of arrays, or of shapes with their shardings."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * _item_bytes(x.dtype)
        for x in jax.tree.leaves(tree)
    )


def _item_bytes(dtype: Any) -> int:
    return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize


def split_over(
    mesh: AnyMesh, heads: int, kv_heads: int, mlp: int, vocab: int, shards: int | None = None
) -> Split:
    """Returns how a model of such sizes is divided over the `model` axis of a factored mesh.

    Args:
      mesh: as `factored` makes it.
      heads, kv_heads, mlp, vocab: H, K, F, V.
      shards: parts of the model; None: as many as the axis has devices.

    Raises:
      ValueError: a size that does not divide; it names the numbers of parts that would.
    """
    whole = math.prod(model_axes(mesh).values())
    count = whole if shards is None else shards
    axes = first_axes(mesh, count)
    problem = _why_not(heads, kv_heads, mlp, vocab, count)
    if problem:
        fits = [
            n for n in range(1, max(heads, 1) + 1) if not _why_not(heads, kv_heads, mlp, vocab, n)
        ]
        raise ValueError(
            f"model={count} does not divide the model: {problem}; use one of "
            f"{', '.join(map(str, fits))}"
        )
    kv_shards = min(count, kv_heads)
    return Split(axes, first_axes(mesh, kv_shards), count, kv_shards)


def _why_not(heads: int, kv_heads: int, mlp: int, vocab: int, count: int) -> str | None:
    """Returns what does not divide, or None."""
    # KV heads that are fewer are held in groups, along the last of the axis's prime factors.
    groups = np.cumprod([1, *prime_factors(count)])
    if kv_heads % count and kv_heads not in groups:
        return (
            f"its {kv_heads} KV heads are no multiple of {count}, and to be held in groups there "
            f"must be {', '.join(map(str, groups[:-1]))} of them"
        )
    for name, size in (("query heads", heads), ("MLP units", mlp), ("tokens", vocab)):
        if size % count:
            return f"its {size} {name} are no multiple of {count}"
    return None
