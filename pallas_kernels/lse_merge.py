"""Merges attention over disjoint sets of keys.

A softmax over keys in two arrays needs no concatenation: each array yields a sum of values, a
maximum and a sum of exponentials, and these combine exactly.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# A hidden key scores MASKED, and the maximum of a row is at least FLOOR. The gap makes
# exp(MASKED - maximum) exactly 0 even in a row that sees no key, where a plain maximum would be
# MASKED and every hidden key would count as exp(0) = 1. Both are finite, which avoids inf - inf.
MASKED = -1e30
FLOOR = -1e29

# The log-sum-exp of a query that sees no key: finite, so that merging needs no special case, and so
# low that any other part outweighs it.
EMPTY_LSE = FLOOR


class Partial(NamedTuple):
    """Unnormalized attention of rows of queries to some of the keys.

    Attributes:
      total: sum over keys of exp(score - peak) * value, [..., D].
      peak: the largest score, at least FLOOR, [...].
      weight: sum over keys of exp(score - peak), [...]; 0 if no key is seen.
    """

    total: Float[Array, "*rows D"]
    peak: Float[Array, "*rows"]
    weight: Float[Array, "*rows"]


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of scores and sums: float64 for float64, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def dot_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Returns the precision of dots, so that GPUs do not round float32 operands to TF32."""
    return lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None


def exponentials(
    scores: Float[Array, "*rows S"],
) -> tuple[Float[Array, "*rows S"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Returns exp(scores - peak), peak and weight; hidden keys score MASKED."""
    peak = jnp.maximum(scores.max(-1), FLOOR)
    p = jnp.exp(scores - peak[..., None])
    return p, peak, p.sum(-1)


def join(a: Partial, b: Partial) -> Partial:
    """Returns the partial over the union of two disjoint sets of keys."""
    peak = jnp.maximum(a.peak, b.peak)
    scale_a, scale_b = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    total = a.total * scale_a[..., None] + b.total * scale_b[..., None]
    return Partial(total, peak, a.weight * scale_a + b.weight * scale_b)


def finish(partial: Partial) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Returns the output and log-sum-exp; zeros and EMPTY_LSE for a row that sees no key."""
    weight = jnp.where(partial.weight == 0, 1, partial.weight)
    return partial.total / weight[..., None], partial.peak + jnp.log(weight)


def merge(
    out_a: Float[Array, "*rows D"],
    lse_a: Float[Array, "*rows"],
    out_b: Float[Array, "*rows D"],
    lse_b: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Returns the attention (out, lse) over the union of two disjoint sets of keys.

    A part without keys (output 0, EMPTY_LSE) does not change the other; merging two such parts
    returns such a part. The merge runs in the wider of float32 and the inputs' dtype.
    """
    dtype = accumulator_dtype(jnp.result_type(out_a, out_b, lse_a, lse_b))
    peak = jnp.maximum(lse_a, lse_b)
    scale_a, scale_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    weight = scale_a + scale_b
    total = out_a.astype(dtype) * scale_a[..., None] + out_b.astype(dtype) * scale_b[..., None]
    empty = peak <= EMPTY_LSE
    return total / weight[..., None], jnp.where(empty, EMPTY_LSE, peak + jnp.log(weight))


def merge_parts(
    out: Float[Array, "C *rows D"], lse: Float[Array, "C *rows"]
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Returns the attention (out, lse) over the union of C disjoint sets of keys."""
    if out.shape[0] == 1:
        return out[0], lse[0]
    peak = lse.max(0)
    scale = jnp.exp(lse - peak)
    weight = scale.sum(0)
    total = (out * scale[..., None]).sum(0)
    lse = jnp.where(peak <= EMPTY_LSE, EMPTY_LSE, peak + jnp.log(weight))
    return total / weight[..., None], lse
