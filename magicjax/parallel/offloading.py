"""Models larger than the device: blocks' weights in host memory, streamed to it layer by layer.

SpecInfer's offloading (arXiv 2305.09781, section 6.3): a pass over the weights costs the same
for one token as for a tree, so the more tokens it verifies, the less each of them costs.
Embeddings, caches and drafts stay on the device.
"""

import argparse
import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

import models
from models import Attend, Place
from sharding import HEADS, host, part_bytes

if TYPE_CHECKING:
    from magicjax.model import Model

GB = 1e9
logger = logging.getLogger("magicjax")

Offload = bool | Literal["int8"]
INT8_STEPS = 127  # -127 to 127: symmetric
# Copies run beside the layer that computes only where XLA's scheduler may start them early.
# Neither changes what is computed.
XLA_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_host_offloading": True,
    }
}


@struct.dataclass
class Int8Weight:
    """A stacked matrix, quantized for each output channel: values * scales, rounded to the dtype.

    An element is off by half a scale at most (and by the dtype's own rounding).

    Attributes:
      values: int8 [L, inputs..., outputs...], -127 to 127.
      scales: float32, the same shape with 1 for the axes that are summed over.
    """

    values: Int[Array, "L ..."]
    scales: Float[Array, "L ..."]


def is_weight(x: Any) -> bool:
    """Returns whether it is a matrix that is quantized."""
    return isinstance(x, Int8Weight)


def run_blocks(
    module: nn.Module,
    blocks: Any,
    x: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attend: Attend,
) -> tuple[Float[Array, "B T E"], tuple]:
    """Returns (the last block's output, what `attend` kept of each layer).

    Args:
      module: the model's.
      blocks: as `stack` makes them, or a device's part.
      x: the first block's input.
      positions: of the tokens.
      attend: for a layer whose number is an int; a traced number chooses among all layers'.
    """
    block, layers = models.layer_module(module), module.config.num_layers

    def attend_any(layer, q, k, v):
        if isinstance(layer, int):
            return attend(layer, q, k, v)
        of_layers = [functools.partial(attend, i) for i in range(layers - 1)]
        return jax.lax.switch(layer, of_layers, q, k, v)

    def run(x, layer, weights):
        params = {"params": expand(weights, module.dtype)}
        return block.apply(params, x, positions, attend_any, layer)

    return host.stream(run, x, blocks, layers)


def is_int8(blocks: Any) -> bool:
    """Returns whether blocks' weights are quantized."""
    return any(map(is_weight, jax.tree.leaves(blocks, is_leaf=is_weight)))


def expand(weights: Any, dtype: Any) -> Any:
    """Returns weights with those that are quantized made `dtype` again."""

    def whole(leaf):
        if not is_weight(leaf):
            return leaf
        return (leaf.values.astype(jnp.float32) * leaf.scales).astype(dtype)

    return jax.tree.map(whole, weights, is_leaf=is_weight)


def offload(model: "Model", int8: bool = False) -> "Model":
    """Returns the model with its blocks' weights in host memory.

    A model that does not fit the device is loaded with `magicjax.load(..., offload=True)` instead.

    Args:
      model: as `magicjax.load` returns it, on one device.
      int8: quantize the blocks' matrices for each output channel: less to stream, other weights.

    Raises:
      ValueError: it is offloaded already, lies on several devices, or there is no such memory.
    """
    if model.blocks is not None:
        raise ValueError(f"the model {model.name!r} is offloaded already")
    if any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(model.params)):
        raise ValueError(
            f"the model {model.name!r} lies on several devices: load it with offload for their mesh"
        )
    rest, layers = models.split_blocks(model.params)
    blocks = stack(model.module, map(jax.device_get, layers), int8)
    return dataclasses.replace(model, params=rest, blocks=blocks)


