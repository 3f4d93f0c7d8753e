"""Offloading: blocks' weights in host memory, streamed to the device layer by layer.

SpecInfer's offloading (arXiv 2305.09781, section 6.3). A pass streams all weights, whether it
verifies one token or a tree: the more tokens it verifies, the less each of them costs. Embeddings,
caches and drafts stay on the device.
"""

import contextlib
import logging
import pathlib
from collections.abc import Iterable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

import models
from models import ShardingFn
from sharding import HEADS, host, part_bytes

GB = 1e9
logger = logging.getLogger("magicjax")

Offload = bool | Literal["int8"]
INT8_MAX = 127  # symmetric: -127 to 127
# With these options XLA overlaps copies with the layer that computes. Results do not change.
XLA_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_host_offloading": True,
    }
}


@struct.dataclass
class Int8Weight:
    """A stacked matrix, quantized per output channel: values * scales, rounded to the dtype.

    The error of an element is at most half a scale, plus the rounding of the dtype.

    Attributes:
      values: int8 [L, inputs..., outputs...], -127 to 127.
      scales: float32, the same shape with 1 for the input axes.
    """

    values: Int[Array, "L ..."]
    scales: Float[Array, "L ..."]


def is_int8_weight(x: Any) -> bool:
    """Returns whether x is a quantized matrix."""
    return isinstance(x, Int8Weight)


def is_int8(blocks: Any) -> bool:
    """Returns whether blocks' weights are quantized."""
    return any(map(is_int8_weight, jax.tree.leaves(blocks, is_leaf=is_int8_weight)))


def dequantize(weights: Any, dtype: Any) -> Any:
    """Returns weights with quantized matrices converted to `dtype`."""

    def convert(leaf):
        if not is_int8_weight(leaf):
            return leaf
        return (leaf.values.astype(jnp.float32) * leaf.scales).astype(dtype)

    return jax.tree.map(convert, weights, is_leaf=is_int8_weight)


def shapes(module: nn.Module, int8: bool, sharding_of: ShardingFn | None = None) -> Any:
    """Returns the shapes and shardings of what `stack` returns; allocates nothing.

    Args:
      module, int8, sharding_of: as for `stack`.
    """
    layers = module.config.num_layers

    def shape(path, box):
        value, names = box.value, box.names
        inputs = _input_axes(path, names)

        def stacked(sizes, dtype, names):
            sharding = host.in_host_memory(sharding_of and sharding_of((None, *names)))
            return jax.ShapeDtypeStruct((layers, *sizes), dtype, sharding=sharding)

        if not int8 or not inputs:
            return stacked(value.shape, value.dtype, names)
        ones, unnamed = (1,) * inputs, (None,) * inputs
        return Int8Weight(
            stacked(value.shape, jnp.int8, names),
            stacked(ones + value.shape[inputs:], jnp.float32, unnamed + names[inputs:]),
        )

    return jax.tree_util.tree_map_with_path(
        shape, models.block_params(module), is_leaf=models.is_boxed
    )


def stack(
    module: nn.Module, layers: Iterable[Any], int8: bool, sharding_of: ShardingFn | None = None
) -> Any:
    """Returns blocks' weights, stacked by layer, in host memory.

    Peak memory exceeds the result by its largest array.

    Args:
      module: the model's; determines the dtype.
      layers: each block's parameters as host arrays, first to last.
      int8: quantize the matrices.
      sharding_of: the sharding of a parameter, by its logical axes; None: the default device.

    Raises:
      ValueError: host memory is too small, or devices cannot read it; raised before loading.
    """
    host.validate_devices()
    validate_host_memory(module, int8, sharding_of)
    log_sizes(module, int8)
    shape_leaves, treedef = jax.tree.flatten(
        shapes(module, int8, sharding_of), is_leaf=is_int8_weight
    )
    buffers: list[Any] = [
        jax.tree.map(lambda s: np.empty(s.shape, s.dtype), leaf) for leaf in shape_leaves
    ]
    for i, layer in enumerate(layers):
        for buffer, value in zip(buffers, jax.tree.leaves(layer), strict=True):
            if isinstance(buffer, Int8Weight):
                buffer.values[i], buffer.scales[i] = quantize(value, buffer.scales.shape[1:])
            else:
                buffer[i] = value
    for i, shape in enumerate(shape_leaves):  # one by one, which frees each buffer once copied
        buffers[i] = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), buffers[i], shape)
    return jax.tree.unflatten(treedef, buffers)


