"""Maps the tensors of a Hugging Face checkpoint to parameters, and reads them from files.

One declaration per parameter serves reading, writing and validation. A parameter is stored
unchanged, flattened (norms and biases), or as the matrix of a linear map, alone or with others.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from models.decoder_config import DecoderConfig
from models.families import FAMILIES
from models.positions import LearnedPositions
from models.quantized import BLOCK

# Buffers that some versions save, which follow from the config, and the scales of caches in float8.
IGNORED = re.compile(
    r"(.*\.)?(rotary_emb\.(inv_freq|(cos|sin)_cached)|masked_bias|attn\.bias|decoder\.version"
    r"|(q|k|v|kv|prob|output)_scale)"
)
UNEMBEDDING = "lm_head.weight"
# Matrices with one output for a head or expert, and those of a layer's own input.
UNQUANTIZED = {"router", "shared_gate", "b", "a", "input_gate", "input_projection"}
SHOWN = 5  # mismatches of a kind in an error
LFS_POINTER = b"version https://git-lfs.github.com/spec"
GGUF_INDEX = "gguf_index.json"  # of a GGUF file's tensors, in a directory without weights
DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
QUANTIZED = {"I8": np.int8, "U8": np.uint8, "I64": np.int64, "F8_E4M3": ml_dtypes.float8_e4m3fn}
STORED = DTYPES | QUANTIZED | {"I32": np.int32}  # integers keep their dtype


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, or the matrix of an expert in a tensor of all experts."""

    file: pathlib.Path
    name: str  # in the file, perhaps without the family's prefix
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int, int] | None = None  # of a matrix: its expert, first row and end

    def of(self, values: np.ndarray) -> np.ndarray:
        """Returns the values, given those that the file has by this name."""
        if self.rows is None:
            return values
        expert, first, end = self.rows
        return values[expert, first:end]


def read_tensor(location: Stored) -> np.ndarray:
    """Returns a tensor's values."""
    with safetensors.safe_open(location.file, "numpy") as handle:
        return location.of(handle.get_tensor(location.name))