def shapes(module: nn.Module, int8: bool, place: Place | None = None) -> Any:
    """Returns what `stack` would, as shapes with their places; nothing is allocated.

    Args:
      module, int8, place: as for `stack`.
    """
    layers = module.config.num_layers

    def shape(path, box):
        value, names = box.value, box.names
        summed = _summed(path, names)

        def stacked(sizes, dtype, names):
            where = host.in_host_memory(place and place((None, *names)))
            return jax.ShapeDtypeStruct((layers, *sizes), dtype, sharding=where)

        if not int8 or not summed:
            return stacked(value.shape, value.dtype, names)
        of_scales = (1,) * summed + value.shape[summed:], jnp.float32
        unsummed = (None,) * summed + names[summed:]
        return Int8Weight(stacked(value.shape, jnp.int8, names), stacked(*of_scales, unsummed))

    return jax.tree_util.tree_map_with_path(
        shape, models.block_params(module), is_leaf=models.is_boxed
    )


def stack(module: nn.Module, layers: Iterable[Any], int8: bool, place: Place | None = None) -> Any:
    """Returns blocks' weights, stacked, in host memory.

    While they are loaded it holds as much again as the largest array takes.

    Args:
      module: the model's; its dtype is theirs.
      layers: each block's parameters, first to last, arrays of the host.
      int8: quantize the matrices.
      place: where a parameter lies on devices, by its logical axes; None: on the default one.

    Raises:
      ValueError: too little host memory, or none that devices can read; no block was loaded then.
    """
    host.check_host()
    check_host_memory(module, int8, place)
    tell(module, int8)
    wanted, treedef = jax.tree.flatten(shapes(module, int8, place), is_leaf=is_weight)
    rooms: list[Any] = [jax.tree.map(lambda s: np.empty(s.shape, s.dtype), w) for w in wanted]
    for i, layer in enumerate(layers):
        for room, value in zip(rooms, jax.tree.leaves(layer), strict=True):
            if isinstance(room, Int8Weight):
                room.values[i], room.scales[i] = quantize(value, room.scales.shape[1:])
            else:
                room[i] = value
    for at, of_leaf in enumerate(wanted):  # one by one, so that what was moved is let go
        rooms[at] = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), rooms[at], of_leaf)
    return jax.tree.unflatten(treedef, rooms)


def _summed(path: tuple, names: tuple[str | None, ...]) -> int:
    """Returns how many axes of a parameter are summed over; 0: it is no matrix."""
    if path[-1].key != "weight":
        return 0
    return 2 if names[0] == HEADS else 1  # heads and their elements are summed over together


def quantize(
    weight: Float[np.ndarray, "..."], scales_shape: tuple[int, ...]
) -> tuple[Int[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Returns (int8 values, float32 scales) of a matrix, rounded to nearest.

    Args:
      weight: [inputs..., outputs...].
      scales_shape: of the scales: 1 for each axis of the inputs.
    """
    wide = np.asarray(weight, np.float32)
    summed = tuple(axis for axis, size in enumerate(scales_shape) if size == 1)
    largest = np.abs(wide).max(summed, keepdims=True)
    scales = np.where(largest > 0, largest / INT8_STEPS, 1).astype(np.float32)
    return np.rint(wide / scales).astype(np.int8), scales


def num_bytes(module: nn.Module, int8: bool) -> int:
    """Returns the bytes that all blocks' weights take in host memory."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(shapes(module, int8)))


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize


def check_host_memory(
    module: nn.Module, int8: bool, place: Place | None = None, available: int | None = None
) -> None:
    """Raises ValueError if the blocks' weights cannot be loaded into host memory.

    Args:
      module, int8, place: as for `stack`.
      available: bytes; None: what the system says, and where it says nothing, no check.
    """
    available = free_host_memory() if available is None else available
    leaves = jax.tree.leaves(shapes(module, int8, place))
    # Groups of devices along `data` have a copy each.
    sizes = [part_bytes(x) * len(x.sharding.addressable_devices) for x in leaves]
    needed = sum(sizes) + max(map(_bytes, leaves))
    if available is not None and needed > available:
        remedy = "" if int8 else ", offload='int8', which needs about half of bfloat16's bytes,"
        raise ValueError(
            f"offload needs {needed / GB:.1f} GB of host memory, {sum(sizes) / GB:.1f} GB for the "
            f"blocks' weights and the rest while they are loaded, and {available / GB:.1f} GB are "
            f"free: use a smaller model{remedy} or a machine with more memory"
        )


def free_host_memory() -> int | None:
    """Returns the bytes of memory that this process may still take, or None where nobody tells."""
    free = []
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free.append(1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]))
    group = pathlib.Path("/sys/fs/cgroup")  # of a container; "max" is no limit
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])  # pages of files, given up
        free.append(limit - int((group / "memory.current").read_text()) + cached)
    return min(free, default=None)


