"""Offloading: blocks' weights in host memory, streamed to the device layer by layer.

SpecInfer's offloading (arXiv 2305.09781, section 6.3). A pass streams all weights, whether it
verifies one token or a tree: the more tokens it verifies, the less each of them costs. Embeddings,
caches and drafts stay on the device.
"""

import contextlib
import logging
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

import models
from models import ShardingFn
from sharding import array_bytes, host, part_bytes

GB = 1e9
logger = logging.getLogger("magicjax")

# With these options XLA overlaps copies with the layer that computes. Results do not change.
XLA_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_host_offloading": True,
    }
}


def shapes(module: nn.Module, sharding_of: ShardingFn | None = None) -> tuple[Any, ...]:
    """Returns the shapes and shardings of what `stack` returns; allocates nothing.

    Args:
      module, sharding_of: arguments of `stack`.
    """

    def of_kind(layers):
        def shape(box):
            value, names = box.value, box.names
            sharding = host.in_host_memory(sharding_of and sharding_of((None, *names)))
            stacked = len(layers), *value.shape
            return jax.ShapeDtypeStruct(stacked, value.dtype, sharding=sharding)

        block = models.block_params(module, layers[0])
        return jax.tree.map(shape, block, is_leaf=models.is_boxed)

    return tuple(of_kind(layers) for layers in models.layer_kinds(module))


def by_layer(module: nn.Module, blocks: Sequence[Any]) -> list[tuple[Any, int]]:
    """Returns the stack of each layer, given the result of `stack`, and its index in it."""
    stacks = dict[int, tuple[Any, int]]()
    for stacked, layers in zip(blocks, models.layer_kinds(module), strict=True):
        stacks |= {layer: (stacked, index) for index, layer in enumerate(layers)}
    return [stacks[layer] for layer in range(len(stacks))]


def stack(
    module: nn.Module, layers: Iterable[Any], sharding_of: ShardingFn | None = None
) -> tuple[Any, ...]:
    """Returns blocks' weights in host memory, stacked by layer: one stack for each kind of layers.

    Blocks are read one by one. Peak memory is that of the result, with one byte per element of
    int4, which numpy does not pack, and of its largest array or one block.

    Args:
      module: the model's; determines the dtypes.
      layers: yields each block's parameters as host arrays, first to last, quantized or not.
      sharding_of: the sharding of a parameter, by its logical axes; None: the default device.

    Raises:
      ValueError: host memory is too small, or devices cannot read it; raised before `layers` are
        read.
    """
    host.check_devices()
    check_host_memory(module, sharding_of)
    log_sizes(module)
    stacked = shapes(module, sharding_of)
    shape_leaves, treedef = jax.tree.flatten(stacked)
    buffers: list[Any] = [np.empty(s.shape, s.dtype) for s in shape_leaves]
    _fill(jax.tree.unflatten(treedef, buffers), module, layers)
    for i, shape in enumerate(shape_leaves):  # one by one, which frees each buffer once copied
        buffers[i] = jax.device_put(buffers[i], shape.sharding)
    return jax.tree.unflatten(treedef, buffers)


def _fill(blocks: Sequence[Any], module: nn.Module, layers: Iterable[Any]) -> None:
    """Writes each block's parameters to host arrays as `stack` returns them."""
    stacks = by_layer(module, blocks)
    for layer, (params, (stacked, index)) in enumerate(zip(layers, stacks, strict=True)):
        params = models.quantize_block(params, module, layer)
        for buffer, value in zip(jax.tree.leaves(stacked), jax.tree.leaves(params), strict=True):
            buffer[index] = value


def check_host_memory(
    module: nn.Module, sharding_of: ShardingFn | None = None, available: int | None = None
) -> None:
    """Raises ValueError if the blocks' weights do not fit host memory.

    Args:
      module, sharding_of: arguments of `stack`.
      available: bytes; None: as the system reports; without a report nothing is validated.
    """
    available = free_host_memory() if available is None else available
    leaves = jax.tree.leaves(shapes(module, sharding_of))
    # Each group of devices along `data` has a copy.
    size = sum(part_bytes(x) * len(x.sharding.addressable_devices) for x in leaves)
    buffers = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]  # int4 is not packed
    needed = max(size, sum(buffers)) + max(buffers)
    if available is not None and needed > available:
        remedy = "" if module.weights else " weights='int8', which needs half of bfloat16's bytes,"
        raise ValueError(
            f"offload needs {needed / GB:.1f} GB of host memory, {size / GB:.1f} GB of them for "
            f"weights, and {available / GB:.1f} GB are free: use a smaller model,{remedy} or a "
            "machine with more memory"
        )


