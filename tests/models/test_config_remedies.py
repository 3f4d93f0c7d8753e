"""What an error about a config.json asks for is done word for word, and gives the golden model.

`test_golden` compares the logits of the golden models with Hugging Face's.
"""

import json
import re
import shutil

import pytest

import models
from tests.magicjax import tiny as tiny_models
from tests.models.conftest import GOLDEN
from tests.models.test_huggingface import assert_same, edit_json

REMOVED = ...

LINEAR = {"rope_type": "linear", "factor": 4.0}
LONGROPE = json.loads((GOLDEN / "phi3_longrope" / "config.json").read_text())["rope_parameters"]
NESTED = json.loads((GOLDEN / "gemma3" / "config.json").read_text())["rope_parameters"]
FULL, SLIDING = "full_attention", "sliding_attention"
# Two spellings of the rotary settings of Gemma, of which one is wrong.
OLD_ROPES = {"rope_theta": 1000.0, "rope_local_base_freq": 50.0, "rope_scaling": LINEAR}
# The golden model, changes of its config, the error, and changes that it asks for.
CONFIGS = {
    "type": ("llama", {"hidden_size": "16"}, "correct config.json", [{"hidden_size": 16}]),
    "no value": ("llama", {"hidden_size": REMOVED}, "no default: add it", [{"hidden_size": 16}]),
    "null": (
        "llama",
        {"rms_norm_eps": None},
        "must be a number; without the key the family's default is used",
        [{"rms_norm_eps": 1e-6}, {"rms_norm_eps": REMOVED}],
    ),
    "model_type": (
        "llama",
        {"model_type": REMOVED},
        "it must be one of llama, mistral",
        [{"model_type": "llama"}],
    ),
    "architectures": (
        "llama",
        {"architectures": ["MyLlama"]},
        "for model_type='llama' it must be LlamaForCausalLM",
        [{"architectures": ["LlamaForCausalLM"]}],
    ),
    "a value that is not supported": (
        "llama",
        {"hidden_act": "gelu"},
        'it must be "silu" or "swish". Remove such a key only if',
        [{"hidden_act": "silu"}, {"hidden_act": "swish"}, {"hidden_act": REMOVED}],
    ),
    "values of JSON": (
        "llama",
        {"is_causal": False, "sliding_window": 5},
        "is_causal=false is not supported: it must be true; sliding_window=5 is not supported: it "
        "must be null. Remove such a key",
        [
            {"is_causal": True, "sliding_window": None},
            {"is_causal": REMOVED, "sliding_window": REMOVED},
        ],
    ),
    "lists of JSON": (
        "qwen3_moe",
        {"mlp_only_layers": [0]},
        "mlp_only_layers=[0] is not supported: it must be []. Remove",
        [{"mlp_only_layers": []}, {"mlp_only_layers": REMOVED}],
    ),
    "an alias": (
        "gpt2",
        {"hidden_size": 24},
        "n_embd=16 and hidden_size=24 are one setting: keep one of them",
        [{"hidden_size": REMOVED}],
    ),
    "a key with an alias": (
        "gpt2",
        {"n_embd": 24, "hidden_size": 16},
        "keep one of them",
        [{"n_embd": REMOVED}],
    ),
    "a wrong rope_scaling": (
        "llama_linear",
        {"rope_scaling": LINEAR | {"factor": 2.0}},
        "keep one of them",
        [{"rope_scaling": REMOVED}],
    ),
    "a wrong rope_parameters": (
        "llama_linear",
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 2.0}},
        "keep one of them",
        [{"rope_parameters": REMOVED}],
    ),
    "a kind of rope": (
        "llama_linear",
        {"rope_parameters": LINEAR | {"rope_type": "dynamic"}},
        "it must be one of default, linear, llama3, yarn",
        [{"rope_parameters": LINEAR}],
    ),
    "a rope without its factor": (
        "llama_linear",
        {"rope_parameters": {"rope_type": "linear"}},
        "lacks factor: add it",
        [{"rope_parameters": LINEAR}],
    ),
    "a rope of a part of a head": (
        "llama_linear",
        {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}},
        "it must be 1.0",
        [{"rope_parameters": LINEAR | {"partial_rotary_factor": 1.0}}],
    ),
    "ropes of kinds of layers": (
        "llama_linear",
        {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default"}}},
        "use those of one of them as rope_parameters",
        [{"rope_parameters": LINEAR}],
    ),
    "a rope of an odd part": (
        "phi3_longrope",
        {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.9}},
        "for 6, use 0.75",
        [{"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}}],
    ),
    "too few factors": (
        "phi3_longrope",
        {"rope_parameters": LONGROPE | {"short_factor": [1.0, 1.5]}},
        "short_factor has 2 elements: the rotation has 3 pairs, and needs one for each",
        [{"rope_parameters": LONGROPE}],
    ),
    "layers without the window": (
        "mistral_window",
        {"layer_types": [SLIDING, FULL]},
        "set sliding_window to null, or remove layer_types",
        [{"layer_types": REMOVED}],
    ),
    "a window of no layer": (
        "mistral",
        {"layer_types": [FULL] * 2, "sliding_window": 6},
        "set sliding_window to null, or remove layer_types",
        [{"sliding_window": None}],
    ),
    "no window": (
        "mistral",
        {"sliding_window": 0},
        "it must be 1 or more, or null for none",
        [{"sliding_window": None}],
    ),
    "an unknown layer": (
        "qwen3_window",
        {"layer_types": [FULL, "linear_attention", SLIDING]},
        f"every layer must have {FULL!r} or {SLIDING!r}",
        [{"layer_types": [FULL, SLIDING, SLIDING]}],
    ),
    "too few layer types": (
        "qwen3_window",
        {"layer_types": [FULL, SLIDING]},
        "has 2 entries, and num_hidden_layers is 3: correct one of them",
        [{"layer_types": [FULL, SLIDING, SLIDING]}],
    ),
    "too many layers": (
        "qwen3_window",
        {"num_hidden_layers": 4},
        "has 3 entries, and num_hidden_layers is 4: correct one of them",
        [{"num_hidden_layers": 3}],
    ),
    "a pattern": (
        "gemma3",
        {"layer_types": REMOVED, "_sliding_window_pattern": 0},
        "_sliding_window_pattern=0: it must be 1 or more",
        [{"_sliding_window_pattern": 3}],
    ),
    "a rope of no layer": (
        "gemma3",
        {"rope_parameters": NESTED | {"linear_attention": {}}},
        f"it must name {FULL}, {SLIDING}",
        [{"rope_parameters": NESTED}],
    ),
    "Gemma's wrong rope_scaling": (
        "gemma3",
        {"rope_scaling": LINEAR | {"factor": 8.0}},
        "keep one of them",
        [{"rope_scaling": REMOVED}],
    ),
    "Gemma's wrong rope_parameters": (
        "gemma3",
        OLD_ROPES | {"rope_parameters": NESTED | {FULL: LINEAR | {"factor": 8.0}}},
        "keep one of them",
        [{"rope_parameters": REMOVED}],
    ),
    "Gemma's theta": (
        "gemma3",
        OLD_ROPES | {"rope_parameters": REMOVED, "rope_local_base_freq": 0},
        "rope_local_base_freq=0.0: it must be above 0",
        [{"rope_local_base_freq": 50.0}],
    ),
    "a scale": (
        "gemma2",
        {"query_pre_attn_scalar": 0},
        "it must be above 0",
        [{"query_pre_attn_scalar": 12}],
    ),
    "a bound, by its key": (
        "gemma2",
        {"final_logit_softcapping": 0.0},
        "final_logit_softcapping=0.0: it must be a finite number above 0",
        [{"final_logit_softcapping": 3.0}],
    ),
    "an activation, by its key": (
        "gpt2",
        {"activation_function": "tanh"},
        "activation_function='tanh' is not supported: use silu or relu or gelu or gelu_new or",
        [{"activation_function": "gelu_new"}],
    ),
    "experts of a token": (
        "qwen3_moe",
        {"num_experts_per_tok": 6},
        "6 of 5 experts for each token: a token uses from 1 to num_experts",
        [{"num_experts_per_tok": 3}],
    ),
    "Falcon's norms": (
        "falcon_40b",
        {"num_ln_in_parallel_attn": 3},
        "a new architecture has parallel_attn=true and 1 or 2 norms, an old one 1",
        [{"num_ln_in_parallel_attn": 2}],
    ),
    "MPT's attention": (
        "mpt",
        {"attn_config": {"alibi": False}},
        "attn_config has settings that are not supported: alibi=false is not supported: it must "
        "be true",
        [{"attn_config": {"alibi": True}}, {"attn_config": {}}],
    ),
    "a draft vocabulary": (
        "llama",
        {"draft_vocab_size": 61},
        "smaller than vocab_size=61; omit it if the model has all tokens",
        [{"draft_vocab_size": REMOVED}],
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_an_error_about_a_config_asks_for_gives_the_model(case, tmp_path):
    name, damage, message, remedies = CONFIGS[case]
    right = models.load_checkpoint(GOLDEN / name)
    folder = shutil.copytree(GOLDEN / name, tmp_path / "model")
    edit_json(folder / "config.json", **damage)
    damaged = (folder / "config.json").read_text()
    for remedy in remedies:
        (folder / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match=re.escape(message)):
            models.load_checkpoint(folder)
        edit_json(folder / "config.json", **remedy)
        assert_same(models.load_checkpoint(folder), right)


def test_the_factor_of_an_even_part_of_a_head_rotates_it():
    """In floating point, 30 / 44 * 44 is less than 30."""
    for head_dim in range(4, 129, 4):
        for size in range(3, head_dim, 2):
            odd = (size + 0.5) / head_dim
            with pytest.raises(ValueError, match="use ") as error:
                tiny_models.config(
                    head_dim=head_dim, positions=models.Rope(partial_rotary_factor=odd)
                )
            factor = float(str(error.value).rpartition("use ")[2])
            assert models.Rope(partial_rotary_factor=factor).rotary_dim(head_dim) == size - 1
