"""Decoder models as pure functions of their parameters."""

from models.build import (
    ShardingFn,
    abstract_params,
    block_params,
    blocks_in,
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
from models.chat_template import end_of_turn
from models.decoder import (
    Transformer,
    apply_block,
    formats_of,
    layer_kinds,
    of_layers,
    output_matrix,
)
from models.decoder_config import DecoderConfig
from models.draft_vocab import with_draft_vocab
from models.eagle import EagleConfig, EagleHead
from models.families import FAMILIES, family_config
from models.gated_delta import DeltaNetShape
from models.hf_saving import save_checkpoint
from models.hf_tokenizer import load_tokenizer
from models.huggingface import (
    Checkpoint,
    is_quantized,
    load_checkpoint,
    load_config,
    matrix_formats,
    sampling_defaults,
    special_tokens,
    stored_dtype,
)
from models.layers import NEVER, Attend, LayerAttend, PassResult, in_every_layer
from models.mtp import MtpConfig
from models.positions import Alibi, LearnedPositions, Rope
from models.presets import PRESETS, preset
from models.quantized import (
    BLOCK,
    MatrixFormats,
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
    "NEVER",
    "PRESETS",
    "Alibi",
    "Attend",
    "Checkpoint",
    "DecoderConfig",
    "DeltaNetShape",
    "EagleConfig",
    "EagleHead",
    "LayerAttend",
    "LearnedPositions",
    "MatrixFormats",
    "MtpConfig",
    "PassResult",
    "Rope",
    "ShardingFn",
    "Transformer",
    "WeightFormat",
    "abstract_params",
    "apply_block",
    "block_params",
    "blocks_in",
    "blocks_of",
    "build",
    "cast_params",
    "count_params",
    "dequantize",
    "dequantize_params",
    "end_of_turn",
    "family_config",
    "formats_of",
    "in_every_layer",
    "init_blocks",
    "init_boxed",
    "init_params",
    "is_boxed",
    "is_quantized",
    "layer_kinds",
    "layer_module",
    "load_checkpoint",
    "load_config",
    "load_tokenizer",
    "matrix_formats",
    "of_layers",
    "output_matrix",
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
    "with_draft_vocab",
]
