"""config.json is read as by Hugging Face; unsupported settings are errors."""

import dataclasses
import functools
import inspect
import json
import logging
import pathlib
import re

import pytest

import models
from models import hf_config_keys, hf_config_parts
from models.families import FAMILIES
from models.hf_config import read_config, text_decoder
from models.hf_config_writing import WRITERS, write_config
from tests.models.published_configs import NOISE, PUBLISHED, REFUSED

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 100,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4}
FALCON = {
    "model_type": "falcon",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MPT = {"model_type": "mpt", "vocab_size": 100, "d_model": 32, "n_heads": 4, "n_layers": 2}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
PHI3 = {
    **LLAMA,
    "model_type": "phi3",
    "architectures": None,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_scaling": LONGROPE,
}


def family_config(family, **more):
    own = {"model_type": family, "architectures": None, "num_key_value_heads": 2}
    return {**LLAMA, **own, **more}


@pytest.fixture(autouse=True)
def ignored(caplog):
    """Returns a function that returns the keys in the log's newest line, and clears the log."""
    hf_config_keys.log_ignored.cache_clear()
    caplog.set_level(logging.WARNING, "models.hf_config_keys")

    def keys():
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        hf_config_keys.log_ignored.cache_clear()
        return lines[-1].partition("does not read them: ")[2].split(", ") if lines else []

    return keys


@pytest.mark.parametrize("name", models.PRESETS)
def test_every_preset_survives_config_json(name):
    config = models.preset(name)
    assert read_config(write_config(config)) == config


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA,
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        family_config("mistral"),
        family_config("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2),
        family_config("qwen3", attention_bias=True),
        OPT,
        {**OPT, "_remove_final_layer_norm": True, "enable_bias": False},
        {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
        {**GPT2, "n_inner": 48},
        {**GPT2, "model_type": "gpt_bigcode", "activation_function": "gelu"},
        {**GPT2, "model_type": "gpt_bigcode", "multi_query": False},
        FALCON,
        {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {**MPT, "attn_config": {"clip_qkv": 6, "alibi": True}},
        family_config("starcoder2", use_bias=False, sliding_window=16),
        PHI3,
        family_config("gemma2", sliding_window=16, query_pre_attn_scalar=144, head_dim=8),
        family_config("gemma3_text", sliding_window=16, final_logit_softcapping=30.0),
        family_config("gemma4_text", sliding_window=16, hidden_size_per_layer_input=0),
        family_config("smollm3", no_rope_layers=[0, 1, 1, 0]),
        family_config("olmo2", attention_bias=True),
        family_config("olmo3", sliding_window=16, rope_theta=100.0),
        family_config("olmo3", layer_types=["full_attention"] * 4),
        family_config("granite", attention_multiplier=0.5, residual_multiplier=2),
        family_config("granite", attention_multiplier=8**-0.5, logits_scaling=3.0),
    ],
)
def test_every_switch_survives_config_json(raw):
    config = read_config(raw)
    assert read_config(write_config(config)) == config


def test_every_part_of_a_family_is_read_and_written():
    parts = {part for family in FAMILIES.values() for part in family.parts}
    assert parts == hf_config_parts.READERS.keys() == WRITERS.keys()


def test_defaults_are_those_of_the_family():
    config = read_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-6)
    assert (config.rope, config.tie_embeddings) == (models.Rope(), False)
    assert read_config(family_config("qwen3")).head_dim == 128
    raw = {**LLAMA, "model_type": "mistral", "architectures": None, "num_attention_heads": 16}
    assert read_config(raw).num_kv_heads == 8
    assert read_config(family_config("mistral", num_key_value_heads=None)).num_kv_heads == 4
    assert read_config(OPT).max_positions == 2048
    assert read_config(OPT).tie_embeddings
    assert [read_config(x).intermediate_size for x in (GPT2, FALCON, MPT)] == [128] * 3
    assert read_config({**LLAMA, "logit_scale": None}) == read_config(LLAMA)


@pytest.mark.parametrize(
    ("raw", "key"),
    [(LLAMA, "rms_norm_eps"), (GPT2, "tie_word_embeddings"), (OPT, "enable_bias")],
)
def test_null_is_an_error_where_a_setting_has_no_such_value(raw, key):
    with pytest.raises(ValueError, match=f"{key} is null: it must be "):
        read_config({**raw, key: None})


def test_null_is_false_where_that_is_the_default():
    nulls = dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"))
    assert read_config({**LLAMA, **nulls}) == read_config(LLAMA)


def test_the_scale_of_queries_is_written_as_an_integer():
    """As transformers demands: it cannot read the directory of Gemma 2 27B with 144.0."""
    config = read_config(family_config("gemma2", query_pre_attn_scalar=144, head_dim=128))
    written = write_config(config)["query_pre_attn_scalar"]
    assert written == 144 and isinstance(written, int)


def test_biases_are_where_the_family_has_them():
    def biases(raw):
        config = read_config(raw)
        return config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm

    assert biases(LLAMA) == (False, False, False, False)
    assert biases({**LLAMA, "attention_bias": True}) == (True, True, False, False)
    assert biases({**LLAMA, "mlp_bias": True}) == (False, False, True, False)
    assert biases(family_config("qwen2")) == (True, False, False, False)
    assert biases(family_config("qwen3")) == (False, False, False, True)


# Sliding windows


QWEN_WINDOW = family_config("qwen3", sliding_window=16, use_sliding_window=True)


@pytest.mark.parametrize(
    "raw, windows",
    [
        (family_config("mistral", sliding_window=16), (16,) * 4),
        (family_config("mistral", max_position_embeddings=9000), (4096,) * 4),  # the default
        (family_config("mistral", sliding_window=64), (None,) * 4),  # as long as the context
        (family_config("qwen2", sliding_window=16), (None,) * 4),
        ({**QWEN_WINDOW, "max_window_layers": 3}, (None, None, None, 16)),
        ({**QWEN_WINDOW, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        (
            {**QWEN_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (16, None, 16, None),
        ),
        (family_config("gemma2", sliding_window=16), (16, None, 16, None)),
        (family_config("gemma3_text", sliding_window=16), (16,) * 4),
        (
            family_config("gemma3_text", sliding_window=16, sliding_window_pattern=3),
            (16, 16, None, 16),
        ),
    ],
)
def test_layers_have_the_windows_of_hugging_face(raw, windows):
    config = read_config(raw)
    assert config.windows == windows
    assert config.max_positions == raw["max_position_embeddings"]
    assert read_config(write_config(config)) == config


MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, sliding_window=16)
GEMMA = family_config("gemma3_text", sliding_window=16)
FULL = {"rope_type": "default", "rope_theta": 1e6}
ROPES = {"full_attention": FULL, "sliding_attention": {"rope_type": "default"}}


def test_qwen3_moe_gives_all_layers_the_window_or_none():
    raw = family_config("qwen3_moe", max_window_layers=2, **MIXTURE)
    assert read_config(raw).windows == (None,) * 4
    config = read_config({**raw, "use_sliding_window": True})
    assert config.windows == (16,) * 4
    assert read_config(write_config(config)) == config


def test_rotary_settings_that_are_omitted_are_hugging_faces():
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    rope = read_config(family_config("gpt_oss", **experts)).rope
    assert (rope.kind, rope.factor, rope.theta, rope.truncate) == ("yarn", 32.0, 150000.0, False)
    assert read_config(family_config("gpt_oss", rope_parameters=None, **experts)).rope == rope
    half = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    assert read_config(family_config("gpt_oss", rope_scaling=half, **experts)).rope.factor == 16.0
    plain = family_config("gpt_oss", rope_parameters={"rope_type": "default"}, **experts)
    assert read_config(plain).rope == models.Rope(theta=150000.0)
    assert read_config(family_config("mixtral")).rope.theta == 1e6
    config = read_config({**GEMMA, "rope_parameters": ROPES})
    assert (config.rope.theta, config.window_positions) == (1e6, models.Rope(theta=1e4))
    only = read_config({**GEMMA, "layer_types": ["full_attention"] * 4})
    assert (only.windows, only.window_positions) == ((None,) * 4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0: it must be 1 or more"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.0: it must be above 0"),
        ({"rope_local_base_freq": 0}, "rope_local_base_freq=0.0: it must be above 0"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0: it must be a finite num"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"rope_parameters": {**ROPES, "linear": {}}}, "rope_parameters names .'linear'."),
        (
            {"rope_parameters": ROPES, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_scaling and rope_parameters disagree",
        ),
    ],
)
def test_values_of_gemma_that_would_be_wrong_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config({**GEMMA, **changes})


def test_layer_types_that_do_not_fit_are_errors():
    mixed = ["sliding_attention", "full_attention"] * 2
    for raw, message in (
        (family_config("mistral", sliding_window=16, layer_types=mixed), "all layers of"),
        ({**QWEN_WINDOW, "layer_types": mixed[:3]}, "has 3 entries, and num_hidden_layers is 4"),
        ({**QWEN_WINDOW, "layer_types": ["linear_attention"] * 4}, "'linear_attention', which is"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config(raw)


def test_gemma_has_two_rotary_settings_in_both_spellings():
    nested = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    for raw in ({"rope_parameters": nested}, old):
        config = read_config(family_config("gemma3_text", sliding_window=16, **raw))
        assert (config.rope.theta, config.rope.factor) == (1e6, 8.0)
        assert config.window_positions == models.Rope()
        assert read_config(write_config(config)) == config


# Rotary settings


def test_layers_without_rotation_are_those_of_hugging_face():
    def layers(**settings):
        return read_config(family_config("smollm3", **settings)).unrotated_layers

    assert layers() == layers(no_rope_layers=[1, 1, 1, 0]) == (3,)
    assert layers(no_rope_layer_interval=2) == (1, 3)
    assert layers(no_rope_layer_interval=2, no_rope_layers=[1] * 4) == ()
    for settings, message in (
        (
            {"no_rope_layers": [1, 0]},
            r"no_rope_layers=\[1, 0\]: it must have a 1 for each of the 4",
        ),
        ({"no_rope_layers": [1, 1, 2, 0]}, "and a 0 for each without"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0: it must be 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            layers(**settings)


def test_only_the_full_layers_of_olmo_3_have_the_scaling():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    kinds = {
        "full_attention": {**yarn, "rope_theta": 5.0},
        "sliding_attention": {"rope_theta": 5.0},
    }
    old = family_config("olmo3", rope_theta=5.0, rope_scaling=yarn)
    new = family_config("olmo3", rope_parameters=kinds)
    assert read_config(old) == read_config(new)
    config = read_config(old | {"sliding_window": 16})
    assert (config.rope.kind, config.window_positions) == ("yarn", models.Rope(theta=5.0))
    assert config.windows == (16, 16, 16, None)
    with pytest.raises(ValueError, match="rope_parameters has the settings of all layers"):
        read_config(family_config("olmo3", rope_parameters=yarn))


def test_yarn_without_an_original_length_uses_the_context():
    raw = {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    config = read_config(raw)
    assert config.rope.original_max_positions == 64
    assert config.max_positions == 256


def test_lengths_of_scaled_rotary_embeddings():
    """A model of YaRN reaches its scaled length; one of LongRoPE its original length."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_config({**LLAMA, "rope_scaling": yarn}).max_positions == 256
    ratio = {**yarn, "factor": None, "original_max_position_embeddings": 16}
    assert read_config({**LLAMA, "rope_scaling": ratio}).rope.factor == 4.0
    llama3 = {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4}
    raw = {**LLAMA, "original_max_position_embeddings": 32, "rope_scaling": llama3}
    assert read_config(raw).rope.original_max_positions == 32
    config = read_config(PHI3)
    assert (config.max_positions, config.rope.factor) == (64, 4.0)
    assert config.rope.partial_rotary_factor == 0.75
    assert write_config(config)["max_position_embeddings"] == 256
    old = {**PHI3, "rope_scaling": {**LONGROPE, "type": "su"}}  # the name in older files
    assert read_config(old) == config


@pytest.mark.parametrize(
    "kind, message",
    [
        ("llama3", "rope kind 'llama3' needs original_max_positions"),
        ("yarn", "rope kind 'yarn' needs original_max_positions"),
        ("su", "rope kind 'su' is not supported: it must be one of"),
    ],
)
def test_a_rope_without_its_settings_is_an_error(kind, message):
    with pytest.raises(ValueError, match=message):
        models.Rope(kind=kind)


@pytest.mark.parametrize(
    "key, settings, message",
    [
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "type 'dynamic', which is not"),
        ("rope_scaling", {"type": "linear"}, "of type 'linear' lacks factor"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor, high"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which is"),
        ("rope_parameters", {"full_attention": {}}, "has settings of full_attention, and all lay"),
    ],
)
def test_rotary_settings_that_are_not_supported_are_errors(key, settings, message):
    with pytest.raises(ValueError, match=message):
        read_config({**LLAMA, key: settings})


def test_two_spellings_that_disagree_are_an_error():
    raw = {**LLAMA, "rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "default"}}
    with pytest.raises(ValueError, match="rope_scaling and rope_parameters disagree"):
        read_config(raw)
    assert read_config({**raw, "rope_theta": 5.0}).rope.theta == 5.0


# What cannot be honoured


@pytest.mark.parametrize(
    "raw, message",
    [
        ({**LLAMA, "model_type": "gemma"}, "model_type='gemma' is not supported: it must be one"),
        (
            family_config("granite", logits_scaling=0),
            "logits_scaling=0: it must be a finite number",
        ),
        ({**LLAMA, "hidden_act": "gelu"}, 'hidden_act="gelu" is not supported: it must be "silu"'),
        (
            {**LLAMA, "hidden_act": "gelu", "is_causal": False},
            r'hidden_act="gelu".*is_causal=false.*Remove such a key',
        ),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, 'quantization_config={"bits": 4} is not'),
        (
            {**GPT2, "hidden_size": 48},
            "n_embd=32 and hidden_size=48 are one setting: keep one of them",
        ),
        (
            family_config("qwen2", layer_types=["chunked_attention"] * 4),
            "layer_types names 'chunked_attention'",
        ),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "lacks 'hidden_size'"),
        ({**MPT, "attn_config": {"alibi": False}}, "attn_config has .*alibi=false"),
        ({**MPT, "attn_config": {"softmax_scale": 0.1}}, "attn_config has .*softmax_scale=0.1"),
        ({**PHI3, "rope_scaling": {"type": "longrope"}}, "lacks short_factor, long_factor"),
        (
            {**LLAMA, "num_key_value_heads": 3},
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
        ),
    ],
)
def test_unsupported_settings_are_errors(raw, message):
    with pytest.raises(ValueError, match=message):
        read_config(raw)


@pytest.mark.parametrize(
    "raw, message",
    [
        ({**LLAMA, "hidden_size": "64"}, "hidden_size='64' must be an integer: correct config"),
        ({**LLAMA, "num_hidden_layers": 2.0}, "num_hidden_layers=2.0 must be an integer"),
        ({**LLAMA, "tie_word_embeddings": "true"}, "tie_word_embeddings='true' must be true or"),
        ({**LLAMA, "rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a number"),
        ({**LLAMA, "rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object"),
        ({**PHI3, "partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0 rotates 0 elements"),
        ({**MPT, "attn_config": "torch"}, "attn_config='torch' must be an object"),
    ],
)
def test_values_of_another_type_are_errors(raw, message):
    with pytest.raises(ValueError, match=message):
        read_config(raw)


@pytest.mark.parametrize("key", ["torch_dtype", "initializer_range", "pretraining_tp", "auto_map"])
def test_keys_without_effect_are_ignored(key):
    assert read_config({**LLAMA, key: 1}) == read_config(LLAMA)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"qkv_bias": True}, "family='llama' cannot express qkv_bias=True"),
        ({"family": "opt"}, "family='opt' cannot express .*positions=Rope.*, norm='rms'"),
    ],
)
def test_a_config_that_its_family_cannot_express_is_an_error(change, message):
    config = dataclasses.replace(read_config(LLAMA), **change)
    with pytest.raises(ValueError, match=message):
        write_config(config)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ({"medusa_num_heads": 5, "base_model_name_or_path": "lmsys/vicuna-7b"}, "medusa"),
        ({**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}, "eagle"),
        ({"model_type": "mlp_speculator", "n_predict": 3}, "mlp_speculator"),
    ],
)
def test_a_drafter_that_reads_hidden_states_is_named(raw, kind):
    with pytest.raises(ValueError, match=f"a drafter of kind {kind}, .*draft with a small model"):
        read_config(raw)


# Files of published models


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name, ignored):
    """Their noise changes nothing, and most have a preset with the same values."""
    raw = PUBLISHED[name]
    config = read_config(text_decoder(NOISE | raw))
    logged = ignored()
    assert config == read_config(text_decoder(raw))
    if name in models.PRESETS:
        assert config == models.preset(name)
    if "text_config" not in raw:  # whose noise is not in the settings of the text
        new = {"transformers.js_config", "unsloth_version"}
        assert set(logged) == new.union(ignored())


def test_published_files_are_of_every_family():
    families = [text_decoder(raw)["model_type"] for raw in PUBLISHED.values()]
    assert set(families) == set(FAMILIES)


@pytest.mark.parametrize(("name", "change"), REFUSED)
def test_a_published_file_with_an_unsupported_setting_is_refused(name, change):
    with pytest.raises(ValueError, match=re.escape(next(iter(change)))):
        read_config(text_decoder(PUBLISHED[name]) | change)


def test_unknown_keys_are_ignored_with_one_line(ignored, caplog):
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    plain = {**LLAMA, "rope_scaling": rope}
    raw = {**plain, "rms_norm_epsilon": 1.0, "logit_scale": 2.0, "unused": None}
    raw["rope_scaling"] = rope | {"attn_factor": 1.5}
    assert read_config(raw) == read_config(raw) == read_config(plain)
    assert len(caplog.records) == 1
    assert ignored() == ["attn_factor of rope_scaling", "logit_scale", "rms_norm_epsilon"]
    read_config({**MPT, "attn_config": {"rotary": True}})
    assert ignored() == ["rotary of attn_config"]


def test_each_file_with_unknown_keys_has_one_line_that_names_it(tmp_path, caplog):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | {"logit_scale": 2.0}))
    for name in "aabab":
        models.load_config(tmp_path / name)
    lines = [record.getMessage() for record in caplog.records]
    found = [line.partition(" has settings that are ignored")[0] for line in lines]
    assert found == [str(tmp_path / name / "config.json") for name in "ab"]


def test_aliases_are_read_as_the_keys_that_they_stand_for(ignored):
    raw = {key: value for key, value in GPT2.items() if key != "n_embd"}
    assert read_config({**raw, "hidden_size": 32}) == read_config({**GPT2, "hidden_size": 32})
    experts = dict(num_experts_per_tok=2, num_local_experts=4)
    assert read_config(family_config("qwen3_moe", **experts)).num_experts == 4
    assert ignored() == []


# Attributes that are no keys of a text decoder's config.json.
NO_KEYS = {
    *("_is_quantized", "get_text_config"),
    *("image_token_id", "mm_tokens_per_image", "text_config", "video_token_id", "vision_config"),
    *("audio_config", "audio_token_id"),
}


@functools.cache
def declared(family):
    """Returns the keys that transformers' config class declares, or its model reads."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]
    fields = {field.name for field in dataclasses.fields(config)}
    shared = pathlib.Path(transformers.__file__).parent
    sources = [shared / "cache_utils.py", shared / "masking_utils.py"]
    sources += pathlib.Path(inspect.getfile(config)).parent.glob("modeling_*.py")
    read = {
        key
        for source in sources
        for key in re.findall(r'\bconfig(?:\.|, ")(\w+)', source.read_text(encoding="utf-8"))
    }
    others = vars(inspect.getmodule(config)).items()
    encoders = [x for name, x in others if name.endswith(("VisionConfig", "AudioConfig"))]
    read -= {field.name for x in encoders for field in dataclasses.fields(x)} - fields
    members = {name: inspect.getattr_static(config, name) for name in dir(config)}
    computed = {n for n, x in members.items() if isinstance(x, property) and x.fset is None}
    return (fields | set(config.attribute_map) | read) - computed - NO_KEYS


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_transformers_reads_is_ignored_as_unknown(family, ignored):
    texts = map(text_decoder, PUBLISHED.values())
    raw = next(text for text in texts if text["model_type"] == family)
    keys = declared(family)
    raw = {"model_type": family} | {key: value for key, value in raw.items() if key in keys}
    read_config(raw)
    unknown = []
    for key in sorted(keys):
        try:
            read_config(raw | {key: object()})
        except (ValueError, TypeError):
            pass  # the key is read
        unknown += ignored()
    assert unknown == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_is_refused_that_transformers_does_not_read(family):
    by_others = {"attn_output_gate"}  # of Qwen3.5's files, which transformers takes for true
    assert set(FAMILIES[family].fixed) - by_others <= declared(family)


def test_no_setting_of_positions_or_attention_is_ignored_as_unknown():
    from transformers import PreTrainedConfig, modeling_rope_utils
    from transformers.models.mpt.configuration_mpt import MptAttentionConfig

    source = inspect.getsource(modeling_rope_utils)
    rope = set(re.findall(r'rope_parameters(?:_dict)?(?:\.get\(|\[)"(\w+)"', source))
    assert rope >= {"factor", "beta_fast", "mscale"}
    assert rope - {"rope_theta", "rope_type", "type"} <= set(hf_config_parts.ROPE_KEYS)
    own = {field.name for field in dataclasses.fields(MptAttentionConfig)}
    own -= {field.name for field in dataclasses.fields(PreTrainedConfig)}
    known = {"clip_qkv", *hf_config_parts.ATTN_CONFIG, *hf_config_parts.ATTN_IGNORED}
    assert own <= known | hf_config_keys.HARMLESS
