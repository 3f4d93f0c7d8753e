"""Products of a few rows with matrices, in the native kernel `linear.cc`.

With few rows a product takes the time of reading its matrix, which the kernel reads once, as it
lies. A row's result has the same bits in any number of rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import build

MOST_ROWS = 256  # with more rows, XLA's products are faster
MOST_SUMMED = 1024  # rows of `row_sums`, which run on one thread
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


class Matrix(NamedTuple):
    """A matrix; an element of a quantized one is (weight - zero) * scale.

    Attributes:
      weight: [O..., I...], floating-point, or integers in 8 or 4 bits.
      scale: float32 [G, O...] of a quantized matrix, for each output and group of inputs.
      zero: zero points like `scale`; None: 0.
    """

    weight: Array
    scale: Array | None = None
    zero: Array | None = None


def is_supported(x: Float[Array, "..."], matrices: Sequence[Matrix], inputs: int) -> bool:
    """Returns whether the kernel can compute the products of x, and is the fastest.

    Args:
      x: rows.
      matrices: that x is multiplied with.
      inputs: the number of elements of I.
    """
    rows = x.size // max(inputs, 1)
    return (
        0 < rows <= MOST_ROWS
        and x.dtype in FLOATS
        and len({matrix.weight.dtype for matrix in matrices}) == 1
        and build.is_default()
        and all(_is_supported(matrix, inputs) for matrix in matrices)
    )


def _is_supported(matrix: Matrix, inputs: int) -> bool:
    if matrix.scale is None:
        return matrix.weight.dtype in FLOATS
    if matrix.weight.dtype not in (jnp.int4, jnp.int8) or matrix.scale.dtype != jnp.float32:
        return False
    if matrix.weight.dtype == jnp.int8 and len(matrix.scale) == 1 and matrix.zero is None:
        return True
    step = build.vector_width() * (2 if matrix.weight.dtype == jnp.int4 else 1)
    return inputs // len(matrix.scale) % step == 0


def products(
    x: Float[Array, "..."],
    matrices: Sequence[Matrix],
    axes: int,
    dtype: Any,
    expert: Int[Array, ""] | None = None,
) -> list[Float[Array, "..."]]:
    """Returns the product of x with each matrix, accumulated in float32 and rounded once.

    Args:
      x: rows; read once for all matrices.
      matrices: all floating-point, or all quantized, that `is_supported` accepts.
      axes: the number of axes I.
      dtype: dtype of the results.
      expert: index along an axis of experts before O; None: the matrices have no experts.
    """
    if matrices[0].scale is None and expert is None:
        return _floating_products(x, [matrix.weight for matrix in matrices], axes, dtype)
    none = jnp.zeros(0, jnp.float32)
    operands: list[tuple] = [
        (w,) if scale is None else (w, scale, none if zero is None else zero)
        for w, scale, zero in matrices
    ]
    return _call(x, operands, axes, dtype, expert)


def can_sum(x: Float[Array, "*B E"]) -> bool:
    """Returns whether `row_sums` takes x."""
    rows = x.size // max(x.shape[-1], 1)
    return 0 < rows <= MOST_SUMMED and x.dtype == jnp.float32 and build.is_default()


def row_sums(x: Float[Array, "*B E"]) -> Float[Array, "*B 1"]:
    """Returns the sum of each row of float32, as the product with a matrix of ones.

    The bits of XLA's sums depend on the number of rows, those of products here do not.
    """
    return _floating_products(x, [jnp.ones((1, x.shape[-1]), x.dtype)], 1, jnp.float32)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _floating_products(x: Array, weights: Sequence[Array], axes: int, dtype: Any) -> list[Array]:
    return _call(x, [(weight,) for weight in weights], axes, dtype)


@_floating_products.defjvp
def _tangents(axes: int, dtype: Any, primals: tuple, tangents: tuple) -> tuple[list, list]:
    """Returns the products and their derivatives, which XLA computes."""
    by_xla = functools.partial(_by_xla, axes=axes, dtype=dtype)
    return _floating_products(*primals, axes, dtype), jax.jvp(by_xla, primals, tangents)[1]


def _by_xla(x: Array, weights: Sequence[Array], axes: int, dtype: Any) -> list[Array]:
    def last(array):
        return tuple(range(array.ndim - axes, array.ndim))

    options = dict(precision="highest", preferred_element_type=dtype)
    return [
        jax.lax.dot_general(x, w.astype(x.dtype), ((last(x), last(w)), ((), ())), **options)
        for w in weights
    ]


def _call(
    x: Array,
    matrices: Sequence[tuple],
    axes: int,
    dtype: Any,
    expert: Int[Array, ""] | None = None,
) -> list[Array]:
    weights = [weight for weight, *_ in matrices]
    if expert is not None:
        weights = [jax.eval_shape(lambda w: w[0], weight) for weight in weights]
    # Inside shard_map the results vary over the mesh axes of x and the weights.
    results = jax.eval_shape(functools.partial(_by_xla, axes=axes, dtype=dtype), x, weights)
    call = jax.ffi.ffi_call("magicjax_linear", results, vmap_method="sequential")
    operands = [operand for matrix in matrices for operand in matrix]
    inputs = np.int64(math.prod(x.shape[x.ndim - axes :]))
    return list(call(x, jnp.int32(0 if expert is None else expert), *operands, inputs=inputs))
