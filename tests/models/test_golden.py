"""Logits equal Hugging Face's, on tiny random models of every family and feature."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import models

TOLERANCE = 2e-5  # of the largest logit; both sides compute in float32


def relative_error(found, expected):
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


def read(golden):
    expected = np.load(golden / "expected.npz")
    return models.load_checkpoint(golden), expected["tokens"], expected["logits"]


def test_logits_are_those_of_hugging_face(golden, logits_of, record_property):
    checkpoint, tokens, expected = read(golden)
    found = logits_of(checkpoint.module, checkpoint.params, tokens)
    error = relative_error(found, expected)
    record_property("relative_error", float(error))
    assert found.dtype == np.float32
    assert error < TOLERANCE


def test_every_tensor_matters(golden, logits_of):
    """Negative control: a missing or exchanged tensor changes the logits."""
    checkpoint, tokens, expected = read(golden)
    leaves, tree = jax.tree_util.tree_flatten_with_path(checkpoint.params)
    for i, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        values = [value for _, value in leaves]
        # A norm would undo a factor, but not a sign.
        values[i] = np.roll(leaf, 1, -1) if leaf.shape[-1] > 1 else -leaf
        error = relative_error(
            logits_of(checkpoint.module, jax.tree.unflatten(tree, values), tokens), expected
        )
        if checkpoint.config.rope is None and name.endswith("['k']['bias']"):
            # Without a rotation, a bias on keys shifts all scores of a query alike.
            assert error < TOLERANCE, name
        else:
            assert error > 20 * TOLERANCE, name


@pytest.mark.slow
def test_a_wrong_setting_is_caught(golden, logits_of):
    """Negative control: an ignored setting exceeds the tolerance."""
    checkpoint, tokens, expected = read(golden)
    config = checkpoint.config
    wrong = [(dataclasses.replace(config, norm_eps=1e-2), checkpoint.params)]
    if isinstance(config.positions, models.LearnedPositions):
        shifted = dataclasses.replace(config, max_positions=config.max_positions - 1)
        params = jax.tree.map(lambda leaf: leaf, checkpoint.params)
        table = params["params"]["position_embedding"]
        params["params"]["position_embedding"] = table[1:]  # as if the offset were one larger
        wrong.append((shifted, params))
    elif isinstance(config.positions, models.Alibi):
        other = models.Alibi(scaled=not config.positions.scaled)
        wrong.append((dataclasses.replace(config, positions=other), checkpoint.params))
    else:
        scaling = models.Rope(theta=config.rope.theta)
        other = models.Rope(theta=10 * config.rope.theta)
        rope = other if scaling == config.rope else scaling
        wrong.append((dataclasses.replace(config, positions=rope), checkpoint.params))
    if config.activation.startswith("gelu"):
        wrong.append((dataclasses.replace(config, activation="silu"), checkpoint.params))
    for name in ("attention_softcap", "logits_softcap", "window_positions", "query_scale"):
        if getattr(config, name) is not None:
            wrong.append((dataclasses.replace(config, **{name: None}), checkpoint.params))
    for name in ("embedding_multiplier", "residual_multiplier", "logits_divisor"):
        if getattr(config, name) != 1:
            wrong.append((dataclasses.replace(config, **{name: 1.0}), checkpoint.params))
    for name in ("value_norm", "layer_scalars"):
        if getattr(config, name):
            wrong.append((dataclasses.replace(config, **{name: False}), checkpoint.params))
    if config.rope is not None and config.rope.kind == "proportional":
        for other in ({"kind": "default"}, {"partial_rotary_factor": 1.0}):
            rope = dataclasses.replace(config.rope, **other)
            wrong.append((dataclasses.replace(config, positions=rope), checkpoint.params))
    if config.unrotated_layers:
        for layers in ((), tuple(range(config.num_layers))):
            other = dataclasses.replace(config, unrotated_layers=layers)
            wrong.append((other, checkpoint.params))
    if any(config.windows):
        for size in (config.sliding_window - 1, config.sliding_window + 1):
            shifted = dataclasses.replace(config, sliding_window=size)
            wrong.append((shifted, checkpoint.params))
    if config.num_experts is not None and not config.parallel_experts:  # a norm undoes a factor
        other = not config.normalize_experts
        wrong.append((dataclasses.replace(config, normalize_experts=other), checkpoint.params))
    if config.clip_qkv is not None:
        wrong.append((dataclasses.replace(config, clip_qkv=None), checkpoint.params))
    for config, params in wrong:
        found = logits_of(models.build(config), params, tokens)
        assert relative_error(found, expected) > 20 * TOLERANCE


def test_the_installed_hugging_face_agrees_and_reads_our_checkpoints(golden, logits_of, tmp_path):
    """The same comparison against the installed versions, in both directions."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint, tokens, _ = read(golden)
    tokens = (tokens[:, ::-1] + 1) % checkpoint.config.vocab_size
    found = logits_of(checkpoint.module, checkpoint.params, tokens)
    shutil.copytree(golden, tmp_path / "theirs")
    models.save_checkpoint(
        tmp_path / "ours", checkpoint.module, checkpoint.params, max_shard_bytes=20_000
    )
    for name in ("theirs", "ours"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, torch_dtype=torch.float32
        )
        with torch.no_grad():
            theirs = model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
        assert relative_error(found, theirs) < TOLERANCE, name
