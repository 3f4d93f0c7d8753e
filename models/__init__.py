"""Decoder models as pure functions of their parameters."""

from models.build import (
    BLOCK,
    ShardingFn,
    abstract_params,
    block_params,
    build,
    cast_params,
    count_params,
    init_blocks,
    init_boxed,
    init_params,
    is_boxed,
    layer_module,
    split_blocks,
)
from models.decoder import Decoder, DecoderConfig, LearnedPositions
from models.families import FAMILIES, family_config
from models.hf_saving import save_checkpoint
from models.huggingface import (
    Checkpoint,
    load_checkpoint,
    load_config,
    load_tokenizer,
    stored_dtype,
    stored_weights,
)
from models.layers import Attend
from models.presets import PRESETS, preset
from models.quantized import (
    WeightFormat,
    array_bytes,
    dequantize,
    dequantize_params,
    parse_weights,
    quantize,
    quantize_params,
)
from models.rope import Rope

__all__ = [
    "BLOCK",
    "FAMILIES",
    "PRESETS",
    "Attend",
    "Checkpoint",
    "Decoder",
    "DecoderConfig",
    "LearnedPositions",
    "Rope",
    "ShardingFn",
    "WeightFormat",
    "abstract_params",
    "array_bytes",
    "block_params",
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
    "layer_module",
    "load_checkpoint",
    "load_config",
    "load_tokenizer",
    "parse_weights",
    "preset",
    "quantize",
    "quantize_params",
    "save_checkpoint",
    "split_blocks",
    "stored_dtype",
    "stored_weights",
]