def free_host_memory() -> int | None:
    """Returns the bytes of memory available to this process, or None if unknown."""
    free = []
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free.append(1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]))
    group = pathlib.Path("/sys/fs/cgroup")  # of a container; a limit of "max" raises ValueError
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])  # reclaimable page cache
        free.append(limit - int((group / "memory.current").read_text()) + cached)
    return min(free, default=None)


def check_layers(config: Any) -> None:
    """Raises ValueError if the layers of a model cannot be streamed."""
    check_independent(config, "offload", "load the model without offload")


def dependent_layers(config: Any) -> list[str]:
    """Returns the settings by which layers need more than their own slots and the layer before."""
    names = "shared_kv_layers", "layer_input_size"
    return [f"{name}={getattr(config, name)}" for name in names if getattr(config, name, 0)]


def check_independent(config: Any, option: str, remedy: str) -> None:
    """Raises ValueError if a layer of a model needs more than its own slots and the layer before.

    Args:
      config: the model's.
      option: what needs such layers.
      remedy: what to do.
    """
    if given := dependent_layers(config):
        raise ValueError(
            f"{option} with {' and '.join(given)} (family {config.family!r}) is not supported: "
            f"{remedy}"
        )


def check_offload(offload: Any) -> None:
    """Raises ValueError unless `offload` is True or False."""
    if not isinstance(offload, bool):
        raise ValueError(
            f"offload={offload!r} is unknown: use True or False, and weights={offload!r} for "
            "quantized weights"
        )


def describe(
    offload: bool, weights: models.MatrixFormats | str | None, kv_dtype: str | None = None
) -> str:
    """Returns the suffix of a table's title; empty without offloading and quantization.

    `weights` are the formats of the model's quantized matrices, or their text.
    """
    cache = f", {kv_dtype} KV cache" * bool(kv_dtype)
    return f", {weights} weights" * bool(weights) + cache + ", offloaded" * offload


def log_sizes(module: nn.Module) -> None:
    """Logs the bytes that are streamed; warns if the model would fit the device."""
    blocks = shapes(module)
    size = part_bytes(blocks)
    logger.info(
        "offload: %.2f GB of weights in host memory, %.1f MB of them on the device at a time",
        size / GB,
        two_layers(module, blocks) / 1e6,
    )
    limit = device_memory()
    total = _total(models.abstract_params(module))
    if limit is not None and total < limit:
        logger.warning(
            "offload: the model (%.2f GB) would fit the device (%.2f GB) and run faster without "
            "offload, with %.2f GB for caches",
            total / GB,
            limit / GB,
            (limit - total) / GB,
        )


def _total(boxed: Any) -> int:
    return sum(array_bytes(x.shape, x.dtype) for x in jax.tree.leaves(boxed))


def device_memory() -> int | None:
    """Returns the bytes of the device's memory; None if it does not report them, as on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def two_layers(module: nn.Module, blocks: Sequence[Any]) -> int:
    """Returns the bytes of blocks that are on a device at a time: the current and the next layer.

    Args:
      module: the model's.
      blocks: arrays or shapes as `stack` returns them.
    """
    sizes = [
        part_bytes(stacked) // jax.tree.leaves(stacked)[0].shape[0]
        for stacked, _ in by_layer(module, blocks)
    ]
    return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))


def xla_options(platform: str, *arguments: Any) -> dict[str, Any]:
    """Returns the compiler options of a program with these arguments."""
    kinds = [
        getattr(getattr(leaf, "sharding", None), "memory_kind", None)
        for leaf in jax.tree.leaves(arguments)
    ]
    return XLA_OPTIONS.get(platform, {}) if host.HOST in kinds else {}
