"""`tree_attention`: the one attention of this project, with its checks and its choice of backend.

Every query sees the committed prefix of its row up to a length, and of the new tokens those that
its row of the mask allows. A chain, a tree, a prompt chunk and a single token are all that.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import reference, xla
from pallas_kernels.argument_checks import check_dtypes, check_heads, check_shapes
from pallas_kernels.mosaic_gpu import mosaic
from pallas_kernels.quantized import Quantized

BACKENDS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "reference": reference.attend,
    "xla": xla.attend,
    "mosaic": mosaic.attend,
    "mosaic_interpreted": functools.partial(mosaic.attend, interpreted=True),
}


def choose_backend(
    backend: str | None = None,
    dtype: jnp.dtype | None = None,
    head_dim: int | None = None,
    device: jax.Device | None = None,
) -> str:
    """Returns the name of the backend that `tree_attention` and `prefix_mass` would use.

    Args:
      backend: a name from BACKENDS, or None for xla, which serves everything. (mosaic has yet to
        run on a GPU: only who asks for it gets it.)
      dtype, head_dim: of the queries; None: not asked.
      device: where it is to run; None: not asked.

    Raises:
      ValueError: the name is unknown, or that backend does not serve this; it says which would.
    """
    if backend is None:
        return "xla"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: use one of {sorted(BACKENDS)}, or None")
    if backend == "mosaic":
        reason = mosaic.why_not(dtype, head_dim, device)
    elif backend == "mosaic_interpreted":
        reason = mosaic.why_not(dtype, head_dim) or mosaic.why_not_interpreted()
    else:
        return backend
    if reason:
        raise ValueError(f"backend={backend!r} {reason}; use backend='xla', or None")
    return backend


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
    return_lse: bool = False,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Returns the attention of T tokens to a committed prefix and to N new tokens, [B, T, H, D].

    Scores are scaled by D**-0.5. Query head h reads key/value head h // (H // K). Sums are kept in
    float32, or in float64 for float64 inputs; the result has q's dtype.

    Args:
      q: queries.
      k_prefix, v_prefix: the committed cache. Slots from `lengths` on are not seen, but their
        values must be finite (a hidden slot has weight 0, and 0 * NaN is NaN). Both may be
        `Quantized`: they are dequantized as they are read, to q's dtype (`xla`) or to the dtype of
        the sums (`reference`); `mosaic` multiplies integers of 8 bits as they are, and scores and
        weights by their scales.
      lengths: live slots of each row, 0 to S.
      k_new, v_new: keys and values of tokens that are not in the cache.
      mask: True where a query may see a new token; [T, N] is shared by the rows.
      first_row: the caches have more rows than the queries, whose own are the B from this one on:
        they are read where they lie. They must all exist: beyond the last row nothing is checked.
        None: as many.
      return_lse: also return the log-sum-exp of the scaled scores.
      backend: a name from BACKENDS; None: xla.

    Returns:
      out, or (out, lse) with lse [B, T, H] in float32 (float64 for float64 inputs). A query that
      sees nothing gets zeros and EMPTY_LSE, a large negative finite number.

    Raises:
      ValueError: unknown backend, or shapes or dtypes that do not fit together.
    """
    _check(q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row is not None)
    attend = BACKENDS[choose_backend(backend, q.dtype, q.shape[3])]
    mask = mask if mask.ndim == 3 else mask[None]
    with jax.named_scope("tree_attention"):
        out, lse = attend(q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row)
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def _check(q, k_prefix, v_prefix, lengths, k_new, v_new, mask, more_rows: bool) -> None:
    """Raises a ValueError that names the first argument that does not fit, and the remedy."""
    check_heads(q, k_prefix)
    batch, length, _, size = q.shape
    rows, kv_heads, slots = k_prefix.shape[:3]
    if not more_rows or rows < batch:
        rows = batch
    new = k_new.shape[1] if k_new.ndim == 4 else "N"
    if new == 0:
        raise ValueError("k_new has N=0 tokens: pass at least one; a masked one changes nothing")
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
    others = {"k_new": k_new, "v_new": v_new}
    if not isinstance(k_prefix, Quantized):
        others = {"k_prefix": k_prefix, "v_prefix": v_prefix} | others
    check_dtypes(q, others, {"lengths": lengths})
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype}: it must be bool; compare it (mask > 0)")


def _check_quantized(k_prefix, v_prefix) -> None:
    """Raises a ValueError if one of two caches is `Quantized`, or if its parts do not fit."""
    caches = {"k_prefix": k_prefix, "v_prefix": v_prefix}
    quantized = [name for name, x in caches.items() if isinstance(x, Quantized)]
    if len(quantized) == 1:
        (other,) = set(caches) - set(quantized)
        raise ValueError(
            f"{quantized[0]} is Quantized and {other} is not: quantize both or neither"
        )
    for name in quantized:
        x = caches[name]
        for part, array, shape, dtype in (
            ("values", x.values, x.values.shape, jnp.int8),
            ("scales", x.scales, x.shape[:-1], jnp.float32),
        ):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name}.{part} is {array.dtype}{list(array.shape)}: it must be "
                    f"{jnp.dtype(dtype)}{list(shape)}; write both leaves as `quantize` returns them"
                )
