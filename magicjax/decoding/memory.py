"""The memory of a request, counted and compared with what is free before anything is compiled.

Weights and KV caches count, and temporaries of the programs do not: a request that is refused
cannot run, and one that passes can still run out of memory.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from magicjax.decoding import footprint
from magicjax.decoding.footprint import Footprint
from magicjax.decoding.request import Request
from magicjax.model import CAPACITY_MULTIPLE, Model
from magicjax.parallel import offloading
from sharding import AnyMesh

GB = 1e9
MANY_ROWS = 2**14  # fewer prompts are read in less than a second


class OutOfMemoryError(ValueError):
    """A request needs more memory than there is; the message has sizes, limit and remedy."""


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
    extra: int = 0,
) -> None:
    """Raises OutOfMemoryError if weights and caches do not fit the free memory.

    Args:
      request: with all rows that are allocated.
      workload: what needs the memory, for the message.
      remedy: returns what fits, given the available bytes.
      available: bytes of each device; None: as its devices report now.
      extra: bytes that the workload needs besides the request.
    """
    needed = count(request).new + extra
    target, mesh = request.target, request.settings.mesh
    limit = free_memory(target, mesh) if available is None else available
    if limit is None or needed <= limit:
        return
    if available is None:
        gc.collect()  # arrays in reference cycles
        limit = free_memory(target, mesh) or limit
    if needed > limit:
        per_device = "" if mesh is None else " on each device"
        fitting = remedy(limit)
        offload = "" if offloading.dependent_layers(target.config) else "offload, "
        use = f"use a smaller model, a smaller dtype or kv_dtype, {offload}or more devices"
        if fitting:
            use = f"use {' or '.join(fitting)}, or more devices"
        raise OutOfMemoryError(
            f"{workload} needs {_gb(needed)} of memory{per_device}, and {_gb(limit)} are available "
            f"({describe(request)}): {use}"
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
            f"out of memory: {_workload(request)} has {describe(request)}, and temporary arrays "
            "besides: use fewer rows (batch) or fewer tokens per row (context and new tokens)"
        ) from error


def count(request: Request, rows: int | None = None, capacity: int | None = None) -> Footprint:
    """Returns the footprint of a request.

    Args:
      request: on its devices, or with models without parameters.
      rows: rows of the whole batch; None: those of the request.
      capacity: slots of a row; None: those of the request.
    """
    settings = request.settings
    rows = rows or len(request.prompts)
    if not settings.replicated_rows:
        rows = -(-rows // settings.groups)
    return footprint.of_models(
        request.target, request.drafter, rows, capacity or settings.capacity, settings.mesh
    )


def describe(request: Request) -> str:
    """Returns the sizes of a request's footprint in words."""
    counted, loaded = count(request), ", loaded" if request.target.params is not None else ""
    return (
        f"target's weights {_gb(counted.weights + counted.streamed)}{loaded}, its KV cache "
        f"{_gb(counted.target_kv)}, the drafter's weights and KV caches {_gb(counted.draft)}"
    )


def free_memory(target: Model, mesh: AnyMesh | None) -> float | None:
    """Returns the bytes that are free on each device of this process; None if unknown."""
    arrays = jax.tree.leaves(target.params)
    if isinstance(mesh, Mesh):
        devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    elif mesh is None:
        placed = arrays and arrays[0].sharding is not None  # not the shapes of an abstract model
        devices = list(arrays[0].sharding.device_set) if placed else jax.local_devices()[:1]
    else:
        return None
    if not devices:
        return None
    if devices[0].platform == "cpu":  # all devices share it
        free = offloading.free_host_memory()
        return None if free is None else free / len(devices)
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in device for device in stats):
        return None
    return min(device["bytes_limit"] - device["bytes_in_use"] for device in stats)


def _remedy(request: Request, limit: float) -> list[str]:
    """Returns the largest batch and the longest context that fit."""
    settings, groups = request.settings, request.settings.groups
    batches = range(groups, len(request.prompts), groups)
    rows = footprint.largest(batches, limit, lambda n: count(request, n).new)
    capacities = range(CAPACITY_MULTIPLE, settings.capacity, CAPACITY_MULTIPLE)
    slots = footprint.largest(capacities, limit, lambda n: count(request, capacity=n).new)
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
