"""The memory footprint of a target and a drafter on each device, from shapes.

It has weights, KV caches and states; temporaries of the programs are not part of it.
"""

import bisect
import dataclasses
from collections.abc import Callable

import jax

import models
from magicjax import placement
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.parallel import offloading
from magicjax.parallel.layouts import Offloaded
from sharding import STAGE, AnyMesh, array_bytes, part_bytes


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes on each device.

    Attributes:
      weights: the target's weights; without the blocks of an offloaded target.
      streamed: two layers of an offloaded target, the current and the next.
      draft_weights: weights of draft models, and a drafter's copy of the target's blocks.
      target_kv: the target's KV cache and states.
      draft_kv: the drafter's KV caches, states and bounds of pages.
      allocated: weights that are loaded already, part of the numbers above.
    """

    weights: int
    streamed: int
    draft_weights: int
    target_kv: int
    draft_kv: int
    allocated: int

    @property
    def draft(self) -> int:
        """Bytes of the drafter: weights, KV caches and states."""
        return self.draft_weights + self.draft_kv

    @property
    def resident(self) -> int:
        """Bytes of all weights, KV caches and states."""
        return self.weights + self.streamed + self.target_kv + self.draft

    @property
    def new(self) -> int:
        """Bytes that are still to be allocated."""
        return self.resident - self.allocated


def of_models(
    target: Model, drafter: Drafter | None, rows: int, capacity: int, mesh: AnyMesh | None = None
) -> Footprint:
    """Returns the footprint of a target and a drafter, with or without weights.

    Args:
      target: whose output is decoded.
      drafter: after `Drafter.for_target`, so that it has the models that it derives.
      rows: rows per group of devices.
      capacity: slots of a row in a full cache.
      mesh: factored; None: one device.
    """
    all_models = target, *placement.models_of(drafter)
    weights, *draft_weights = (_weight_bytes(model, target, mesh) for model in all_models)
    streamed, *draft_streamed = (_streamed_bytes(model, target, mesh) for model in all_models)
    loaded = [model for model in all_models if model.params is not None]
    target_kv, draft_kv = kv_bytes(target, drafter, rows, capacity, mesh)
    return Footprint(
        weights=weights,
        streamed=streamed,
        draft_weights=sum(draft_weights) + sum(draft_streamed),
        target_kv=target_kv,
        draft_kv=draft_kv,
        allocated=sum(_weight_bytes(model, target, mesh) for model in loaded),
    )


def kv_bytes(
    target: Model, drafter: Drafter | None, rows: int, capacity: int, mesh: AnyMesh | None = None
) -> tuple[int, int]:
    """Returns the bytes of KV caches and states of (target, drafter) on each device.

    The arguments are those of `of_models`; without a mesh, the bytes are those of all devices, of
    which replicas of KV heads do not count.
    """

    def per_device(model: Model, size: int, states: int) -> int:
        entries = (size - states) // _num_shards(model, target, mesh, "kv_shards")
        return entries + state_bytes(model, target, states, mesh)

    cache = per_device(target, target.kv_bytes(rows, capacity), rows * target.state_bytes)
    draft_cache = 0
    for member in () if drafter is None else drafter.members():
        model = next(iter(placement.models_of(member)), target)
        size = member.cache_bytes(target, rows, capacity)
        draft_cache += per_device(model, size, member.state_bytes(rows))
    return cache, draft_cache


def state_bytes(model: Model, target: Model, size: int, mesh: AnyMesh | None = None) -> int:
    """Returns the bytes on each device of states of a model, which have `size` bytes in all."""
    return size // _num_shards(model, target, mesh, "shards")


def largest(sizes: range, limit: float, needed: Callable[[int], float]) -> int:
    """Returns the largest of increasing sizes that needs at most `limit` bytes; 0 if none does."""
    count = bisect.bisect_right(sizes, limit, key=needed)
    return sizes[count - 1] if count else 0


def _weight_bytes(model: Model, target: Model, mesh: AnyMesh | None) -> int:
    """Returns the bytes of a model's weights on each device.

    Those that are streamed, and those of the target that a head reads, are not part of it.
    """
    if model.params is not None:
        return part_bytes(model.params) - _shared_bytes(model, target, mesh)
    leaves = jax.tree.leaves(model.layout.abstract_params(model.module))
    size = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
    return size // _num_shards(model, target, mesh, "shards") - _shared_bytes(model, target, mesh)


def _shared_bytes(model: Model, target: Model, mesh: AnyMesh | None) -> int:
    """Returns the bytes of the target's output matrix that are also a head's, on one device.

    On a mesh every device has the whole head, and the target's matrix can be divided.
    """
    if mesh is not None or not isinstance(model.config, models.MtpConfig):
        return 0
    name = "embedding" if target.config.tie_embeddings else "unembedding"
    is_packed = isinstance(models.formats_of(target.module).of(name), str)
    if is_packed or model.dtype != target.dtype:
        return 0
    return array_bytes((model.config.vocab_size, model.config.hidden_size), model.dtype)


def _streamed_bytes(model: Model, target: Model, mesh: AnyMesh | None) -> int:
    """Returns the bytes of two layers of an offloaded model on each device; 0 for other models."""
    if not isinstance(model.layout, Offloaded):
        return 0
    size = offloading.two_layers(model.module, model.layout.blocks)
    if model.params is None:  # shapes of the whole blocks
        size //= _num_shards(model, target, mesh, "shards")
    return size


def _num_shards(model: Model, target: Model, mesh: AnyMesh | None, shards: str) -> int:
    """Returns the number of devices that divide a model; `shards` is a field of `Split`."""
    if mesh is None:
        return 1
    stages = mesh.shape[STAGE] if model is target else 1  # a draft model is on every stage
    return stages * getattr(placement.split_of(model.config, model.shards, mesh), shards)
