"""The `mosaic` and `mosaic_sm80` backends: layouts around the kernels for NVIDIA GPUs.

`mosaic` is for Hopper, `mosaic_sm80` for Ampere and Ada. The G heads that share a KV head read the
same keys, so their T * G rows are packed into tiles of 64 and one pass over the prefix serves all
of them.
"""

import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import xla
from pallas_kernels.lse_merge import merge_parts
from pallas_kernels.mosaic_gpu.hopper_config import (
    ROWS,
    TILE,
    WIDEST,
    choose_config,
    choose_splits,
    multiprocessors,
)
from pallas_kernels.packing import grouped_rows, mask_bias, pad, round_up, ungrouped
from pallas_kernels.quantized import Quantized, dequantize

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
INTERPRETER_THREADS = 8
AMPERE_CONCURRENT = 2  # blocks of the grid on a multiprocessor


class Kernel(NamedTuple):
    """What a kernel supports.

    Attributes:
      devices: in words.
      major: major number of the devices' compute capability.
      head_dims: sizes of heads.
    """

    devices: str
    major: int
    head_dims: tuple[int, ...]


HOPPER = Kernel("NVIDIA Hopper", 9, (64, 128, 256))
AMPERE = Kernel("NVIDIA Ampere and Ada", 8, (64, 128))  # larger heads would not fit in registers


def unsupported_reason(
    kernel: Kernel,
    dtype: jnp.dtype | None = None,
    head_dim: int | None = None,
    device: jax.Device | None = None,
) -> str | None:
    """Returns why a kernel does not support a call, or None if it does.

    Args:
      kernel: HOPPER or AMPERE.
      dtype, head_dim: dtype and head size of the queries; None: not checked.
      device: that runs the kernel; None: not checked.
    """
    if dtype is not None and jnp.dtype(dtype) not in DTYPES:
        return f"supports {' and '.join(d.name for d in DTYPES)}, not {jnp.dtype(dtype).name}"
    if head_dim is not None and head_dim not in kernel.head_dims:
        return f"supports head sizes {', '.join(map(str, kernel.head_dims))}, not {head_dim}"
    if device is None or _major(device) == kernel.major:
        return None
    return (
        f"runs on {kernel.devices} GPUs (compute capability {kernel.major}.x), and this device is "
        f"{device.device_kind}"
    )


def _major(device: jax.Device) -> int | None:
    """Returns the first number of the compute capability of an NVIDIA GPU, None for others."""
    match = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    return int(match[1]) if match else None


def interpreter_unsupported_reason() -> str | None:
    """Returns why the kernel cannot be interpreted here, or None if it can.

    A warpgroup that waits occupies one of XLA's threads, so too few threads cause a deadlock.
    """
    if jax.__version_info__ < (0, 12):  # 0.11 requires a wait after the last arrival at a barrier
        return f"needs JAX 0.12 or newer, and this is JAX {jax.__version__}"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = int(os.environ.get("NPROC") or usable or 1)  # as in XLA's CPU client
    if threads < INTERPRETER_THREADS:
        return (
            f"needs {INTERPRETER_THREADS} XLA threads, and there are {threads}: set "
            f"NPROC={INTERPRETER_THREADS} in the environment before JAX starts"
        )
    return None


