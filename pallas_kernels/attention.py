"""`tree_attention`: attention to a committed prefix and to new tokens, on a choice of backends.

A query sees the committed prefix of its row up to a length, and the new tokens that its row of the
mask allows. Chains, trees, prompt chunks and single tokens are special cases.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import device_check, reference, xla
from pallas_kernels.argument_checks import check_dtypes, check_heads, check_shapes
from pallas_kernels.cpu import attention as cpu_attention
from pallas_kernels.cpu import build
from pallas_kernels.mosaic_gpu import mosaic
from pallas_kernels.quantized import Quantized
from pallas_kernels.tpu import attention as tpu_attention

BACKENDS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "reference": reference.attend,
    "xla": xla.attend,
    "cpu": cpu_attention.attend,
    "mosaic": mosaic.attend,
    "mosaic_interpreted": functools.partial(mosaic.attend, interpreted=True),
    "mosaic_sm80": mosaic.attend_sm80,
    "mosaic_sm80_interpreted": functools.partial(mosaic.attend_sm80, interpreted=True),
    "tpu": tpu_attention.attend,
    "tpu_interpreted": functools.partial(tpu_attention.attend, interpret=True),
}
ACCELERATED = {"gpu": ("mosaic", "mosaic_sm80"), "tpu": ("tpu",)}  # kernels by platform
MOSAIC = {"mosaic": mosaic.HOPPER, "mosaic_sm80": mosaic.AMPERE}
SWITCH = "MAGICJAX_BACKEND"


def choose_backend(
    backend: str | None = None,
    dtype: jnp.dtype | None = None,
    head_dim: int | None = None,
    device: jax.Device | None = None,
) -> str:
    """Returns the name of the backend that `tree_attention` and `prefix_mass` use.

    Args:
      backend: a name from BACKENDS; None: $MAGICJAX_BACKEND, or the kernel of the device (cpu,
        mosaic, mosaic_sm80 or tpu) if it supports the call and has passed its self-check there,
        else xla; with several processes, xla on accelerators.
      dtype, head_dim: dtype and head size of the queries; None: not checked, and an accelerator's
        kernel is not chosen.
      device: that runs the program; None: not known, and an accelerator's kernel is not chosen,
        because it has no derivative and cannot be partitioned automatically.

    Raises:
      ValueError: the backend is unknown or does not support the call.
    """
    name, omitted = "backend", "omit backend"
    if not backend and (backend := os.environ.get(SWITCH)):
        name, omitted = SWITCH, f"unset {SWITCH}"
    if not backend:
        return _default(dtype, head_dim, device)
    if backend not in BACKENDS:
        raise ValueError(
            f"{name}={backend!r} is unknown: use one of {sorted(BACKENDS)}, or {omitted}"
        )
    if reason := _unsupported_reason(backend, dtype, head_dim, device):
        raise ValueError(f"{name}={backend!r} {reason}; use {name}='xla', or {omitted}")
    return backend


def _default(dtype: jnp.dtype | None, head_dim: int | None, device: jax.Device | None) -> str:
    """Returns the fastest backend that supports a call and is right on the device."""
    if device is None or device.platform == "cpu":
        return "cpu" if build.is_default() else "xla"
    # Processes of one run must choose alike, and each one checks alone.
    if dtype is None or head_dim is None or jax.process_count() > 1:
        return "xla"
    backend = kernel_for(dtype, head_dim, device)
    if backend is None:
        return "xla"
    dtype_name = jnp.dtype(dtype).name
    is_right = device_check.is_right(backend, BACKENDS[backend], dtype_name, head_dim, device)
    return backend if is_right else "xla"


def kernel_for(dtype: jnp.dtype, head_dim: int, device: jax.Device) -> str | None:
    """Returns the backend of the kernel for an accelerator that supports a call, checked or not."""
    backends = ACCELERATED.get(device.platform, ())
    return next(
        (name for name in backends if not _unsupported_reason(name, dtype, head_dim, device)), None
    )


def _unsupported_reason(
    backend: str, dtype: jnp.dtype | None, head_dim: int | None, device: jax.Device | None
) -> str | None:
    """Returns why a backend does not support a call, None if it does."""
    if kernel := MOSAIC.get(backend):
        return mosaic.unsupported_reason(kernel, dtype, head_dim, device)
    if kernel := MOSAIC.get(backend.removesuffix("_interpreted")):
        reason = mosaic.unsupported_reason(kernel, dtype, head_dim)
        return reason or mosaic.interpreter_unsupported_reason()
    if backend == "tpu":
        return tpu_attention.unsupported_reason(dtype, device)
    if backend == "tpu_interpreted":
        return tpu_attention.unsupported_reason(dtype)
    if backend == "cpu":
        reason = build.unavailable_reason()
        if device is not None and device.device_kind != "cpu":
            return f"runs on CPUs and this device is {device.device_kind}"
        return reason and f"is not available: {reason}"
    return None


def tree_attention(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"] | Quantized,
    v_prefix: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, " B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "T N"] | Bool[Array, "B T N"],
    *,
    first_row: Int[Array, ""] | int | None = None,
    seen_from: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Returns the attention of T tokens to a committed prefix and to N new tokens, [B, T, H, D].

    Scores are scaled by D**-0.5. Query head h reads key/value head h // (H // K). Sums are
    accumulated in float32, or in float64 for float64 inputs; the result has q's dtype. The kernels
    for accelerators have no derivative and are not partitioned automatically (use `jax.shard_map`).

    Args:
      q: queries.
      k_prefix, v_prefix: the committed cache. Slots from `lengths` on are not seen, but their
        values must be finite (a hidden slot has weight 0, and 0 * NaN is NaN). Both may be
        `Quantized`: they are dequantized when they are read, to q's dtype (`xla`) or to the
        accumulator dtype (`reference`, `cpu`). `mosaic` and `tpu` multiply 8-bit integers directly
        and apply their scales to scores and weights.
      lengths: the committed tokens of each row: 0 to S, or any number with `seen_from`.
      k_new, v_new: keys and values of tokens that are not in the cache.
      mask: True where a query may see a new token; [T, N] is shared by the rows.
      first_row: set if the caches have more rows than the queries: the queries belong to the B
        rows from this one on, which are read in place. The caller guarantees that they exist.
        None: the caches have B rows.
      seen_from: with a sliding window, the first position of the prefix that each query sees. The
        cache may then be a ring: position p is in slot p mod S, and the S newest positions are seen
        at most. None: all of the prefix.
      softcap: bound scores by softcap * tanh(score / softcap), after scaling; None: do not.
      return_lse: also return the log-sum-exp of the scaled scores.
      backend: a name from BACKENDS; None: $MAGICJAX_BACKEND, or cpu if it can be, else xla.

    Returns:
      out, or (out, lse) with lse [B, T, H] in float32 (float64 for float64 inputs). A query that
      sees no key gets zeros and EMPTY_LSE, a large negative finite number.

    Raises:
      ValueError: unknown backend, or inconsistent shapes or dtypes.
    """
    _check(q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row is not None)
    chosen = choose_backend(backend, q.dtype, q.shape[3])
    options: dict[str, Any] = {}
    if seen_from is not None:
        check_shapes(q, k_prefix, {"seen_from": (seen_from, "[B, T]", q.shape[:2])})
        check_dtypes(q, {}, {"seen_from": seen_from})
        options["seen_from"] = seen_from
    if softcap is not None:
        options["softcap"] = softcap
    mask = mask if mask.ndim == 3 else mask[None]
    with jax.named_scope("tree_attention"):
        out, lse = BACKENDS[chosen](
            q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row, **options
        )
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def _check(q, k_prefix, v_prefix, lengths, k_new, v_new, mask, has_more_rows: bool) -> None:
    """Raises ValueError at the first inconsistent argument."""
    check_heads(q, k_prefix)
    batch, length, _, size = q.shape
    rows, kv_heads, slots = k_prefix.shape[:3]
    if not has_more_rows or rows < batch:
        rows = batch
    new = k_new.shape[1] if k_new.ndim == 4 else "N"
    if new == 0:
        raise ValueError("k_new has N=0 tokens: pass at least one; a masked token has no effect")
    _check_quantized(k_prefix, v_prefix)
    expected = {
        "k_prefix": (k_prefix, "[B, K, S, D]", (rows, kv_heads, slots, size)),
        "v_prefix": (v_prefix, "[B, K, S, D]", (rows, kv_heads, slots, size)),
        "lengths": (lengths, "[B]", (batch,)),
        "k_new": (k_new, "[B, N, K, D]", (batch, new, kv_heads, size)),
        "v_new": (v_new, "[B, N, K, D]", (batch, new, kv_heads, size)),
    }
    check_shapes(q, k_prefix, expected)
    if mask.shape not in ((length, new), (batch, length, new)):
        raise ValueError(
            f"mask has shape {mask.shape}: it must be [T, N] = {(length, new)} "
            f"or [B, T, N] = {(batch, length, new)}"
        )
    floating = {"k_new": k_new, "v_new": v_new}
    if not isinstance(k_prefix, Quantized):
        floating = {"k_prefix": k_prefix, "v_prefix": v_prefix} | floating
    check_dtypes(q, floating, {"lengths": lengths})
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype}: it must be bool; compare it (mask > 0)")


def _check_quantized(k_prefix, v_prefix) -> None:
    """Raises ValueError if only one cache is `Quantized`, or its leaves are inconsistent."""
    caches = {"k_prefix": k_prefix, "v_prefix": v_prefix}
    quantized = [name for name, x in caches.items() if isinstance(x, Quantized)]
    if len(quantized) == 1:
        (other,) = set(caches) - set(quantized)
        raise ValueError(
            f"{quantized[0]} is Quantized and {other} is not: quantize both or neither"
        )
    for name in quantized:
        x = caches[name]
        for field, array, shape, dtype in (
            ("values", x.values, x.values.shape, jnp.int8),
            ("scales", x.scales, x.shape[:-1], jnp.float32),
        ):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name}.{field} is {array.dtype}{list(array.shape)}: it must be "
                    f"{jnp.dtype(dtype)}{list(shape)}; write both leaves as `quantize` returns them"
                )
