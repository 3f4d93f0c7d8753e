"""The `tpu` backend of `tree_attention`: layouts around the kernel of flash.py.

The G heads that share a KV head read the same keys, so their T * G rows are packed, and one pass
over the prefix serves all of them: verifying a tree of 256 nodes reads it once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.packing import grouped_rows, mask_bias, pad, round_up, ungrouped
from pallas_kernels.quantized import Quantized, dequantize
from pallas_kernels.tpu.config import choose_config

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
OLD = ("TPU v2", "TPU v3", "TPU v4")  # with too little VMEM


def unsupported_reason(
    dtype: jnp.dtype | None = None, device: jax.Device | None = None
) -> str | None:
    """Returns why the kernel does not support a call, or None if it does.

    Args:
      dtype: dtype of the queries; None: not checked.
      device: that runs the kernel; None: not checked.
    """
    if dtype is not None and jnp.dtype(dtype) not in DTYPES:
        return f"supports {' and '.join(d.name for d in DTYPES)}, not {jnp.dtype(dtype).name}"
    device_kind = None if device is None else device.device_kind
    if device_kind is None or (device_kind.startswith("TPU") and not device_kind.startswith(OLD)):
        return None
    return f"runs on TPUs from v5 on, and this device is {device_kind}"


def attend(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "C K S D"] | Quantized,
    v_prefix: Float[Array, "C K S D"] | Quantized,
    lengths: Int[Array, " B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "X T N"],
    first_row: Int[Array, ""] | int | None = None,
    seen_from: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns (out, lse) as `tree_attention` describes them, out in q's dtype.

    A prefix in 4 bits is dequantized in a separate pass. `interpret` are the parameters of Pallas's
    TPU interpreter, which runs the kernel on any device, for tests.
    """
    from pallas_kernels.tpu.flash import flash  # the import takes half a second

    length, heads, size = q.shape[1:]
    k_prefix, v_prefix = (_without_4_bits(x, q.dtype) for x in (k_prefix, v_prefix))
    if k_prefix.shape[2] == 0:  # a block has at least one slot, which is not seen
        k_prefix, v_prefix = (jax.tree.map(_one_slot, x) for x in (k_prefix, v_prefix))
        lengths = jnp.zeros_like(lengths)
    kv_heads, slots = k_prefix.shape[1:3]
    group = heads // kv_heads
    config = choose_config(kv_heads, length * group, k_new.shape[1], slots, size, q.dtype.itemsize)
    padded_rows = round_up(length * group, config.rows)
    padded_new = round_up(k_new.shape[1], config.new_block)
    if seen_from is not None:
        seen_from = jnp.repeat(jnp.maximum(seen_from, 0), group, axis=1)
        seen_from = pad(seen_from, 1, padded_rows)[..., None]
    out, lse = flash(
        pad(grouped_rows(q, kv_heads), 2, padded_rows),
        k_prefix,
        v_prefix,
        jnp.append(lengths, 0 if first_row is None else first_row).astype(jnp.int32),
        pad(k_new.swapaxes(1, 2), 2, padded_new),
        pad(v_new.swapaxes(1, 2), 2, padded_new),
        mask_bias(mask, group, padded_rows, padded_new),
        seen_from,
        softcap,
        config,
        interpret,
    )
    return ungrouped(out, length, heads), ungrouped(lse[..., 0], length, heads)


def _without_4_bits(entries: Array | Quantized, dtype: jnp.dtype) -> Array | Quantized:
    if isinstance(entries, Quantized) and entries.bits != 8:
        return dequantize(entries, dtype)
    return entries


def _one_slot(x: Array) -> Array:
    return jnp.zeros((*x.shape[:2], 1, *x.shape[3:]), x.dtype)
