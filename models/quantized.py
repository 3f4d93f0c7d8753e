"""Quantized matrices: integers with a scale for each output and group of inputs.

An element is (value - zero) * scale. Quantization is symmetric: the zero is 0, and the element of a
group with the largest magnitude becomes -8 or -128, so that scales have the other sign. An error is
at most half a scale, and at most a scale for elements that would become 8 or 128. Zeros exist only
in checkpoints that others have quantized.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.cpu.packed import FORMATS as PACKED
from pallas_kernels.cpu.packed import OUTPUTS, ROUNDED

DTYPES = {4: jnp.int4, 8: jnp.int8}
NONE: Literal["none"] = "none"  # dequantize a quantized checkpoint
INT4_GROUP = 128  # of the format "int4"
BLOCK = "layers_"  # before the index of a layer, in the names of parameters
FORMATS = "'int8', 'int4', or either with a group, such as 'int4:32'"
ON_CPU = f"{FORMATS}; on a CPU also {' or '.join(map(repr, ROUNDED))}"


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a quantized matrix is stored.

    Attributes:
      bits: bits of a value, 4 or 8.
      group: the inputs that share a scale; None: all inputs of an output channel.
      zeros: whether groups have zero points.
      is_float: whether values are float8 (e4m3), which only checkpoints have.
    """

    bits: int
    group: int | None
    zeros: bool = False
    is_float: bool = False

    @classmethod
    def parse(cls, text: str) -> "WeightFormat":
        """Returns the format of a text such as "int8", "int4", "int4:32" or "float8:128".

        Without a group, "int8" and "float8" have a scale for each output channel, and "int4" groups
        of 128. The end "+zeros" stands for zero points.

        Raises ValueError for another value.
        """
        pattern = r"(int4|int8|float8)(?::([1-9]\d*|channel))?(\+zeros)?"
        match = re.fullmatch(pattern, text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"weights={text!r} is unknown: use {ON_CPU}")
        type_name, group, zeros = match.groups()
        bits = int(type_name[-1])
        if group is None:
            size = INT4_GROUP if bits == 4 else None
        else:
            size = None if group == "channel" else int(group)
        return cls(bits, size, zeros is not None, type_name == "float8")

    def __str__(self) -> str:
        """Returns the text that `parse` accepts."""
        default = INT4_GROUP if self.bits == 4 else None
        group = "" if self.group == default else f":{self.group or 'channel'}"
        return f"{self._type_name}{group}{'+zeros' * self.zeros}"

    @property
    def _type_name(self) -> str:
        return f"{'float' if self.is_float else 'int'}{self.bits}"

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return jnp.float8_e4m3fn if self.is_float else DTYPES[self.bits]

    @property
    def largest(self) -> int:
        """The largest value of symmetric quantization."""
        return 2 ** (self.bits - 1) - 1

    @property
    def itemsize(self) -> float:
        """Bytes per element with the float32 scales of groups; those of channels are negligible."""
        scales = 4 * (1 + self.zeros) / self.group if self.group else 0
        return self.bits / 8 + scales

    def groups(self, inputs: int) -> int:
        """Returns the number of groups of a matrix with `inputs` inputs."""
        return 1 if self.group is None else inputs // self.group

    @property
    def is_rounding(self) -> bool:
        """Whether `quantize` can round to the format: only checkpoints have float8 and zeros."""
        return not self.zeros and not self.is_float

    def check_rounding(self) -> None:
        """Raises ValueError unless `quantize` can round to the format."""
        if not self.is_rounding:
            raise ValueError(
                f"weights={str(self)!r}: only checkpoints have float8 values and zero points, and "
                f"other matrices cannot be quantized so: use {FORMATS}"
            )

    def check(self, inputs: Mapping[str, int], shards: int = 1) -> None:
        """Raises ValueError unless groups divide the inputs of every matrix.

        Args:
          inputs: the inputs of each matrix, by name, on one of `shards` devices.
          shards: for the message.
        """
        if self.group is None:
            return
        for name, size in inputs.items():
            if size % self.group:
                # float8 groups can be divided only: nothing is rounded to float8.
                common = math.gcd(*inputs.values(), *(self.group,) * self.is_float)
                fits = [f"{self._type_name}:{g}" for g in (128, 64, 32, 16, 8) if common % g == 0]
                matrix = f"{size} inputs of {name}"
                matrix += f" on each of {shards} devices" if shards > 1 else ""
                raise ValueError(
                    f"weights={str(self)!r}: groups of {self.group} do not divide the {matrix}: "
                    f"use {' or '.join(fits) or f'{self._type_name}:{common}'}"
                )


