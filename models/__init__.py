"""Decoder models as pure functions of their parameters."""

from models.build import (
    BLOCK,
    Config,
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
from models.huggingface import (
    Checkpoint,
    load_checkpoint,
    load_config,
    load_tokenizer,
    save_checkpoint,
    stored_dtype,
)
from models.layers import Attend
from models.llama import Llama, LlamaConfig
from models.opt import Opt, OptConfig
from models.presets import PRESETS, preset
from models.rope import Rope

__all__ = [
    "BLOCK",
    "PRESETS",
    "Attend",
    "Checkpoint",
    "Config",
    "Llama",
    "LlamaConfig",
    "Opt",
    "OptConfig",
    "Rope",
    "ShardingFn",
    "abstract_params",
    "block_params",
    "build",
    "cast_params",
    "count_params",
    "init_blocks",
    "init_boxed",
    "init_params",
    "is_boxed",
    "layer_module",
    "load_checkpoint",
    "load_config",
    "load_tokenizer",
    "preset",
    "save_checkpoint",
    "split_blocks",
    "stored_dtype",
]