def _input_axes(path: tuple, names: tuple[str | None, ...]) -> int:
    """Returns the number of input axes of a matrix; 0 for other parameters."""
    if path[-1].key != "weight":
        return 0
    return 2 if names[0] == HEADS else 1  # a projection from heads has two: H and D


def quantize(
    weight: Float[np.ndarray, "..."], scales_shape: tuple[int, ...]
) -> tuple[Int[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Returns the int8 values and float32 scales of a matrix, rounded to nearest.

    Args:
      weight: [inputs..., outputs...].
      scales_shape: the shape of the scales, 1 for each input axis.
    """
    wide = np.asarray(weight, np.float32)
    inputs = tuple(axis for axis, size in enumerate(scales_shape) if size == 1)
    largest = np.abs(wide).max(inputs, keepdims=True)
    scales = np.where(largest > 0, largest / INT8_MAX, 1).astype(np.float32)
    return np.rint(wide / scales).astype(np.int8), scales


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize


def validate_host_memory(
    module: nn.Module,
    int8: bool,
    sharding_of: ShardingFn | None = None,
    available: int | None = None,
) -> None:
    """Raises ValueError if the blocks' weights do not fit host memory.

    Args:
      module, int8, sharding_of: as for `stack`.
      available: bytes; None: as the system reports; without a report nothing is validated.
    """
    available = free_host_memory() if available is None else available
    leaves = jax.tree.leaves(shapes(module, int8, sharding_of))
    # Each group of devices along `data` has a copy.
    size = sum(part_bytes(x) * len(x.sharding.addressable_devices) for x in leaves)
    needed = size + max(map(_bytes, leaves))
    if available is not None and needed > available:
        remedy = "" if int8 else " offload='int8', which needs about half of bfloat16's bytes,"
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


def validate_offload(offload: Any) -> Offload:
    """Returns `offload`; raises ValueError unless it is False, True or "int8"."""
    if offload not in (False, True, "int8"):
        raise ValueError(f"offload={offload!r} is unknown: use True, 'int8', or False")
    return offload


def describe_offload(offload: Offload) -> str:
    """Returns the suffix of a table's title; empty without offloading."""
    return f", offloaded{' as int8' if offload == 'int8' else ''}" if offload else ""


def log_sizes(module: nn.Module, int8: bool) -> None:
    """Logs the bytes that are streamed; warns if the model would fit the device."""
    size = sum(map(_bytes, jax.tree.leaves(shapes(module, int8))))
    logger.info(
        "offload: %.2f GB of weights in host memory, %.1f MB of them on the device at a time",
        size / GB,
        two_layers(size, module.config.num_layers) / 1e6,
    )
    limit = device_memory()
    total = sum(_bytes(leaf) for leaf in jax.tree.leaves(models.abstract_params(module)))
    if limit is not None and total < limit:
        logger.warning(
            "offload: the model (%.2f GB) would fit the device (%.2f GB) and run faster without "
            "offload, with %.2f GB for caches",
            total / GB,
            limit / GB,
            (limit - total) / GB,
        )


def device_memory() -> int | None:
    """Returns the bytes of the device's memory; None if it does not report them, as on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def two_layers(blocks: int, layers: int) -> int:
    """Returns the bytes of all blocks that are on the device: the current and the next layer."""
    return min(2, layers) * blocks // layers


def xla_options(platform: str, *arguments: Any) -> dict[str, Any]:
    """Returns the compiler options of a program with these arguments."""
    kinds = [
        getattr(getattr(leaf, "sharding", None), "memory_kind", None)
        for leaf in jax.tree.leaves(arguments)
    ]
    return XLA_OPTIONS.get(platform, {}) if host.HOST in kinds else {}
