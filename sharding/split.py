"""How one model is divided over a mesh: the table from logical axes to mesh axes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sharding.axes import (
    BATCH,
    EMBED,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER_BATCH,
    MLP,
    STAGES,
    VOCAB,
)
from sharding.mesh import DATA, STAGE, AnyMesh, first_axes, model_axes, prime_factors


@dataclasses.dataclass(frozen=True)
class Split:
    """How a model is divided over mesh axes; by default it is not.

    Attributes:
      axes: mesh axes that divide heads, also those of gated delta nets, MLP or experts, and
        vocabulary.
      kv_axes: the first of `axes`; they divide the KV heads. KV heads are replicated along the
        others, which divide the query heads of each KV head.
      shards: number of devices along `axes`.
      kv_shards: number of devices along `kv_axes`.
      layer_axes: mesh axes that divide the layers.
    """

    axes: tuple[str, ...] = ()
    kv_axes: tuple[str, ...] = ()
    shards: int = 1
    kv_shards: int = 1
    layer_axes: tuple[str, ...] = ()

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which KV heads are replicated."""
        return self.axes[len(self.kv_axes) :]

    def spec(
        self, names: tuple[str | None, ...], data_axes: tuple[str, ...] = (DATA,)
    ) -> PartitionSpec:
        """Returns the partition of an array, by the logical names of its axes.

        Args:
          names: names of the array's axes.
          data_axes: mesh axes that divide the rows; (): rows are replicated.

        Heads, the MLP's hidden width and the vocabulary are divided: attention and the MLP then
        need one all-reduce each, after their second product, and logits none. The width E is
        replicated because every device needs all of it to begin a layer, and the head size D
        because rotation and softmax go over it.
        """
        table = {
            BATCH: data_axes,
            LAYER_BATCH: (*self.layer_axes, *data_axes),
            STAGES: (STAGE,),
            HEADS: self.axes,
            KV_HEADS: self.kv_axes,
            MLP: self.axes,
            EXPERTS: self.axes,
            VOCAB: self.axes,
            EMBED: (),
            HEAD_DIM: (),
            None: (),
        }
        return PartitionSpec(*(table[name] or None for name in names))


def part_bytes(tree: Any) -> int:
    """Returns the bytes per device of arrays, or of shapes with shardings."""
    return sum(array_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Returns the bytes of an array on a device, which packs two int4 into a byte."""
    elements = math.prod(shape)
    if dtype == jnp.int4:
        return (elements + 1) // 2
    is_key = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return elements * (8 if is_key else np.dtype(dtype).itemsize)


def split_over(
    mesh: AnyMesh, kv_heads: int, sizes: Mapping[str, int], shards: int | None = None
) -> Split:
    """Returns the division of a model of these sizes over the `model` axis of a factored mesh.

    Args:
      mesh: as `factored` returns it.
      kv_heads: K, which may be fewer than the parts.
      sizes: what else is divided, by its name in messages, such as "query heads".
      shards: number of parts; None: the size of the axis.

    Raises:
      ValueError: a size does not divide; the message lists the valid numbers of parts.
    """
    count = math.prod(model_axes(mesh).values()) if shards is None else shards
    axes = first_axes(mesh, count)
    if problem := _indivisible(kv_heads, sizes, count):
        counts = range(1, max(1, min(sizes.values())) + 1)
        valid = [n for n in counts if not _indivisible(kv_heads, sizes, n)]
        raise ValueError(
            f"model={count} does not divide the model: {problem}; use model="
            f"{', '.join(map(str, valid))}"
        )
    kv_shards = min(count, kv_heads)
    return Split(axes, first_axes(mesh, kv_shards), count, kv_shards)


def _indivisible(kv_heads: int, sizes: Mapping[str, int], count: int) -> str | None:
    """Returns a description of the size that `count` does not divide, or None."""
    # Fewer KV heads than devices are replicated along the last of the axis's prime factors.
    products = np.cumprod([1, *prime_factors(count)])
    if kv_heads % count and kv_heads not in products:
        return (
            f"its {kv_heads} KV heads are not a multiple of {count}; to replicate them, there must "
            f"be {', '.join(map(str, products[:-1]))}"
        )
    for name, size in sizes.items():
        if size % count:
            return f"its {size} {name} are not a multiple of {count}"
    return None