def attend(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"] | Quantized,
    v_prefix: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, "B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "X T N"],
    first_row: Int[Array, ""] | int | None = None,
    seen_from: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    interpreted: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns (out, lse) in float32, as `tree_attention` describes them.

    The kernel reads an 8-bit prefix directly if queries are in bf16 and heads have size 64 or 128.
    Another quantized prefix (4 bits, float16, heads of 256) is dequantized in a separate pass. A
    prefix is copied to pad it unless S is at least 64 and a multiple of 8. Windows and caps run in
    XLA. With `interpreted` the kernel runs in Pallas's interpreter, on any device, for tests.
    """
    if seen_from is not None or softcap is not None:
        return xla.attend(
            q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row, seen_from, softcap
        )
    from pallas_kernels.mosaic_gpu.hopper import flash  # the import takes half a second

    batch, length, heads, size = q.shape
    quantized = supports_integers(k_prefix, q.dtype)
    if not quantized:
        k_prefix, v_prefix = _dequantized(k_prefix, q.dtype), _dequantized(v_prefix, q.dtype)
    kv_heads, slots = k_prefix.shape[1:3]
    group = heads // kv_heads
    config = choose_config(
        batch * kv_heads, length * group, slots, size, multiprocessors(), quantized
    )
    padded_rows = round_up(length * group, ROWS * config.row_groups)
    padded_new = round_up(k_new.shape[1], config.block)
    padded_slots = max(config.block, round_up(slots, TILE))
    k_prefix, v_prefix = jax.tree.map(lambda x: pad(x, 2, padded_slots), (k_prefix, v_prefix))
    out, lse = flash(
        pad(grouped_rows(q, kv_heads), 2, round_up(length * group, TILE)),
        k_prefix,
        v_prefix,
        jnp.append(lengths, 0 if first_row is None else first_row).astype(jnp.int32),
        pad(k_new.swapaxes(1, 2), 2, round_up(k_new.shape[1], TILE)),
        pad(v_new.swapaxes(1, 2), 2, round_up(v_new.shape[1], TILE)),
        mask_bias(mask, group, padded_rows, padded_new),
        config,
        interpreted,
    )
    rows = length * group  # without padding, of which out and lse may have different numbers
    out, lse = merge_parts(out[..., :rows, :], lse[..., :rows])
    return ungrouped(out, length, heads), ungrouped(lse, length, heads)


def attend_sm80(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"] | Quantized,
    v_prefix: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, "B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "X T N"],
    first_row: Int[Array, ""] | int | None = None,
    seen_from: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    interpreted: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns (out, lse) in float32, by the kernel for Ampere and Ada.

    A quantized prefix is read by XLA, block by block, and so are prefixes with windows or caps. One
    of fewer than 64 slots is padded.
    """
    is_plain = seen_from is None and softcap is None
    if isinstance(k_prefix, Quantized) or isinstance(v_prefix, Quantized) or not is_plain:
        return xla.attend(
            q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row, seen_from, softcap
        )
    from pallas_kernels.mosaic_gpu.ampere import BLOCK, flash

    batch, length, heads, _ = q.shape
    kv_heads, slots = k_prefix.shape[1:3]
    group = heads // kv_heads
    padded_rows, padded_new = round_up(length * group, ROWS), round_up(k_new.shape[1], BLOCK)
    blocks, concurrent = batch * kv_heads * padded_rows // ROWS, multiprocessors()
    out, lse = flash(
        pad(grouped_rows(q, kv_heads), 2, padded_rows),
        pad(k_prefix, 2, max(slots, BLOCK)),
        pad(v_prefix, 2, max(slots, BLOCK)),
        jnp.append(lengths, 0 if first_row is None else first_row).astype(jnp.int32),
        pad(k_new.swapaxes(1, 2), 2, padded_new),
        pad(v_new.swapaxes(1, 2), 2, padded_new),
        mask_bias(mask, group, padded_rows, padded_new),
        choose_splits(blocks, slots, AMPERE_CONCURRENT * concurrent),
        interpreted,
    )
    rows = length * group  # without padding, of which out and lse may have different numbers
    out, lse = merge_parts(out[..., :rows, :], lse[..., :rows])
    return ungrouped(out, length, heads), ungrouped(lse, length, heads)


def supports_integers(entries: Array | Quantized, dtype: jnp.dtype) -> bool:
    """Returns whether the kernel reads a prefix directly in 8-bit integers.

    In float16 the product of a weight and a scale may underflow. With heads of 256 there is no
    shared memory for converted entries.
    """
    if not isinstance(entries, Quantized) or entries.bits != 8:
        return False
    return dtype == jnp.bfloat16 and entries.shape[-1] <= WIDEST


def _dequantized(entries: Array | Quantized, dtype: jnp.dtype) -> Array:
    return dequantize(entries, dtype) if isinstance(entries, Quantized) else entries
