"""The memory of a request, counted and compared with what is free before anything is compiled.

Weights and KV caches count, and temporaries of the programs do not: a request that is refused
cannot run, and one that passes can still run out of memory.
"""

import bisect
import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from magicjax import placement
from magicjax.decoding.request import Request
from magicjax.model import CAPACITY_MULTIPLE, Model
from magicjax.parallel import offloading
from sharding import STAGE, AnyMesh, array_bytes, part_bytes

GB = 1e9
MANY_ROWS = 2**14  # fewer prompts are read in less than a second


class OutOfMemoryError(ValueError):
    """A request needs more memory than there is; the message has sizes, limit and remedy."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Bytes of a request on each device.

    Attributes:
      weights: of the target; without the blocks of an offloaded one, but with two layers of them.
      cache: the target's KV cache.
      drafter: KV caches and weights of the drafter.
      loaded: whether the weights are allocated already.
    """

    weights: float
    cache: float
    drafter: float
    loaded: bool

    def __str__(self) -> str:
        loaded = ", loaded" if self.loaded else ""
        return (
            f"target's weights {_gb(self.weights)}{loaded}, its KV cache {_gb(self.cache)}, the "
            f"drafter's weights and KV caches {_gb(self.drafter)}"
        )


def check(request: Request, available: float | None = None) -> None:
    """Raises OutOfMemoryError if weights and caches do not fit the free memory.

    Args:
      request: on its devices, or with models without parameters, whose weights then count as well.
      available: bytes of each device; None: as its devices report now, on a CPU the memory that is
        available to this process. Nothing is compared if they do not report it.
    """
    check_workload(request, _workload(request), functools.partial(_remedy, request), available)


def check_workload(
    request: Request,
    workload: str,
    remedy: Callable[[float], list[str]],
    available: float | None = None,
) -> None:
    """Raises OutOfMemoryError if weights and caches do not fit the free memory.

    Args:
      request: with all rows that are allocated.
      workload: what needs the memory, for the message.
      remedy: of available bytes; what fits them.
      available: as for `check`.
    """
    needed = new_bytes(request)
    where = request.target, request.settings.mesh
    limit = free_memory(*where) if available is None else available
    if limit is None or needed <= limit:
        return
    if available is None:
        gc.collect()  # arrays in reference cycles
        limit = free_memory(*where) or limit
    if needed > limit:
        each = "" if request.settings.mesh is None else " on each device"
        fitting = remedy(limit)
        use = "use a smaller model, a smaller dtype or kv_dtype, offload, or more devices"
        if fitting:
            use = f"use {' or '.join(fitting)}, or more devices"
        raise OutOfMemoryError(
            f"{workload} needs {_gb(needed)} of memory{each}, and {_gb(limit)} are available "
            f"({count(request)}): {use}"
        )


def check_rows(target: Model, rows: int, mesh: AnyMesh | None) -> None:
    """Raises OutOfMemoryError if the caches of many rows do not fit, however short the rows are.

    Reading a million prompts takes seconds, and `check` needs their lengths.
    """
    if rows < MANY_ROWS:
        return
    devices = 1 if mesh is None else mesh.size
    per_row = target.kv_bytes(1, CAPACITY_MULTIPLE) / devices
    limit = free_memory(target, mesh)
    if limit is not None and rows * per_row > limit:
        raise OutOfMemoryError(
            f"a batch of {rows} rows needs at least {_gb(rows * per_row)} of "
            f"memory for its KV cache, and {_gb(limit)} are available: use fewer than "
            f"{int(limit / per_row) + 1} rows (batch)"
        )


