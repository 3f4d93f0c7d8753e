"""The keys of config.json: their types, and a reader that records which of them were read."""

import functools
import json
import logging
import typing
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

# Keys without effect on the forward pass at inference.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path
    _num_labels activation_dropout add_cross_attention architectures attention_dropout
    attention_softmax_in_fp32 attn_implementation attn_pdrop auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dropout dtype early_stopping emb_pdrop
    embd_pdrop embedding_dropout encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout id2label inference_runner init_std initializer_range
    is_decoder label2id layerdrop length_penalty max_batch_size max_length max_sequence_length
    min_length n_ctx no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_projection output_scores
    pad_key_length pad_token_id pre_allocate_kv_cache prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values reorder_and_upcast_attn repetition_penalty resid_pdrop
    residual_dropout return_dict return_dict_in_generate scale_attention_softmax_in_fp32
    sep_token_id summary_activation summary_first_dropout summary_last_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache use_mrope
    validate_runner_input
    """.split()
)
# Keys of which only some values are supported by families that do not read them, and those values:
# of a list, every entry must be one.
FIXED: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "kv_sharing_modes": (None,),
    "layer_types": ("full_attention",),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": ({},),
    "quantization_config": (None,),
    "sliding_window": (None,),
}
# Fields of `DeltaNetShape` by their keys.
DELTA_NET_KEYS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv_width",
}


# The types of other keys than those of a field of `DecoderConfig`.
KEY_TYPES: dict[str, type] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "attn_config"), dict),
    "per_layer_config": dict,
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "clip_qkv"), float),
    **dict.fromkeys(("rope_local_base_freq", "query_pre_attn_scalar"), float),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window"), int),
    **dict.fromkeys(("max_window_layers", "num_kv_heads", "num_ln_in_parallel_attn"), int),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), int),
    **dict.fromkeys(("full_attention_interval", *DELTA_NET_KEYS), int),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), int),
    **dict.fromkeys(("moe_intermediate_size", "num_experts", "top_k_experts"), int),
    "enable_moe_block": bool,
    "vocab_size_per_layer_input": int,
    **dict.fromkeys(("use_sliding_window", "_remove_final_layer_norm", "multi_query"), bool),
    **dict.fromkeys(("alibi", "new_decoder_architecture", "parallel_attn"), bool),
    **dict.fromkeys(("layer_types", "no_rope_layers"), list),
    "attention_multiplier": float,
    "no_rope_layer_interval": int,
}
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
TYPE_NAMES |= {dict: "an object", list: "an array"}


def json_types(settings: type) -> dict[str, type]:
    """Returns the type of each field in JSON; fields may also be null."""
    hints = typing.get_type_hints(settings)  # such as int, or `int | None`, or tuple[float, ...]
    types = {name: (*typing.get_args(hint), hint)[0] for name, hint in hints.items()}
    return types | {n: list for n, hint in hints.items() if typing.get_origin(hint) is tuple}


def check_type(name: str, value: Any, expected: type, file: str = "config.json") -> None:
    """Raises ValueError unless a value of a file has a type."""
    accepted = {float: (int, float), list: (list, tuple)}.get(expected, expected)
    if not isinstance(value, accepted) or (isinstance(value, bool) and expected is not bool):
        raise ValueError(f"{name}={value!r} must be {TYPE_NAMES[expected]}: correct {file}")


@functools.cache
def log_ignored(
    file: str, keys: tuple[str, ...], reason: str = "transformers does not read them"
) -> None:
    """Logs the keys of a file that have no effect, once while they are the same."""
    logger.warning("%s has settings that are ignored, as %s: %s", file, reason, ", ".join(keys))


class ConfigReader:
    """Settings of a file, with a record of the keys that were read, to check the others.

    Attributes:
      read: the keys that were read.
      unknown: the settings without effect that were found so far.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        defaults: Mapping[str, Any],
        fixed: Mapping[str, tuple[Any, ...]],
        ignored: Sequence[str] = (),
        rope_kinds: tuple[str, ...] = (),
        name: str = "config.json",
    ):
        self.raw, self.defaults, self.fixed = raw, defaults, fixed
        self.ignored, self.rope_kinds, self.name = HARMLESS.union(ignored), rope_kinds, name
        self.read: set[str] = set()
        self.unknown: list[str] = []

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Returns the value; an omitted key has the family's default, and null is `otherwise`."""
        self.read.add(key)
        value = self.raw[key] if key in self.raw else self.defaults.get(key)
        if value is not None and key in KEY_TYPES:
            check_type(key, value, KEY_TYPES[key])
        return otherwise if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.name} lacks {key!r}, which has no default: add it")
        return value

    def check_unread(self) -> None:
        """Raises ValueError for values that are not supported; adds others to `unknown`."""
        problems = []
        for key, value in sorted(self.raw.items()):
            if value is None or key in self.read:
                continue
            if key in self.fixed:
                allowed = self.fixed[key]
                entries = value if isinstance(value, list) else [value]
                if value not in allowed and not all(entry in allowed for entry in entries):
                    values = " or ".join(dict.fromkeys(map(json.dumps, allowed)))
                    given = json.dumps(value)
                    problems.append(f"{key}={given} is not supported: it must be {values}")
            elif key not in self.ignored:
                self.unknown.append(key)
        if problems:
            raise ValueError(
                f"{self.name} has settings that are not supported: "
                + "; ".join(problems)
                + ". Remove such a key only if the model computes the same without it"
            )
