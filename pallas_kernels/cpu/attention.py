"""Tree attention by the native kernel of attention.cc.

The bits of a query's result depend on the query and on the keys and values that it sees, in order:
not on the batch, the other queries, or the number of threads, nor on which of the tokens are in the
cache. Calls that the kernel does not support use `xla`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import xla
from pallas_kernels.quantized import Quantized

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Query rows per key/value head (T * G). The kernel is faster than XLA for 1 to 4,096 rows, which
# includes prompt chunks of 512 tokens; more rows have not been measured.
MOST_ROWS = 4096
BLOCK = 64  # keys that the kernel processes at once; of a ring they are adjacent


def supports(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"] | Quantized,
    k_new: Float[Array, "B N K D"],
    seen_from: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
) -> bool:
    """Returns whether the kernel takes a call, whose other arguments match these."""
    rows = q.shape[1] * q.shape[2] // k_prefix.shape[1]
    if q.dtype not in DTYPES or k_new.dtype != q.dtype or rows > MOST_ROWS:
        return False
    if softcap is not None or (seen_from is not None and k_prefix.shape[2] % BLOCK):
        return False
    if isinstance(k_prefix, Quantized):
        return k_prefix.bits == 8
    return k_prefix.dtype == q.dtype


def attend(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"] | Quantized,
    v_prefix: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, " B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "#B T N"],
    first_row: Int[Array, ""] | int | None = None,
    seen_from: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns out in q's dtype, and lse in float32, or in float64 for float64 inputs."""
    first_row = None if first_row is None else jnp.asarray(first_row, jnp.int32)
    arguments = q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row, seen_from
    if not supports(q, k_prefix, k_new, seen_from, softcap):
        return _by_xla(*arguments, softcap=softcap)
    return lax.platform_dependent(*arguments, cpu=native, default=_by_xla)


def _by_xla(q: Array, *arguments: Any, **options: Any) -> tuple[Array, Array]:
    out, lse = xla.attend(q, *arguments, **options)
    return out.astype(q.dtype), lse


@jax.custom_jvp
def native(
    q, k_prefix, v_prefix, lengths, k_new, v_new, mask, first_row=None, seen_from=None
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns `attend` by the kernel, for a program that runs on a CPU."""
    k_prefix, k_scales = _values_and_scales(k_prefix)
    v_prefix, v_scales = _values_and_scales(v_prefix)
    # Inside shard_map the results vary over the same mesh axes as q.
    results = jax.eval_shape(lambda q: (q, q[..., 0].astype(jnp.float32)), q)
    call = jax.ffi.ffi_call("magicjax_tree_attention", results, vmap_method="sequential")
    integers = [
        lengths.astype(jnp.int32),
        jnp.int32(0 if first_row is None else first_row),
        jnp.zeros((0, 0), jnp.int32) if seen_from is None else seen_from.astype(jnp.int32),
    ]
    return call(q, k_prefix, v_prefix, k_scales, v_scales, *integers, k_new, v_new, mask)


@native.defjvp
def _tangents(primals: tuple, tangents: tuple) -> tuple:
    """Returns the results and their derivatives, which XLA computes."""
    return native(*primals), jax.jvp(_by_xla, primals, tangents)[1]


def _values_and_scales(x: Array | Quantized) -> tuple[Array, Array]:
    """Returns the arrays of a cache; no scales unless it is quantized."""
    return (x.values, x.scales) if isinstance(x, Quantized) else (x, jnp.zeros(0, jnp.float32))