@contextlib.contextmanager
def explained(request: Request) -> Iterator[None]:
    """Raises OutOfMemoryError, with the counted sizes, from an error of XLA or Python."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(
            f"out of memory: {_workload(request)} has {count(request)}, and temporary arrays "
            "besides: use fewer rows (batch) or fewer tokens per row (context and new tokens)"
        ) from error


def count(request: Request) -> Counted:
    """Returns the bytes of a request on each device."""
    target, drafts = request.target, placement.models_of(request.drafter)
    weights, *draft_weights = (
        _weight_bytes(model, request) + _streamed_bytes(model, request)
        for model in (target, *drafts)
    )
    cache, draft_cache = _cache_bytes(request, len(request.prompts), request.settings.capacity)
    return Counted(weights, cache, sum(draft_weights) + draft_cache, target.params is not None)


def free_memory(target: Model, mesh: AnyMesh | None) -> float | None:
    """Returns the bytes that are free on each device of this process; None if unknown."""
    arrays = jax.tree.leaves(target.params)
    if isinstance(mesh, Mesh):
        devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    elif mesh is None:
        placed = arrays and arrays[0].sharding is not None  # not the shapes of a skeleton
        devices = list(arrays[0].sharding.device_set) if placed else jax.local_devices()[:1]
    else:
        return None
    if not devices:
        return None
    if devices[0].platform == "cpu":  # all devices share it
        free = offloading.free_host_memory()
        return None if free is None else free / len(devices)
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in each for each in stats):
        return None
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def new_bytes(request: Request, batch: int | None = None, capacity: int | None = None) -> float:
    """Returns the bytes to allocate on each device, with another batch or capacity."""
    batch, capacity = batch or len(request.prompts), capacity or request.settings.capacity
    models = (request.target, *placement.models_of(request.drafter))
    weights = sum(_weight_bytes(model, request) for model in models if model.params is None)
    streamed = sum(_streamed_bytes(model, request) for model in models)
    return weights + streamed + sum(_cache_bytes(request, batch, capacity))


def _cache_bytes(request: Request, batch: int, capacity: int) -> tuple[float, float]:
    """Returns the bytes of the KV caches of (target, drafter) on each device."""
    target, settings = request.target, request.settings
    rows = batch if settings.replicated_rows else -(-batch // settings.groups)
    cache = target.kv_bytes(rows, capacity) / _parts(target, target, request, "kv_shards")
    draft_cache = 0.0
    for member in () if request.drafter is None else request.drafter.members():
        model = next(iter(placement.models_of(member)), target)
        size = member.cache_bytes(target, rows, capacity)
        draft_cache += size / _parts(model, target, request, "kv_shards")
    return cache, draft_cache


def _weight_bytes(model: Model, request: Request) -> float:
    """Returns the bytes of a model's weights on each device, without those that are streamed."""
    if model.params is not None:
        return part_bytes(model.params)
    leaves = jax.tree.leaves(model.layout.abstract_params(model.module))
    size = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
    return size / _parts(model, request.target, request, "shards")


def _streamed_bytes(model: Model, request: Request) -> float:
    """Returns the bytes of two layers of an offloaded model on each device; 0 for other models."""
    blocks = part_bytes(model.layout)
    if model.params is None:  # shapes of the whole blocks
        blocks //= _parts(model, request.target, request, "shards")
    return offloading.two_layers(blocks, model.config.num_layers)


def _parts(model: Model, target: Model, request: Request, kind: str) -> int:
    """Returns the number of devices over which a model's `kind`, with all rows, is divided."""
    mesh = request.settings.mesh
    if mesh is None:
        return 1
    stages = mesh.shape[STAGE] if model is target else 1  # a draft model is on every stage
    return stages * getattr(placement.split_of(model.config, model.shards, mesh), kind)


def _remedy(request: Request, limit: float) -> list[str]:
    """Returns the largest batch and the longest context that fit."""
    batch, settings = len(request.prompts), request.settings
    groups = settings.groups
    rows = groups * bisect.bisect_right(
        range(groups, batch, groups), limit, key=lambda n: new_bytes(request, n)
    )
    slots = CAPACITY_MULTIPLE * bisect.bisect_right(
        range(CAPACITY_MULTIPLE, settings.capacity, CAPACITY_MULTIPLE),
        limit,
        key=lambda n: new_bytes(request, capacity=n),
    )
    tokens = slots - (settings.capacity - _tokens(request))
    fitting = [f"at most {rows} rows of this length (batch)"] if rows else []
    return fitting + (
        [f"at most {tokens} tokens per row (context and new tokens)"] if tokens > 1 else []
    )


def _tokens(request: Request) -> int:
    """Returns the tokens of the longest row, new ones included."""
    return max(map(len, request.prompts)) + request.settings.max_tokens


def _workload(request: Request) -> str:
    return f"a batch of {len(request.prompts)} rows of {_tokens(request)} tokens"


def _gb(size: float) -> str:
    return f"{size / GB:.3g} GB"
