"""Which tensors of a GGUF file a tensor of Hugging Face format has, and in which layout.

The names are those of llama.cpp's `tensor_mapping.py`, and the layouts those of its conversion.
"""

import re
from collections.abc import Collection, Mapping

import flax.traverse_util
import gguf

from models.build import abstract_params, build
from models.decoder_config import DecoderConfig
from models.eagle_checkpoints import tensors_of
from models.gguf.blocks import GgmlType
from models.gguf.metadata import ARCHITECTURES, MIXTRAL, ROPE_FREQS
from models.gguf.tensors import Experts, FileTensor, TiledHeads, Weight
from models.hf_tensors import Fused, Tensor, mismatch
from models.mtp import MtpConfig
from models.mtp_checkpoints import PREFIX as MTP_PREFIX

# Families whose q and k llama.cpp permutes.
PERMUTED_FAMILIES = ("llama", MIXTRAL, "smollm3", "granite")
# Names in llama.cpp's map of what has the scales of a router (Gemma 4).
ROUTER_SCALES = {"router.scale": "router.proj", "router.per_expert_scale": "experts.down_proj"}
# Families whose value heads of gated delta nets llama.cpp reorders.
TILED_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")
# The first tensor of a head for multi-token prediction, in a block of its own after the model's.
MTP_PROJECTION = re.compile(r"blk\.(\d+)\.nextn\.eh_proj\.weight")
MTP_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
EXPERT_INDEX = re.compile(r"experts\.\d+\.")  # in the name of a tensor of Hugging Face


