"""Linear maps: products with matrices that are floating-point or quantized.

Weights keep their logical axes (width, heads, head size) unflattened, so that one table of logical
axes determines their sharding.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import quantized
from models.quantized import WeightFormat
from pallas_kernels.cpu import build, linear, packed
from pallas_kernels.cpu.linear import Matrix
from pallas_kernels.cpu.packed import FORMATS, Packed
from sharding import collectives

DEVIATIONS = 3  # of random quantized weights, that the largest value stands for


def dot_precision(dtype: Any) -> jax.lax.Precision | None:
    """Returns the precision of products; by default a GPU would round float32 to TF32."""
    return jax.lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None


def products(
    x: Float[Array, "..."],
    matrices: Sequence[Matrix | Packed],
    inputs: int,
    backend: str | None = None,
    dtype: Any = None,
    expert: Int[Array, ""] | None = None,
) -> list[Float[Array, "..."]]:
    """Returns the product of x with each matrix, accumulated at least in float32.

    Args:
      x: [B..., I...]; a result is [B..., O...].
      matrices: weights [O..., I...], each in its format.
      inputs: the number of axes I.
      backend: None or "cpu": a native kernel on a CPU that has it, which reads x once for all
        matrices; others: XLA.
      dtype: dtype of the results; None: x's.
      expert: index along an axis of experts before O, of which the others are not read; None: the
        matrices have no experts.
    """
    dtype = x.dtype if dtype is None else dtype
    keys = [_group_key(matrix) for matrix in matrices]
    products_of = dict[Any, Iterator[Array]]()
    for key in dict.fromkeys(keys):  # a call for each
        group: list[Any] = [matrix for matrix in matrices if _group_key(matrix) == key]
        if key is None:
            products_of[key] = iter(_packed_products(x, group, inputs, backend, dtype))
        else:
            products_of[key] = iter(_products(x, group, inputs, backend, dtype, expert))
    return [next(products_of[key]) for key in keys]


def _group_key(matrix: Matrix | Packed) -> Any:
    """Returns what matrices of one call have in common: the dtype of values; None: packed."""
    return None if isinstance(matrix, Packed) else (matrix.weight.dtype, matrix.scale is None)


def _products(
    x: Array,
    matrices: Sequence[Matrix],
    inputs: int,
    backend: str | None,
    dtype: Any,
    expert: Array | None,
) -> list[Array]:
    """Returns `products` of matrices that are not packed, with values of one dtype."""

    def by_xla(x, matrices, expert=None):
        def product(matrix, x):
            weight, scale, zero = matrix if expert is None else _of_expert(matrix, expert)
            if scale is None:
                return _floating_product(x, weight, inputs, dtype)
            return quantized.product(x, weight, scale, zero, dot_precision(x.dtype)).astype(dtype)

        return [at_least_two_rows(functools.partial(product, m), x, inputs) for m in matrices]

    def by_kernel(x, matrices, expert=None):
        return linear.products(x, matrices, inputs, dtype, expert)

    elements = math.prod(x.shape[x.ndim - inputs :])
    if backend not in (None, "cpu") or not linear.is_supported(x, matrices, elements):
        return by_xla(x, matrices, expert)
    arguments = (x, matrices) if expert is None else (x, matrices, expert)
    return jax.lax.platform_dependent(*arguments, cpu=by_kernel, default=by_xla)


def _packed_products(
    x: Array, matrices: Sequence[Packed], inputs: int, backend: str | None, dtype: Any
) -> list[Array]:
    """Returns `products` of packed matrices."""

    def by_xla(x, operands):
        shape = x.shape[x.ndim - inputs :]
        dense = (packed.dequantize(matrix).reshape(*matrix.outputs, *shape) for matrix in operands)
        return [_floating_product(x, w.astype(x.dtype), inputs, dtype) for w in dense]

    def by_kernel(x, operands):
        return packed.products(x, operands, inputs, dtype)

    if backend not in (None, "cpu") or not build.is_default():
        return by_xla(x, matrices)
    return jax.lax.platform_dependent(x, matrices, cpu=by_kernel, default=by_xla)


def packed_rows(matrix: Packed, numbers: Int[Array, "*B"], backend: str | None) -> Array:
    """Returns rows of a packed matrix in float32, zeros for numbers that it does not have.

    Args:
      matrix: the packed matrix.
      numbers: indices of the rows.
      backend: backend of the products, see `products`.
    """

    def by_xla(matrix, numbers):
        rows = jnp.take(packed.dequantize(matrix), numbers, axis=0, mode="fill", fill_value=0)
        return jnp.where(numbers[..., None] < 0, 0, rows)

    if backend not in (None, "cpu") or not build.is_default():
        return by_xla(matrix, numbers)
    return jax.lax.platform_dependent(matrix, numbers, cpu=packed.rows, default=by_xla)


def packed_param(
    module: nn.Module,
    name: str,
    weight_format: str,
    outputs: tuple[tuple[int, str | None], ...],
    inputs: tuple[tuple[int, str | None], ...],
) -> Packed:
    """Returns the parameter of a packed matrix of a module, at first zeros.

    Args:
      module, name: the module and the name of the parameter.
      weight_format: name in `FORMATS`.
      outputs, inputs: (size, logical axis) of each axis.
    """
    sizes = tuple(size for size, _ in outputs)
    shape = FORMATS[weight_format].shape(math.prod(sizes), math.prod(size for size, _ in inputs))
    names = outputs[0][1], inputs[0][1], None
    init = nn.with_logical_partitioning(nn.initializers.zeros, names)
    return Packed(module.param(name, init, shape, jnp.uint8), weight_format, sizes)


def _of_expert(matrix: Matrix, expert: Int[Array, ""]) -> Matrix:
    """Returns the matrix of one expert."""

    def select(x: Array | None, axis: int) -> Any:
        return None if x is None else jax.lax.dynamic_index_in_dim(x, expert, axis, False)

    return Matrix(select(matrix.weight, 0), select(matrix.scale, 1), select(matrix.zero, 1))


def mean(x: Float[Array, "*B E"], backend: str | None = None) -> Float[Array, "*B 1"]:
    """Returns the mean of each row; with the kernels, its bits do not depend on other rows.

    Args:
      x: rows.
      backend: backend of the products, see `products`.
    """

    def by_xla(x):
        return jnp.mean(x, -1, keepdims=True)

    def by_kernel(x):
        return linear.row_sums(x) / x.shape[-1]

    if backend not in (None, "cpu") or not linear.can_sum(x):
        return by_xla(x)
    return jax.lax.platform_dependent(x, cpu=by_kernel, default=by_xla)


def _floating_product(x: Array, weight: Array, inputs: int, dtype: Any) -> Array:
    """Returns x times the matrix; axes are flattened, because XLA would transpose the weight."""
    rows, outputs = x.shape[: x.ndim - inputs], weight.shape[: weight.ndim - inputs]
    size = math.prod(x.shape[len(rows) :])
    x, weight = x.reshape(*rows, size), weight.reshape(math.prod(outputs), size)
    options = dict(precision=dot_precision(x.dtype), preferred_element_type=dtype)
    out = jax.lax.dot_general(x, weight, (((len(rows),), (1,)), ((), ())), **options)
    return out.reshape(*rows, *outputs)


def at_least_two_rows(product: Callable[[Array], Array], x: Array, axes: int) -> Array:
    """Returns product(x), with a second row of zeros if that is faster.

    On a CPU, XLA converts the whole 16-bit weight of a matrix-vector product to float32 in every
    call. With two rows it is a matrix product, which reads 16 bits: SmolLM2-135M in bfloat16 takes
    127 instead of 560 ms for a token on two shared cores.

    Args:
      product: multiplies x with a weight; keeps the first axes.
      x: [*B, *I].
      axes: the number of contracted axes I.
    """
    rows = x.shape[: x.ndim - axes]
    if not rows or math.prod(rows) > 1 or x.dtype.itemsize >= 4:
        return product(x)

    def two_rows(x):
        return product(jnp.concatenate([x, jnp.zeros_like(x)]))[:1]

    return jax.lax.platform_dependent(x, cpu=two_rows, default=product)


class Projection(nn.Module):
    """A linear map over the last `len(inputs)` axes, its weight shaped outputs + inputs.

    Attributes:
      inputs, outputs: (size, logical axis) of each contracted axis, and of each output axis.
      axis_names: mesh axes that divide the contracted axes.
      weights: the format of a quantized weight, or the type of a packed one. Scales, and zero
        points if there are any, are float32 [G, outputs...]; a mesh that divides the inputs divides
        the G groups.
      backend: backend of the products (`products`).
    """

    inputs: tuple[tuple[int, str | None], ...]
    outputs: tuple[tuple[int, str | None], ...]
    use_bias: bool
    dtype: Any
    axis_names: tuple[str, ...] = ()
    weights: WeightFormat | str | None = None
    backend: str | None = None

    def setup(self):
        self.matrix = self._matrix()
        if self.use_bias:
            self.bias = self._param("bias", nn.initializers.zeros, self.outputs, self.dtype)

    def __call__(self, x: Array) -> Array:
        return project(x, self)[0]

    def finish(self, out: Array) -> Array:
        """Returns the result, given the product with this device's part of the matrix."""
        out = collectives.psum(out, self.axis_names)
        return out + self.bias if self.use_bias else out

    def _matrix(self) -> Matrix | Packed:
        """Returns the parameters of the matrix, at first random."""
        weight_format, axes = self.weights, self.outputs + self.inputs
        if isinstance(weight_format, str):
            return packed_param(self, "weight", weight_format, self.outputs, self.inputs)
        if weight_format is None:
            first_input = len(self.outputs)
            init = nn.initializers.variance_scaling(
                1.0,
                "fan_in",
                "normal",
                in_axis=range(first_input, len(axes)),
                out_axis=range(first_input),
            )
            return Matrix(self._param("weight", init, axes, self.dtype))
        inputs = math.prod(size for size, _ in self.inputs)
        group_axis = None if weight_format.group is None else self.inputs[0][1]
        groups = ((weight_format.groups(inputs), group_axis), *self.outputs)

        def values(key, shape, dtype):
            deviations = jax.random.truncated_normal(key, -DEVIATIONS, DEVIATIONS, shape)
            return jnp.rint(deviations * (weight_format.largest / DEVIATIONS)).astype(dtype)

        scaled = nn.initializers.constant(DEVIATIONS / weight_format.largest / math.sqrt(inputs))
        weight = self._param("weight", values, axes, weight_format.dtype)
        scale = self._param("scale", scaled, groups, jnp.float32)
        if not weight_format.zeros:
            return Matrix(weight, scale)
        zero = self._param("zero", nn.initializers.zeros, groups, jnp.float32)
        return Matrix(weight, scale, zero)

    def _param(self, name: str, init: Any, axes: Any, dtype: Any) -> Array:
        """Returns a parameter with `axes`, (size, logical axis) of each."""
        shape, names = zip(*axes, strict=True)
        return self.param(name, nn.with_logical_partitioning(init, names), shape, dtype)


def project(x: Array, *projections: Projection) -> list[Array]:
    """Returns the results of projections of the same x."""
    first = projections[0]
    matrices = [projection.matrix for projection in projections]
    outs = products(x, matrices, len(first.inputs), first.backend)
    return [each.finish(out) for each, out in zip(projections, outs, strict=True)]
