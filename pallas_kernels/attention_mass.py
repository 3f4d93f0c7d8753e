"""`prefix_mass`: the attention that queries pay to each slot of a cache.

Policies choose the slots to keep by these sums of softmax weights, which `tree_attention` does not
return.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import reference, xla
from pallas_kernels.argument_checks import check_dtypes, check_heads, check_shapes
from pallas_kernels.attention import choose_backend
from pallas_kernels.lse_merge import accumulator_dtype
from pallas_kernels.quantized import Quantized


@functools.partial(jax.jit, static_argnames=("softcap", "backend"))  # traced once for all layers
def prefix_mass(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"],
    seen: Int[Array, "B T"],
    lse: Float[Array, "B T H"] | None = None,
    *,
    softcap: float | None = None,
    backend: str | None = None,
) -> Float[Array, "B K S"]:
    """Returns the attention paid to each slot, summed over T queries and G = H/K heads, [B, K, S].

    A query adds its softmax weight exp(q.k * D**-0.5 - lse), a number from 0 to 1, to each slot
    that it sees. A row of the result sums to T * G if `lse` covers these slots only, and to less if
    the queries also saw other keys. Sums are in float32, or in float64 for float64 inputs.

    Args:
      q: queries. Head h reads key/value head h // (H // K), as in `tree_attention`.
      k_prefix: keys of the cache. Slots that no query sees may hold anything.
      seen: query t of row b sees slots 0 to seen[b, t] - 1. A query with 0, such as padding, adds
        nothing, whatever its lse.
      lse: log-sum-exp of each query's scaled scores over all keys that it saw, as `tree_attention`
        returns it. None: over the slots seen; computing it reads the keys once more.
      softcap: the bound of scores, as for `tree_attention`.
      backend: a name from BACKENDS; None: `choose_backend` chooses.

    Returns:
      [B, K, S] in float32 (float64 for float64 inputs), exactly 0 at slots that no query sees.

    Raises:
      ValueError: unknown backend, or inconsistent shapes or dtypes.
    """
    # There are no kernels for the mass.
    mass = reference.mass if choose_backend(backend) == "reference" else xla.mass
    _check(q, k_prefix, seen, lse)
    if k_prefix.shape[2] == 0:
        return jnp.zeros(k_prefix.shape[:3], accumulator_dtype(q.dtype))
    with jax.named_scope("prefix_mass"):
        return mass(q, k_prefix, seen, lse, softcap)


def _check(q, k_prefix, seen, lse) -> None:
    """Raises ValueError at the first inconsistent argument."""
    if isinstance(k_prefix, Quantized):
        raise ValueError(
            "k_prefix is Quantized, which is not supported: pass the target's keys, or "
            "dequantize(k_prefix, q.dtype)"
        )
    check_heads(q, k_prefix)
    batch, length, heads, size = q.shape
    kv_heads, slots = k_prefix.shape[1:3]
    expected = {
        "k_prefix": (k_prefix, "[B, K, S, D]", (batch, kv_heads, slots, size)),
        "seen": (seen, "[B, T]", (batch, length)),
    }
    if lse is not None:
        expected["lse"] = (lse, "[B, T, H]", (batch, length, heads))
    check_shapes(q, k_prefix, expected)
    check_dtypes(q, {"k_prefix": k_prefix}, {"seen": seen})
    expected_dtype = accumulator_dtype(q.dtype)
    if lse is not None and lse.dtype != expected_dtype:
        raise ValueError(
            f"lse is {lse.dtype}: with q in {q.dtype} it must be {expected_dtype}; pass the result "
            "of tree_attention(..., return_lse=True) without a cast"
        )