def map_tensors(
    config: DecoderConfig, tensors: Mapping[str, FileTensor]
) -> dict[str, Weight | Experts]:
    """Returns the tensors of a config, by name in Hugging Face format.

    Raises ValueError with all missing, unexpected and wrongly shaped tensors of the file.
    """
    is_mtp = isinstance(config, MtpConfig)
    mtp_block = next(
        (int(match[1]) for match in map(MTP_PROJECTION.fullmatch, tensors) if match), None
    )
    num_blocks = config.num_layers if mtp_block is None else mtp_block + 1
    name_map = gguf.get_tensor_name_map(_model_arch(config.family), num_blocks)
    parameters = flax.traverse_util.flatten_dict(abstract_params(build(config))["params"])
    weights: dict[str, Weight | Experts] = {}
    problems, used = list[str](), {ROPE_FREQS}
    for tensor in tensors_of(config):
        if tensor.name in weights:  # of several parameters
            continue
        file_names = _file_names(tensor, name_map, tensors, mtp_block)
        used.update(file_names)
        if missing := [name for name in file_names if name not in tensors]:
            problems += [f"missing {name}" for name in missing]
            continue
        parameter_shape = parameters[tensor.path].value.shape
        shape, expected = tensor.stored_shape(parameter_shape), tensor.matrix_shape(parameter_shape)
        if tensor.experts is not None:
            expected = parameter_shape
        if tensor.expert is not None:
            expected = (parameter_shape[0], *expected)
        if tensor.stacked is not None:
            expected = shape
        sources = tuple(tensors[name] for name in file_names)
        for joined in [sources] if tensor.experts is None else zip(sources):
            found = (sum(source.shape[0] for source in joined), *joined[0].shape[1:])
            if _without_ones(found) != _without_ones(expected):
                name = " and ".join(source.name for source in joined)
                problems.append(f"{name} has shape {found}, expected {expected}")
        if tensor.experts is None:
            weights[tensor.name] = _weight(config, tensor, shape, *sources)
        else:
            weights[tensor.name] = Experts(shape, sources)
    shared_kv = [f"blk.{i}.attn_" for i, layer in enumerate(config.kv_sources) if layer is not None]
    used.update(f"{prefix}{name}.weight" for prefix in shared_kv for name in ("k", "v", "k_norm"))
    for name in tensors:
        if name not in used and name.startswith(f"blk.{mtp_block}.") == is_mtp:
            problems.append(f"unexpected {name}")
    if problems:
        raise mismatch("tensors", "the metadata", problems)
    return {name: _quantized(weight) for name, weight in weights.items()}


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without axes of size 1, of which llama.cpp drops some."""
    return tuple(size for size in shape if size != 1)


def _file_names(
    tensor: Tensor,
    name_map: gguf.TensorNameMap,
    available: Collection[str],
    mtp_block: int | None,
) -> list[str]:
    """Returns the names of the tensors of a file that a tensor of Hugging Face format has.

    Args:
      tensor: in Hugging Face format.
      name_map: llama.cpp's map.
      available: all names in the file.
      mtp_block: the block of the head for multi-token prediction; None: there is none.
    """
    module, _, suffix = tensor.name.removeprefix(MTP_PREFIX).rpartition(".")
    if tensor.name.startswith(MTP_PREFIX) and module in MTP_NAMES:
        return [f"blk.{mtp_block}.nextn.{MTP_NAMES[module]}.{suffix}"]
    mlp, _, module = tensor.name.partition(".router.")
    if scaled_module := ROUTER_SCALES.get(f"router.{module}"):
        return [f"{name_map.get_name(f'{mlp}.{scaled_module}')}.scale"]
    if tensor.experts is None:
        name = tensor.name.replace(f"{MTP_PREFIX}layers.0.", f"model.layers.{mtp_block}.")
        name = EXPERT_INDEX.sub("experts.", name).replace(".dt_bias", ".dt_proj.bias")
        suffix = "" if name.endswith((".weight", ".bias", ".A_log")) else ".weight"
        file_name = f"{name_map.get_name(name, ('.weight', '.bias'))}{suffix}"
        if ".ssm_in." in file_name and file_name not in available:
            # Newer files have two tensors, without groups.
            return [file_name.replace("ssm_in", half) for half in ("attn_qkv", "attn_gate")]
        return [file_name]
    stem = tensor.name.removesuffix("_bias")
    modules = (
        [stem.replace("gate_up", half) for half in ("gate", "up")] if "gate_up" in stem else [stem]
    )
    suffix = "weight" if stem == tensor.name else "bias"
    return [f"{name_map.get_name(module)}.{suffix}" for module in modules]


def _weight(
    config: DecoderConfig,
    tensor: Tensor,
    shape: tuple[int, ...],
    source: FileTensor,
    appended: FileTensor | None = None,
) -> Weight:
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    qkv_groups = None
    if isinstance(tensor.fused, Fused) and (config.family == "falcon" or appended is not None):
        qkv_groups = tensor.fused.groups, tensor.fused.sizes
    is_permuted = config.family in PERMUTED_FAMILIES
    permuted_heads = heads.get(tensor.name.split(".")[-2], 0) if is_permuted else 0
    is_norm = tensor.path[-1] == "scale" and "delta_net" not in tensor.path
    is_plus_one = config.norm == "rms_plus_one" and is_norm
    return Weight(
        shape=shape,
        source=source,
        permuted_heads=permuted_heads,
        qkv_groups=qkv_groups,
        transposed=tensor.transposed,
        expert=tensor.expert,
        shift=1.0 if is_plus_one else 0.0,
        is_negated_exp=tensor.path[-1] == "log_rate",
        appended=appended,
        tiled_heads=_tiled_heads(config, tensor),
    )


def _tiled_heads(config: DecoderConfig, tensor: Tensor) -> TiledHeads | None:
    """Returns the order of the value heads in a tensor; None: as in Hugging Face format."""
    shape = config.delta_net
    if config.family not in TILED_FAMILIES or shape is None or "delta_net" not in tensor.path:
        return None
    projection = tensor.path[2]
    if projection == "norm" or shape.key_heads == shape.value_heads:
        return None
    if projection == "out":
        return TiledHeads(shape, axis=1)
    has_keys = projection in ("q", "k", "v", "conv")
    return TiledHeads(shape, rows_before=2 * shape.key_heads * shape.key_dim if has_keys else 0)


def is_read_tiled(config: DecoderConfig, tensor: Tensor, type_name: str | None) -> bool:
    """Whether `GatedDeltaNet` reads a packed matrix in the order of `TiledHeads`."""
    shape = config.delta_net
    if shape is None or tensor.path[1:3] != ("delta_net", "out"):
        return False
    return shape.key_heads != shape.value_heads and shape.has_tiles(type_name)


def _quantized(weight: Weight | Experts) -> Weight | Experts:
    """Returns a tensor that stays quantized if its type can."""
    if isinstance(weight, Weight):
        is_matrix = len(weight.shape) == 2
        return weight._replace(block_format=weight.available_format if is_matrix else None)
    types = {source.tensor_type for source in weight.sources}
    return weight._replace(is_mxfp4=types == {GgmlType.MXFP4})


def _model_arch(family: str) -> gguf.MODEL_ARCH:
    family = "llama" if family == MIXTRAL else family
    architecture = next(name for name, known in ARCHITECTURES.items() if known == family)
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