@dataclasses.dataclass(frozen=True)
class MatrixFormats:
    """The formats of a model's quantized matrices; other matrices are floating-point.

    Attributes:
      texts: (path below "params", format) of each matrix: the text of a `WeightFormat`, such as
        ("layers_0/attention/q", "int4:32"), or the name in `pallas_kernels.cpu.packed.FORMATS` of a
        matrix that is packed for the CPU kernels, such as ("embedding", "Q6_K").
    """

    texts: tuple[tuple[str, str], ...] = ()  # whose hashes Python keeps, unlike those of formats

    def of(self, name: str) -> WeightFormat | str | None:
        """Returns the format of a matrix, a text if it is packed; None: floating-point."""
        text = dict(self.texts).get(name)
        return text if text is None or text in PACKED else WeightFormat.parse(text)

    def within(self, name: str) -> "MatrixFormats":
        """Returns the formats of the matrices of a submodule."""
        prefix = f"{name}/"
        return MatrixFormats(
            tuple((x.removeprefix(prefix), t) for x, t in self.texts if x.startswith(prefix))
        )

    def of_layers(self, layers: Sequence[int]) -> "MatrixFormats":
        """Returns the formats of a model that has some layers of another."""
        others = tuple((x, t) for x, t in self.texts if not x.startswith(BLOCK))
        chosen = (
            (f"{BLOCK}{i}/{x}", t)
            for i, layer in enumerate(layers)
            for x, t in self.within(f"{BLOCK}{layer}").texts
        )
        return MatrixFormats((*others, *chosen))

    @property
    def in_blocks(self) -> frozenset[str]:
        """The formats of the blocks' matrices."""
        return frozenset(text for name, text in self.texts if name.startswith(BLOCK))

    @property
    def is_packed(self) -> bool:
        """Whether some matrices are packed."""
        return any(text in PACKED for _, text in self.texts)

    def check(self, inputs: Mapping[str, int], shards: int = 1) -> None:
        """Raises ValueError unless groups divide the inputs of every matrix.

        Args:
          inputs: the inputs of each matrix of a block, by name, on one of `shards` devices.
          shards: for the message.
        """
        texts = sorted({text for _, text in self.texts if text not in PACKED})
        for text in texts:
            names = {name.partition("/")[2] for name, other in self.texts if other == text}
            sizes = {name: size for name, size in inputs.items() if name in names}
            try:
                WeightFormat.parse(text).check(sizes, shards)
            except ValueError as error:
                if len(texts) == 1:
                    raise
                raise ValueError(
                    f"{error}, which round matrices in other formats, or weights='none'"
                ) from error

    def __bool__(self) -> bool:
        return bool(self.texts)

    def __str__(self) -> str:
        return "+".join(sorted({text for _, text in self.texts})) or NONE


def parse_weights(
    weights: "str | WeightFormat | None",
) -> WeightFormat | str | None:
    """Returns the format of the argument `weights` of `magicjax.load`.

    None: as stored; `NONE`: not quantized; one of `ROUNDED`: rounded and packed.

    Raises ValueError for another value than a format or its text.
    """
    if weights is None or isinstance(weights, WeightFormat) or weights in (NONE, *ROUNDED):
        return weights
    return WeightFormat.parse(weights)


def rounded_format(weights: WeightFormat | str | None) -> WeightFormat | None:
    """Returns the format of matrices that are rounded to the result of `parse_weights`.

    Raises ValueError for a format to which nothing is rounded, and for one of `ROUNDED`.
    """
    if weights is None or weights == NONE:
        return None
    if isinstance(weights, str):
        raise ValueError(
            f"weights={weights!r} needs a dense model in files, float32, bfloat16 or float16, and "
            "one CPU with the native kernels; it excludes offload=True and activations='float': "
            "omit them, or use 'int4:32' or 'int8'"
        )
    weights.check_rounding()
    return weights


def check_fits(weight_format: str, name: str, outputs: int, inputs: int) -> None:
    """Raises ValueError unless a matrix can be packed as one of `ROUNDED`."""
    packed = PACKED[weight_format]
    if not packed.fits(outputs, inputs):
        raise ValueError(
            f"weights={weight_format!r}: {name} has {outputs} outputs and {inputs} inputs, which "
            f"must be multiples of {OUTPUTS} and {packed.inputs}: use 'int8'"
        )


def quantize(weight: Any, weight_format: WeightFormat, inputs: int, xp: Any = np) -> dict[str, Any]:
    """Returns the parameters `weight` [O..., I...] and `scale` [G, O...], by default on the host.

    Args:
      weight: [O..., I...], floating-point.
      weight_format: a format of integers without zero points (ValueError); its groups divide the
        inputs.
      inputs: the number of axes I.
      xp: `jax.numpy` to compute where the weight is.
    """
    weight_format.check_rounding()
    grouped = xp.asarray(weight, np.float32)
    first = grouped.ndim - inputs
    groups = weight_format.groups(math.prod(grouped.shape[first:]))
    grouped = grouped.reshape(*grouped.shape[:first], groups, -1)
    high, low, limit = grouped.max(-1), grouped.min(-1), 2 ** (weight_format.bits - 1)
    largest = xp.where(high > -low, high, low)
    scale = xp.where(largest != 0, largest / -limit, 1).astype(np.float32)
    values = xp.clip(xp.rint(grouped / scale[..., None]), -limit, limit - 1)
    values = values.astype(np.int8).astype(weight_format.dtype).reshape(weight.shape)
    return {"weight": values, "scale": xp.moveaxis(scale, -1, 0)}


