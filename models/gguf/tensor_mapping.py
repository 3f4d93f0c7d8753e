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
from models.gguf.blocks import Type
from models.gguf.metadata import ARCHITECTURES, MIXTRAL, ROPE_FREQS
from models.gguf.tensors import Experts, FileTensor, Tiles, Weight
from models.hf_tensors import Fused, Tensor, mismatch
from models.mtp import MtpConfig
from models.mtp_checkpoints import PREFIX as MTP

PERMUTED = ("llama", MIXTRAL, "smollm3", "granite")  # families whose q and k llama.cpp permutes
# Names in llama.cpp's map of what has the scales of a router (Gemma 4).
SCALED = {"router.scale": "router.proj", "router.per_expert_scale": "experts.down_proj"}
# Families whose value heads of gated delta nets llama.cpp reorders.
TILED = ("qwen3_5_text", "qwen3_5_moe_text")
# The first tensor of a head for multi-token prediction, in a block of its own after the model's.
HEAD = re.compile(r"blk\.(\d+)\.nextn\.eh_proj\.weight")
HEAD_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
EXPERT = re.compile(r"experts\.\d+\.")  # in the name of a tensor of Hugging Face


def map_tensors(
    config: DecoderConfig, tensors: Mapping[str, FileTensor]
) -> dict[str, Weight | Experts]:
    """Returns the tensors of a config, by name in Hugging Face format.

    Raises ValueError with all missing, unexpected and wrongly shaped tensors of the file.
    """
    of_head = isinstance(config, MtpConfig)
    head = next((int(match[1]) for match in map(HEAD.fullmatch, tensors) if match), None)
    blocks = config.num_layers if head is None else head + 1
    names = gguf.get_tensor_name_map(_arch(config.family), blocks)
    shapes = flax.traverse_util.flatten_dict(abstract_params(build(config))["params"])
    weights: dict[str, Weight | Experts] = {}
    problems, used = list[str](), {ROPE_FREQS}
    for tensor in tensors_of(config):
        if tensor.name in weights:  # of several parameters
            continue
        sources = _names(tensor, names, tensors, head)
        used.update(sources)
        if missing := [name for name in sources if name not in tensors]:
            problems += [f"missing {name}" for name in missing]
            continue
        parameter = shapes[tensor.path].value.shape
        shape, expected = tensor.stored_shape(parameter), tensor.matrix_shape(parameter)
        if tensor.experts is not None:
            expected = parameter
        if tensor.expert is not None:
            expected = (parameter[0], *expected)
        if tensor.stacked is not None:
            expected = shape
        stored = tuple(tensors[name] for name in sources)
        for parts in [stored] if tensor.experts is None else zip(stored):
            found = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            if _without_ones(found) != _without_ones(expected):
                name = " and ".join(part.name for part in parts)
                problems.append(f"{name} has shape {found}, expected {expected}")
        if tensor.experts is None:
            weights[tensor.name] = _weight(config, tensor, shape, *stored)
        else:
            weights[tensor.name] = Experts(shape, stored)
    unread = [f"blk.{i}.attn_" for i, source in enumerate(config.kv_sources) if source is not None]
    used.update(f"{start}{part}.weight" for start in unread for part in ("k", "v", "k_norm"))
    own = (name for name in tensors if name.startswith(f"blk.{head}.") == of_head)
    problems += [f"unexpected {name}" for name in own if name not in used]
    if problems:
        raise mismatch("tensors", "the metadata", problems)
    return {name: _quantized(weight) for name, weight in weights.items()}


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without axes of size 1, of which llama.cpp drops some."""
    return tuple(size for size in shape if size != 1)


def _names(
    tensor: Tensor,
    names: gguf.TensorNameMap,
    tensors: Collection[str],
    head: int | None,
) -> list[str]:
    """Returns the names of the tensors of a file that a tensor of Hugging Face format has.

    Args:
      tensor: in Hugging Face format.
      names: llama.cpp's map.
      tensors: the names in the file.
      head: the block of the head for multi-token prediction; None: there is none.
    """
    part, _, suffix = tensor.name.removeprefix(MTP).rpartition(".")
    if tensor.name.startswith(MTP) and part in HEAD_NAMES:
        return [f"blk.{head}.nextn.{HEAD_NAMES[part]}.{suffix}"]
    block, _, part = tensor.name.partition(".router.")
    if scaled := SCALED.get(f"router.{part}"):
        return [f"{names.get_name(f'{block}.{scaled}')}.scale"]
    if tensor.experts is None:
        name = tensor.name.replace(f"{MTP}layers.0.", f"model.layers.{head}.")
        name = EXPERT.sub("experts.", name).replace(".dt_bias", ".dt_proj.bias")
        suffix = "" if name.endswith((".weight", ".bias", ".A_log")) else ".weight"
        found = f"{names.get_name(name, ('.weight', '.bias'))}{suffix}"
        if ".ssm_in." in found and found not in tensors:  # in newer files two, without groups
            return [found.replace("ssm_in", name) for name in ("attn_qkv", "attn_gate")]
        return [found]
    stem = tensor.name.removesuffix("_bias")
    parts = [stem.replace("gate_up", x) for x in ("gate", "up")] if "gate_up" in stem else [stem]
    suffix = "weight" if stem == tensor.name else "bias"
    return [f"{names.get_name(part)}.{suffix}" for part in parts]


def _weight(
    config: DecoderConfig,
    tensor: Tensor,
    shape: tuple[int, ...],
    stored: FileTensor,
    after: FileTensor | None = None,
) -> Weight:
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    group = None
    if isinstance(tensor.fused, Fused) and (config.family == "falcon" or after is not None):
        group = tensor.fused.groups, tensor.fused.sizes
    is_permuted = config.family in PERMUTED
    permuted = heads.get(tensor.name.split(".")[-2], 0) if is_permuted else 0
    is_norm = tensor.path[-1] == "scale" and "delta_net" not in tensor.path
    is_shifted = config.norm == "rms_plus_one" and is_norm
    return Weight(
        shape,
        stored,
        permuted,
        group,
        tensor.transposed,
        tensor.expert,
        added=1.0 if is_shifted else 0.0,
        is_log=tensor.path[-1] == "log_rate",
        after=after,
        tiles=_tiles(config, tensor),
    )


def _tiles(config: DecoderConfig, tensor: Tensor) -> Tiles | None:
    """Returns the order of the value heads in a tensor; None: as in Hugging Face format."""
    shape = config.delta_net
    if config.family not in TILED or shape is None or "delta_net" not in tensor.path:
        return None
    part = tensor.path[2]
    if part == "norm" or shape.key_heads == shape.value_heads:
        return None
    if part == "out":
        return Tiles(shape, axis=1)
    has_keys = part in ("q", "k", "v", "conv")
    return Tiles(shape, first=2 * shape.key_heads * shape.key_dim if has_keys else 0)


def _quantized(weight: Weight | Experts) -> Weight | Experts:
    """Returns a tensor that stays quantized if its type can."""
    if isinstance(weight, Weight):
        is_matrix = len(weight.shape) == 2
        return weight._replace(kind=weight.whole_kind if is_matrix else None)
    types = {source.tensor_type for source in weight.sources}
    return weight._replace(is_mxfp4=types == {Type.MXFP4})


def _arch(family: str) -> gguf.MODEL_ARCH:
    family = "llama" if family == MIXTRAL else family
    architecture = next(name for name, known in ARCHITECTURES.items() if known == family)
    return next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