def separate_experts(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors with the matrices of each expert, which a file may have in two tensors.

    These are `gate_up_proj` [X, 2 F, E] and `down_proj` [X, E, F].
    """
    separate = dict[str, Stored]()
    for name, location in stored.items():
        module, _, tensor = name.rpartition(".experts.")
        if tensor not in ("gate_up_proj", "down_proj") or len(location.shape) != 3:
            separate[name] = location
            continue
        projections = ("gate", "up") if tensor == "gate_up_proj" else ("down",)
        count, outputs, inputs = location.shape
        size = outputs // len(projections)
        for expert in range(count):
            for i, projection in enumerate(projections):
                separate[f"{module}.experts.{expert}.{projection}_proj.weight"] = (
                    dataclasses.replace(
                        location, shape=(size, inputs), rows=(expert, i * size, (i + 1) * size)
                    )
                )
    return separate


def mismatch(files: str, config: str, problems: Sequence[str], hint: str = "") -> ValueError:
    """Returns the error for tensors of files that do not match a config.

    Args:
      files, config: what does not match.
      problems: such as "missing NAME" and "unexpected NAME"; a few of each kind are shown.
      hint: what may be the reason of all.
    """
    lines, rest = list[str](), list(problems)
    for prefix in ("missing", "unexpected", ""):
        matching = [problem for problem in rest if problem.startswith(prefix)]
        rest = [problem for problem in rest if not problem.startswith(prefix)]
        lines += matching[:SHOWN]
        if len(matching) > SHOWN:
            lines.append(f"and {len(matching) - SHOWN:,} more {prefix or 'problems'}")
    count = f"{len(problems):,} problem{'s' if len(problems) > 1 else ''}"
    return ValueError("\n  ".join([f"the {files} do not match {config} ({count}){hint}:", *lines]))


def check_not_pointer(file: pathlib.Path) -> None:
    """Raises ValueError for the text that Git LFS has in place of a file."""
    with open(file, "rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(
                f"{file} is a pointer of Git LFS, not the file: run `git lfs pull` in its "
                "repository, or download it"
            )


def mapped_tensors(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns a file's tensors by name as memory-mapped views, which `safetensors` does not offer.

    The format: the header's length in 8 bytes, the header as JSON with each tensor's dtype, shape
    and byte range, and the tensors.
    """
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    raw = np.memmap(file, np.uint8, "r", offset=8 + size)
    header.pop("__metadata__", None)
    return {
        name: raw[slice(*entry["data_offsets"])]
        .view(STORED[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
        if entry["dtype"] in STORED
    }


@dataclasses.dataclass(frozen=True)
class Fused:
    """The outputs of one parameter in a tensor of several, such as q, k and v.

    The outputs are in groups. Each group has `sizes[0]` outputs of the first parameter, then
    `sizes[1]` of the second, and so on.

    Attributes:
      groups: the number of groups.
      sizes: outputs of each parameter in a group.
      index: index of this parameter.
    """

    groups: int
    sizes: tuple[int, ...]
    index: int

    def part(self, stored: np.ndarray) -> np.ndarray:
        """Returns this parameter's rows of `stored`, whose first axis has all outputs."""
        start = sum(self.sizes[: self.index])
        grouped = stored.reshape(self.groups, sum(self.sizes), *stored.shape[1:])
        grouped = grouped[:, start : start + self.sizes[self.index]]
        return grouped.reshape(-1, *stored.shape[1:])

    def join(self, arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """Returns the array of shape `shape` that has `arrays`, those of all parameters."""
        grouped = [x.reshape(self.groups, -1, *shape[1:]) for x in arrays]
        return np.concatenate(grouped, 1).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """The outputs of one parameter in a tensor of several, which alternate (gpt-oss).

    Attributes:
      count: the number of parameters.
      index: index of this parameter.
    """

    count: int
    index: int

    def part(self, stored: np.ndarray) -> np.ndarray:
        """Returns this parameter's rows of `stored`, whose first axis has all outputs."""
        return stored[self.index :: self.count]

    def join(self, arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """Returns the array of shape `shape` that has `arrays`, those of all parameters."""
        rows = [x.reshape(-1, *shape[1:]) for x in arrays]
        return np.stack(rows, 1).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter, and the stored tensor that has it.

    Attributes:
      name: the tensor's name in the checkpoint.
      path: the parameter's path, below "params".
      inputs: number of last axes, which a linear map contracts; 0: not a linear map.
      flat: whether it is stored with one axis.
      transposed: whether a linear map is stored as [inputs, outputs] instead of [outputs, inputs].
      fused: where the tensor has the parameter; None: it has no other one.
      expert: the index on the parameter's first axis of which the tensor has the values; None: it
        has all of them.
      experts: the number of experts of a tensor that has all of them as its first axis, each
        transposed; None: it has no such axis.
      stacked: the number of experts of a tensor that has all of them as its first axis, each as
        [outputs, inputs]; None: it has no such axis.
    """

    name: str
    path: tuple[str, ...]
    inputs: int = 0
    flat: bool = False
    transposed: bool = False
    fused: Fused | Interleaved | None = None
    expert: int | None = None
    experts: int | None = None
    stacked: int | None = None

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is a matrix of a block, which `weights` quantizes; `UNQUANTIZED` are not."""
        in_block = self.path[0].startswith(BLOCK)
        return bool(self.inputs) and in_block and not UNQUANTIZED.intersection(self.path)

    @property
    def matrix(self) -> str | None:
        """The path of a matrix that can be packed, as in `MatrixFormats`; None: another tensor."""
        if self.is_block_matrix:
            return "/".join(self.path[:-1])
        return self.path[0] if self.path in (("embedding",), ("unembedding",)) else None

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part of a parameter that the tensor has."""
        return tuple(shape if self.expert is None else shape[1:])

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tensor's shape before a transpose, for a parameter of shape `shape`.

        The shape is [outputs, inputs] for a linear map.
        """
        shape = self.part_shape(shape)
        if self.experts is not None:
            count = self.fused.count if isinstance(self.fused, Interleaved) else 1
            rows = shape[0] * shape[1] * count
            return (rows, *shape[2:])
        if not self.inputs and not self.flat:
            return shape
        first = len(shape) - self.inputs
        outputs = math.prod(shape[:first])
        if isinstance(self.fused, Fused):
            outputs = self.fused.groups * sum(self.fused.sizes)
        return (outputs,) if self.flat else (outputs, math.prod(shape[first:]))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tensor's shape, for a parameter of shape `shape`."""
        matrix = self.matrix_shape(shape)
        if self.experts is not None:
            rows, *inputs = matrix
            return (self.experts, *inputs, rows // self.experts)
        if self.stacked is not None:
            return (self.stacked, matrix[0] // self.stacked, *matrix[1:])
        return matrix[::-1] if self.transposed else matrix

    def to_parameter(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the part of a parameter of shape `shape`; a view unless outputs are in groups."""
        stored = stored.T if self.transposed else stored
        if self.stacked is not None:
            stored = stored.reshape(-1, *stored.shape[2:])
        if self.experts is not None:
            stored = np.moveaxis(stored, -1, 1)
            stored = stored.reshape(-1, *stored.shape[2:])
        stored = stored if self.fused is None else self.fused.part(stored)
        return stored.reshape(self.part_shape(shape))


def to_stored(tensors: Sequence[Tensor], parameters: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the contiguous array of one tensor, given all parameters that it has, in order."""
    first = dataclasses.replace(tensors[0], expert=None)  # of a part, whose shape is known
    shape = first.matrix_shape(parameters[0].shape)
    fused = first.fused
    stored = parameters[0].reshape(shape) if fused is None else fused.join(parameters, shape)
    if first.experts is not None:
        stored = np.moveaxis(stored.reshape(first.experts, -1, *stored.shape[1:]), 1, -1)
    if first.stacked is not None:
        stored = stored.reshape(first.stacked, -1, *stored.shape[1:])
    return np.ascontiguousarray(stored.T if first.transposed else stored)


def tensors_of(config: DecoderConfig) -> tuple[Tensor, ...]:
    """Returns every parameter of `config` with its tensor, in file order."""
    c, names = config, FAMILIES[config.family].names
    bias = c.norm == "layer"
    tensors = [Tensor(f"{names['embedding']}.weight", ("embedding",))]
    if isinstance(c.positions, LearnedPositions):
        name = names["position_embedding"]
        tensors.append(Tensor(f"{name}.weight", ("position_embedding",)))
    if c.embedding_size is not None:
        for module in ("project_in", "project_out"):
            tensors += _linear(names[module], (module,), 1, False)
    if c.layer_input_size is not None:
        tensors.append(Tensor(f"{names['layer_embedding']}.weight", ("layer_embedding",)))
        tensors += _linear(names["layer_projection"], ("layer_projection",), 1, False)
        tensors += _norm(names["layer_input_norm"], ("layer_input_norm",), bias)
    for i in range(c.num_layers):
        tensors += _layer(c, i, (f"layers_{i}",))
    if c.final_norm:
        tensors += _norm(names["norm"], ("norm",), bias)
    if not c.tie_embeddings:
        tensors.append(Tensor(UNEMBEDDING, ("unembedding",)))
    if c.draft_vocab_size is not None:
        tensors.append(Tensor(names["vocab_map"], ("vocab_map",)))
    return tuple(tensors)


def _delta_net(c: DecoderConfig, names: dict[str, str], path: tuple[str, ...]) -> list[Tensor]:
    """Returns the tensors of a gated delta net, given the names of all."""
    s, tensors = c.delta_net, list[Tensor]()
    assert s is not None
    keys, values = s.key_heads * s.key_dim, s.value_heads * s.value_dim
    for fused_modules in ("qkvz", "qkv", "z", "ba", "b", "a"):
        if f"delta_{fused_modules}" not in names:
            continue
        sizes = dict(q=keys, k=keys, v=values, z=values, b=s.value_heads, a=s.value_heads)
        # With z, and b with a, the outputs of each key head are adjacent (Qwen3-Next).
        groups = s.key_heads if fused_modules in ("qkvz", "ba") else 1
        grouped = tuple(sizes[module] // groups for module in fused_modules)
        for i, module in enumerate(fused_modules):
            fused = Fused(groups, grouped, i) if len(fused_modules) > 1 else None
            tensors += _linear(
                names[f"delta_{fused_modules}"], (*path, module), 1, False, fused=fused
            )
    tensors.append(Tensor(f"{names['delta_conv']}.weight", (*path, "conv")))
    for name in ("log_rate", "step_bias"):
        tensors.append(Tensor(names[f"delta_{name}"], (*path, name)))
    tensors += _norm(names["delta_norm"], (*path, "norm"))
    return tensors + _linear(names["delta_out"], (*path, "out"), 2, False)


def _layer(c: DecoderConfig, layer: int, path: tuple[str, ...]) -> list[Tensor]:
    """Returns the tensors of a layer."""
    family = FAMILIES[c.family]
    prefix = f"{family.names['layer']}.{layer}"
    names = {module: f"{prefix}.{name}" for module, name in family.names.items()}
    norm_prefix = "parallel_" if c.parallel and not c.shared_norm else ""
    bias, tensors = c.norm == "layer", list[Tensor]()
    inner_norms = c.norm_before or not c.norm_after
    if inner_norms:
        tensors += _norm(names[f"{norm_prefix}attention_norm"], (*path, "attention_norm"), bias)
    if c.linear[layer]:
        tensors += _delta_net(c, names, (*path, "delta_net"))
    else:
        shares = c.kv_sources[layer] is not None
        tensors += _attention(c.of_layer(layer), names, (*path, "attention"), shares)
    if inner_norms and not c.shared_norm:
        tensors += _norm(names[f"{norm_prefix}mlp_norm"], (*path, "mlp_norm"), bias)
    for module in ("attention_output_norm", "mlp_output_norm") * c.norm_after:
        tensors += _norm(names[module], (*path, module), bias)
    for module in ("input_gate", "input_projection") * (c.layer_input_size is not None):
        tensors += _linear(names[module], (*path, module), 1, False)
    if c.layer_input_size is not None:
        tensors += _norm(names["input_norm"], (*path, "input_norm"), bias)
    if c.layer_scalars:
        tensors.append(Tensor(names["scalar"], (*path, "scalar")))
    return tensors + _mlp(c, names, (*path, "mlp"))


def _attention(
    c: DecoderConfig, names: dict[str, str], path: tuple[str, ...], shares: bool
) -> list[Tensor]:
    """Returns the tensors of an attention, given the names of all.

    With `shares` it has no keys and values.
    """
    family, tensors = FAMILIES[c.family], list[Tensor]()
    linear, attention = functools.partial(_linear, transposed=family.transposed), path
    if "qkv" in names:
        groups = c.num_kv_heads if family.grouped_qkv else 1
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        sizes = tuple(count * c.head_dim // groups for count in heads)
        for i, module in enumerate("qkv"):
            fused = Fused(groups, sizes, i)
            tensors += linear(names["qkv"], (*attention, module), 1, c.qkv_bias, fused=fused)
    else:
        halves = (c.head_dim,) * 2  # of each head's outputs: its query, and its gate
        for i, module in enumerate(("q", "gate") * c.attention_gate):
            fused = Fused(c.num_heads, halves, i)
            tensors += linear(names["q"], (*attention, module), 1, c.qkv_bias, fused=fused)
        modules = "q" if shares else "qk" if c.values_are_keys else "qkv"
        for module in modules[c.attention_gate :]:
            tensors += linear(names[module], (*attention, module), 1, c.qkv_bias)
    if c.qk_norm:
        for module in ("q_norm", "k_norm")[: 1 if shares else 2]:
            tensors += _norm(names[module], (*attention, module))
    if c.attention_sinks:
        tensors.append(Tensor(names["sinks"], (*attention, "sinks"), flat=True))
    return tensors + linear(names["out"], (*attention, "out"), 2, c.out_bias)


def _mlp(c: DecoderConfig, names: dict[str, str], mlp: tuple[str, ...]) -> list[Tensor]:
    """Returns the tensors of an MLP or a mixture, given the names of all."""
    family, tensors = FAMILIES[c.family], list[Tensor]()
    options: dict[str, Any]
    linear = functools.partial(_linear, transposed=family.transposed)
    if c.parallel_experts:
        assert c.num_experts is not None
        tensors += linear(names["router"], (*mlp, "router"), 1, c.router_bias)
        for module in ("router_scale", "expert_scale"):
            tensors.append(Tensor(names[module], (*mlp, module)))
        for module in ("experts_norm", "experts_output_norm", "shared_output_norm"):
            tensors += _norm(names[module], (*mlp, module))
        halves = (c.intermediate_size,) * 2
        for i, module in enumerate(("gate", "up")):
            fused = Fused(c.num_experts, halves, i)
            options = dict(inputs=1, fused=fused, stacked=c.num_experts)
            tensors.append(Tensor(names["experts_gate_up"], (*mlp, module, "weight"), **options))
        options = dict(inputs=1, stacked=c.num_experts)
        tensors.append(Tensor(names["experts_down"], (*mlp, "down", "weight"), **options))
        for module in ("gate", "up", "down"):
            tensors += linear(names[module], (*mlp, "shared", module), 1, c.mlp_bias)
        return tensors
    if c.num_experts is not None and "gate_up" in names:
        tensors += linear(names["router"], (*mlp, "router"), 1, c.router_bias)
        fused_modules = [
            ("gate", "gate_up", Interleaved(2, 0)),
            ("up", "gate_up", Interleaved(2, 1)),
        ]
        for module, key, alternating in (*fused_modules, ("down", "down", None)):
            options = dict(fused=alternating, experts=c.num_experts)
            tensors.append(Tensor(names[key], (*mlp, module, "weight"), inputs=1, **options))
            if c.mlp_bias:
                bias_name = f"{names[key]}_bias"
                tensors.append(Tensor(bias_name, (*mlp, module, "bias"), flat=True, **options))
        return tensors
    if c.num_experts is not None:
        tensors += linear(names["router"], (*mlp, "router"), 1, c.router_bias)
        for module in ("gate",) * c.gated + ("up", "down"):
            for i in range(c.num_experts):
                tensors += linear(names[module].format(i), (*mlp, module), 1, c.mlp_bias, expert=i)
        if c.shared_expert_size is not None:
            for module in ("gate",) * c.gated + ("up", "down"):
                tensors += linear(
                    names["shared"].format(module), (*mlp, "shared", module), 1, c.mlp_bias
                )
            tensors += linear(names["shared_gate"], (*mlp, "shared_gate"), 1, False)
        return tensors
    if "gate_up" in names:
        for i, module in enumerate(("gate", "up")):
            fused = Fused(1, (c.intermediate_size,) * 2, i)
            tensors += linear(names["gate_up"], (*mlp, module), 1, c.mlp_bias, fused=fused)
        return tensors + linear(names["down"], (*mlp, "down"), 1, c.mlp_bias)
    for module in ("gate",) * c.gated + ("up", "down"):
        tensors += linear(names[module], (*mlp, module), 1, c.mlp_bias)
    return tensors


def _linear(
    name: str, path: tuple[str, ...], inputs: int, bias: bool, **options: Any
) -> list[Tensor]:
    tensors = [Tensor(f"{name}.weight", (*path, "weight"), inputs=inputs, **options)]
    options.pop("transposed", None)
    return tensors + [Tensor(f"{name}.bias", (*path, "bias"), flat=True, **options)] * bias


def _norm(name: str, path: tuple[str, ...], bias: bool = False) -> list[Tensor]:
    tensors = [Tensor(f"{name}.weight", (*path, "scale"), flat=True)]
    return tensors + [Tensor(f"{name}.bias", (*path, "bias"), flat=True)] * bias