def dequantize(
    weight: Array, scale: Array, zero: Array | None = None, dtype: Any = jnp.float32
) -> Array:
    """Returns (weight - zero) * scale, in at least float32 and rounded to `dtype`.

    Args:
      weight: [O..., I...], integers.
      scale, zero: [G, O...].
      dtype: dtype of the result.
    """
    groups, *outputs = scale.shape

    def per_input(x):
        return jnp.moveaxis(x, 0, -1)[..., None]

    values = jnp.asarray(weight).astype(jnp.promote_types(dtype, jnp.float32))
    values = values.reshape(*outputs, groups, -1)
    values = values if zero is None else values - per_input(zero)
    return (values * per_input(scale)).astype(dtype).reshape(weight.shape)


def product(x: Array, weight: Array, scale: Array, zero: Array | None, precision: Any) -> Array:
    """Returns x times the matrix, in x's dtype, without dequantizing it.

    Integers are multiplied, which are exact in bfloat16, and the sums of each group are scaled, in
    at least float32. If 2 * rows <= I / G, as in decoding, the sums [G, B..., O...] of all groups
    are computed at once. They take no more memory than the matrix in 16 bits. With more rows, as in
    prefill, groups are computed one by one.

    Args:
      x: [B..., I...]; the result is [B..., O...].
      weight: [O..., I...], integers.
      scale, zero: [G, O...].
      precision: precision of the product.
    """
    groups, *outputs = scale.shape
    rows = x.shape[: x.ndim - weight.ndim + len(outputs)]
    sum_dtype = jnp.promote_types(x.dtype, jnp.float32)
    size = math.prod(x.shape[len(rows) :]) // groups
    x3 = x.reshape(math.prod(rows), groups, size)  # [R, G, I / G]
    w3 = weight.reshape(math.prod(outputs), groups, size)  # [O, G, I / G]
    scale = scale.reshape(groups, -1)
    zero = None if zero is None else zero.reshape(groups, -1)

    def scaled(spec, x, w, scale, zero):
        """Returns the scaled sums of some groups; `spec` is of their products."""
        options = dict(precision=precision, preferred_element_type=sum_dtype)
        sums = jnp.einsum(spec, x, w.astype(x.dtype), **options)
        if zero is not None:
            total = jnp.moveaxis(x.astype(sum_dtype).sum(-1), 0, -1)  # [..., R]
            sums = sums - total[..., None] * zero[..., None, :]
        return sums * scale[..., None, :]

    def add_group(g, out):
        zeros = None if zero is None else zero[g]
        return out + scaled("ri,oi->ro", x3[:, g], w3[:, g], scale[g], zeros)

    out = jnp.zeros((len(x3), len(w3)), sum_dtype)
    if groups == 1:
        out = add_group(0, out)
    elif 2 * len(x3) <= size:
        out = scaled("rgi,ogi->gro", x3, w3, scale, zero).sum(0)
    else:
        out = jax.lax.fori_loop(0, groups, add_group, out)
    return out.astype(x.dtype).reshape(*rows, *outputs)


def quantize_params(
    params: Any, shapes: Any, formats: MatrixFormats, quantize: Callable[..., Any] = quantize
) -> Any:
    """Returns parameters with quantized matrices; those quantized already are kept.

    Args:
      params: nested dictionaries, such as those of a block.
      shapes: shapes of the result, as the module declares them.
      formats: formats of the matrices, by their path in `params`; packed ones are kept.
      quantize: quantizes a matrix; by default on the host.
    """
    quantized = dict(params)
    for name, x in params.items():
        weight_format = formats.of(name)
        if isinstance(weight_format, WeightFormat) and "scale" not in x:
            inputs = x["weight"].ndim - (len(shapes[name]["scale"].shape) - 1)
            quantized[name] = x | quantize(x["weight"], weight_format, inputs)
        elif isinstance(x, dict) and weight_format is None:
            quantized[name] = quantize_params(x, shapes[name], formats.within(name), quantize)
    return quantized


def dequantize_params(params: Any, dtype: Any) -> Any:
    """Returns parameters with matrices converted to `dtype`, and others unchanged."""
    if not isinstance(params, dict):
        return params
    if "weight" in params and "scale" in params:
        params = dict(params)
        weight = dequantize(
            params.pop("weight"), params.pop("scale"), params.pop("zero", None), dtype
        )
        return params | {"weight": weight}
    return {name: dequantize_params(value, dtype) for name, value in params.items()}
