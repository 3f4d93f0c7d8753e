"""Decoder models as pure functions of their parameters."""

from models.build import (
    BLOCK,
    ShardingFn,
    abstract_params,
    block_params,
    blocks_of,
    build,
    cast_params,
    count_params,
    init_blocks,
    init_boxed,
    init_params,
    is_boxed,
    layer_module,
    quantize_block,
    split_blocks,
)
from models.decoder import Decoder, DecoderConfig, of_layers
from models.eagle import EagleConfig, EagleHead
from models.families import FAMILIES, family_config
from models.hf_saving import save_checkpoint
from models.huggingface import (
    Checkpoint,
    is_quantized,
    load_checkpoint,
    load_config,
    load_tokenizer,
    sampling_defaults,
    special_tokens,
    stored_dtype,
    weight_format,
)
from models.layers import Attend, PassResult
from models.positions import Alibi, LearnedPositions, Rope
from models.presets import PRESETS, preset
from models.quantized import (
    WeightFormat,
    dequantize,
    dequantize_params,
    parse_weights,
    quantize,
    rounded_format,
)

__all__ = [
    "BLOCK",
    "FAMILIES",
    "PRESETS",
    "Alibi",
    "Attend",
    "Checkpoint",
    "Decoder",
    "DecoderConfig",
    "EagleConfig",
    "EagleHead",
    "LearnedPositions",
    "PassResult",
    "Rope",
    "ShardingFn",
    "WeightFormat",
    "abstract_params",
    "block_params",
    "blocks_of",
    "build",
    "cast_params",
    "count_params",
    "dequantize",
    "dequantize_params",
    "family_config",
    "init_blocks",
    "init_boxed",
    "init_params",
    "is_boxed",
    "is_quantized",
    "layer_module",
    "load_checkpoint",
    "load_config",
    "load_tokenizer",
    "of_layers",
    "parse_weights",
    "preset",
    "quantize",
    "quantize_block",
    "rounded_format",
    "sampling_defaults",
    "save_checkpoint",
    "special_tokens",
    "split_blocks",
    "stored_dtype",
    "weight_format",
]
