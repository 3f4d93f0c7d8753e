"""Gemma 4: heads of two sizes, values that are keys, and what wrong rules would compute."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.tree_util import Partial

import models
from models.hf_config import read_config, text_decoder
from tests.models.conftest import GOLDEN
from tests.models.published_configs import PUBLISHED
from tests.models.test_golden import TOLERANCE, read, relative_error
from tests.reference_attention import attend_of

DENSE, SHARED = GOLDEN / "gemma4", GOLDEN / "gemma4_shared"


def logits_with(checkpoint, tokens, change=None):
    """Logits, with (q, k, v) of each layer without a window changed before its attention."""
    config, right = checkpoint.config, attend_of(checkpoint.config)

    def attend(layer):
        if change is None or config.slides[layer]:
            return right(layer)
        return Partial(lambda q, k, v: right(layer)(*change(q, k, v)))

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = checkpoint.module.apply(checkpoint.params, tokens, positions, attend)
    return checkpoint.module.apply(checkpoint.params, hidden, method="unembed")


@pytest.mark.slow
def test_values_are_keys_before_their_norm_and_rotation():
    """Negative control: values that are the final keys, as a cache without values would have."""
    checkpoint, tokens, expected = read(DENSE)
    assert relative_error(logits_with(checkpoint, tokens), expected) < TOLERANCE
    found = logits_with(checkpoint, tokens, lambda q, k, v: (q, k, k))
    assert relative_error(found, expected) > 20 * TOLERANCE


@pytest.mark.parametrize("golden", [DENSE, SHARED], ids=lambda path: path.name)
def test_float64_logits_are_those_of_hugging_face(golden):
    with jax.enable_x64(True):
        checkpoint = models.load_checkpoint(golden, "float64")
        _, tokens, expected = read(golden)
        found = logits_with(checkpoint, tokens)
        assert found.dtype == np.float64
        assert relative_error(found, expected) < TOLERANCE


def test_layers_that_share_keys_and_values_read_those_of_their_kind(monkeypatch):
    """Negative control: the first layer of a kind, and the layer before."""
    checkpoint, tokens, expected = read(SHARED)
    assert checkpoint.config.kv_sources == (None, None, None, 2, 1)
    assert relative_error(logits_with(checkpoint, tokens), expected) < TOLERANCE
    wrong = property(lambda config: (None, None, None, 0, 1))
    monkeypatch.setattr(models.DecoderConfig, "kv_sources", wrong)
    assert relative_error(logits_with(checkpoint, tokens), expected) > 20 * TOLERANCE


@pytest.mark.parametrize("change", [{"double_shared_mlp": False}, {"layer_input_size": None}])
def test_wrong_layers_do_not_have_the_tensors_of_the_file(change):
    config = models.load_config(SHARED)
    wrong = dataclasses.replace(config, **change)
    assert models.count_params(wrong) < models.count_params(config)


def test_the_tensors_that_shared_layers_do_not_read_may_be_in_the_file(tmp_path):
    """As in the published files, which also have those of images and sound."""
    tensors = safetensors.numpy.load_file(SHARED / "model.safetensors")
    named = {f"model.language_model.{n.removeprefix('model.')}": x for n, x in tensors.items()}
    unread = ("k_proj", "v_proj", "k_norm", "v_norm")
    names = [f"language_model.layers.{i}.self_attn.{part}" for part in unread for i in (3, 4)]
    names += ["vision_tower.x", "audio_tower.x", "embed_vision.x", "embed_audio.x"]
    named |= {f"model.{name}.weight": np.zeros(3, np.float32) for name in names}
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    text = json.loads((SHARED / "config.json").read_text())
    raw = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, expected = models.load_checkpoint(tmp_path), models.load_checkpoint(SHARED)
    assert found.module == expected.module
    for one, other in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma-4-31b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma-4-31b", {"per_layer_config": {"3": {"head_dim": 128}}}, "of the layers"),
        ("gemma-4-31b", {"per_layer_config": {"59": {"head_dim": 128}}}, "of the layers"),
        ("gemma-4-e2b", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9 is not"),
        ("gemma-4-e2b", {"num_kv_shared_layers": 32}, "none of the first 3 layers is one without"),
        ("gemma-4-e2b", {"num_kv_shared_layers": 35}, "it must be from 0 to 34"),
    ],
)
def test_settings_that_are_not_supported_are_errors(name, change, message):
    with pytest.raises(ValueError, match=message):
        read_config({**text_decoder(PUBLISHED[name]), **change})


def test_what_the_files_of_e2b_omit_has_the_defaults_of_hugging_face():
    raw = {**text_decoder(PUBLISHED["gemma-4-e2b"])}
    for key in ("hidden_size_per_layer_input", "rope_parameters", "global_head_dim", "head_dim"):
        del raw[key]
    assert read_config(raw) == models.preset("gemma-4-e2b")