def wants_int8(offload: Any) -> bool:
    """Returns whether `offload`, as `magicjax.load` takes it, asks for int8.

    Raises ValueError for anything but False, True and "int8".
    """
    if offload not in (False, True, "int8"):
        raise ValueError(f"offload={offload!r} is unknown: use True, 'int8', or False")
    return offload == "int8"


def add_option(parser: Any) -> None:
    """Adds `--offload` to a command."""
    parser.add_argument(
        "--offload",
        nargs="?",
        const=True,
        default=False,
        type=_written,
        metavar="int8",
        help="stream the target's weights from host memory, layer by layer; int8: quantized there",
    )


def _written(text: str) -> str:
    if text != "int8":
        raise argparse.ArgumentTypeError(f"{text!r} is unknown: leave it out, or write int8")
    return text


def in_words(offload: Offload) -> str:
    """Returns it as a report says it."""
    return f", offloaded{' as int8' if offload == 'int8' else ''}" if offload else ""


def tell(module: nn.Module, int8: bool) -> None:
    """Logs what streaming takes, and a warning where the model would have fitted the device."""
    size = num_bytes(module, int8)
    logger.info(
        "offload: %.2f GB of weights in host memory, %.1f MB of them on the device at a time",
        size / GB,
        two_layers(size, module.config.num_layers) / 1e6,
    )
    limit = device_memory()
    whole = sum(_bytes(leaf) for leaf in jax.tree.leaves(models.abstract_params(module)))
    if limit is not None and whole < limit:
        logger.warning(
            "offload: all %.2f GB of the model would fit the device's %.2f GB, where they are read "
            "many times as fast; that leaves %.2f GB for caches",
            whole / GB,
            limit / GB,
            (limit - whole) / GB,
        )


def device_memory() -> int | None:
    """Returns the bytes of the device's memory; None: it does not say, like a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def check_caches(target: "Model", drafts: Sequence["Model"], kv_bytes: int) -> None:
    """Raises ValueError if the caches do not fit a device beside what an offloaded model needs.

    Args:
      target: that is offloaded, where it will run; of one that is only described nothing is said.
      drafts: small models.
      kv_bytes: of all caches, on all devices together.
    """
    limit, leaves = device_memory(), jax.tree.leaves((target, tuple(drafts)))
    if limit is None or not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return
    devices = len(leaves[0].sharding.device_set)
    resident = part_bytes((target.params, [draft.params for draft in drafts]))
    resident += two_layers(part_bytes(target.blocks), target.config.num_layers)
    if resident + kv_bytes / devices > limit:
        raise ValueError(
            f"caches of {kv_bytes / devices / GB:.1f} GB and {resident / GB:.1f} GB of weights do "
            f"not fit the device's {limit / GB:.1f} GB: offload moves the blocks' weights to the "
            "host, and caches stay on the device; use fewer or shorter prompts, or more devices"
        )


def two_layers(blocks: int, layers: int) -> int:
    """Returns the bytes of all blocks that are on the device: a layer's that computes, the next."""
    return min(2, layers) * blocks // layers


def xla_options(platform: str, *arguments: Any) -> dict[str, Any]:
    """Returns the compiler's options for a program with these arguments."""
    leaves = jax.tree.leaves(arguments)
    streamed = any(_kind(leaf) == host.HOST for leaf in leaves)
    return XLA_OPTIONS.get(platform, {}) if streamed else {}


def _kind(leaf: Any) -> str | None:
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None)
