"""`prefix_mass`: the attention that queries pay to each slot of a cache, with its checks.

The softmax weights that `tree_attention` never keeps, summed over queries: what a policy needs to
choose the slots worth keeping.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import reference, xla
from pallas_kernels.argument_checks import check_dtypes, check_heads, check_shapes
from pallas_kernels.attention import choose_backend
from pallas_kernels.lse_merge import accumulator_dtype
from pallas_kernels.quantized import Quantized

MASS_BACKENDS = {
    "reference": reference.mass,
    "xla": xla.mass,
    "mosaic": xla.mass,  # has no kernel of its own for this
    "mosaic_interpreted": xla.mass,
}


def prefix_mass(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"],
    seen: Int[Array, "B T"],
    lse: Float[Array, "B T H"] | None = None,
    *,
    backend: str | None = None,
) -> Float[Array, "B K S"]:
    """Returns the attention paid to each slot, summed over T queries and G = H/K heads, [B, K, S].

    A query adds exp(q.k * D**-0.5 - lse) to each slot that it sees: its softmax weight, a number
    from 0 to 1. So a row of the result sums to T * G where `lse` is of these slots alone, and to
    less where the queries saw other keys as well. Sums are kept in float32, or in float64 for
    float64 inputs, and are returned so.

    Args:
      q: queries. Head h reads key/value head h // (H // K), as in `tree_attention`.
      k_prefix: keys of the cache. What lies in a slot that no query sees does not matter.
      seen: query t of row b sees slots 0 to seen[b, t] - 1. A query with 0 adds nothing, whatever
        its lse; a chunk of a prompt, or padding, is told by this too.
      lse: log-sum-exp of each query's scaled scores over everything that it saw, as
        `tree_attention` returns it. None: over the slots seen, computed here for one more read of
        the keys.
      backend: a name from BACKENDS; None: xla.

    Returns:
      [B, K, S] in float32 (float64 for float64 inputs), exactly 0 at slots that no query sees.

    Raises:
      ValueError: unknown backend, or shapes or dtypes that do not fit together.
    """
    mass = MASS_BACKENDS[choose_backend(backend)]
    _check(q, k_prefix, seen, lse)
    if k_prefix.shape[2] == 0:
        return jnp.zeros(k_prefix.shape[:3], accumulator_dtype(q.dtype))
    with jax.named_scope("prefix_mass"):
        return mass(q, k_prefix, seen, lse)


def _check(q, k_prefix, seen, lse) -> None:
    """Raises a ValueError that names the first argument that does not fit, and the remedy."""
    if isinstance(k_prefix, Quantized):
        raise ValueError(
            "k_prefix is Quantized: the mass is taken on the keys of the target, which never are; "
            "pass those, or dequantize(k_prefix, q.dtype)"
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
    wide = accumulator_dtype(q.dtype)
    if lse is not None and lse.dtype != wide:
        raise ValueError(
            f"lse is {lse.dtype}: beside q in {q.dtype} it must be {wide}; pass what "
            "tree_attention(..., return_lse=True) returns, not rounded"
        )
