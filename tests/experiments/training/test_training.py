"""The trainer: chunked attention is exact, and a killed run ends with the same weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from experiments.training import distill, trainer
from experiments.training.trainer import Phase, Schedule
from magicjax.kv_cache import state_layers
from models import DecoderConfig
from tests import reference_attention
from tests.magicjax import tiny

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=64,
    tie_embeddings=True,
)
STREAM = np.random.default_rng(0).integers(0, 40, 500).astype(np.int32)
SCHEDULE = Schedule(
    phases=(Phase(context=8, batch=2, steps=4), Phase(context=16, batch=1, steps=3)),
    learning_rate=0.02,
    warmup=2,
    checkpoint_every=2,
)


def same(a, b) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize("length", [5, 8, 13])
def test_chunked_attention_equals_one_dense_softmax(length, monkeypatch):
    monkeypatch.setattr(trainer, "QUERY_CHUNK", 4)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, length, heads, 4), np.float32) for heads in (4, 2, 2))
    out, _ = jax.jit(trainer.causal_attention)(q, k, v)
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / 2
    scores[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.slow
def test_gated_delta_nets_are_trained_as_the_recurrence_token_by_token(monkeypatch):
    """The loss and its gradient, over texts of more than one part of a chain."""
    monkeypatch.setattr(state_layers, "CHUNK", 16)
    module = models.build(tiny.config(**tiny.HYBRID, tie_embeddings=True))
    params = models.init_params(module, 0)
    windows = jnp.asarray(np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 41)), jnp.int32)

    def recurrent(params):
        tokens, positions = windows[:, :-1], jnp.broadcast_to(jnp.arange(40), (2, 40))
        attend = reference_attention.attend_of(module.config)
        hidden = module.apply(params, tokens, positions, attend)[0]
        log = jax.nn.log_softmax(module.apply(params, hidden, method="unembed"))
        return -jnp.take_along_axis(log, windows[:, 1:, None], -1).mean()

    def trained(params):
        return trainer.text_loss(module, params, windows)

    (found, gradient), (loss, expected) = (
        jax.jit(jax.value_and_grad(f))(params) for f in (trained, recurrent)
    )
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for one, two in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5, rtol=1e-3)
    assert all(np.abs(x).max() > 1e-6 for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sliding_window=8), "with sliding windows cannot be trained"),
        (dict(num_experts=4, experts_per_token=2), "with experts cannot be trained"),
        (dict(attention_softcap=5.0, attention_sinks=True), "capped scores and attention sinks"),
    ],
)
def test_models_that_cannot_be_trained_are_errors(changes, message):
    module = models.build(dataclasses.replace(CONFIG, **changes))
    with pytest.raises(ValueError, match=message):
        trainer.logits_of(module, None, jnp.zeros((1, 4), jnp.int32))


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    module = models.build(CONFIG)
    expected = trainer.train(module, STREAM, SCHEDULE, tmp_path / "whole")
    drawn = trainer.batches

    def killed_after_five(*arguments):
        for count, batch in enumerate(drawn(*arguments)):
            if count == 5:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(trainer, "batches", killed_after_five)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(module, STREAM, SCHEDULE, tmp_path / "killed")
    seen = []
    monkeypatch.setattr(trainer, "batches", lambda *a: seen.append(a[2]) or drawn(*a))
    assert same(trainer.train(module, STREAM, SCHEDULE, tmp_path / "killed"), expected)
    assert seen == [4]  # the newest checkpoint
    other = dataclasses.replace(SCHEDULE, seed=1)
    assert not same(trainer.train(module, STREAM, other, tmp_path / "other"), expected)


@pytest.mark.slow
def test_training_lowers_the_loss_and_keeps_its_initial_parameters(tmp_path):
    module = models.build(CONFIG)
    text = np.tile(np.arange(20, dtype=np.int32), 40)  # fully predictable
    schedule = Schedule((Phase(16, 4, 60),), 0.05, adam_learning_rate=0.03, warmup=5)
    initial = models.init_params(module, 0)
    trained = trainer.train(module, text, schedule, tmp_path, initial=initial)
    before, after = (trainer.evaluate(module, p, text, 16, 400) for p in (initial, trained))
    assert before > 3 and after < 1


def test_choices_are_the_greedy_tokens_and_are_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "CONTEXT", 8)
    module = models.build(CONFIG)
    params = models.init_params(module, 0)
    path = tmp_path / "labels.npy"
    chosen = distill.choices(module, params, STREAM[:20], path)
    for window in range(2):
        tokens = jnp.asarray(STREAM[8 * window : 8 * window + 8])[None]
        expected = trainer.logits_of(module, params, tokens).argmax(-1)[0]
        np.testing.assert_array_equal(chosen[8 * window : 8 * window + 8], expected)
    other = models.init_params(module, 1)
    np.testing.assert_array_equal(distill.choices(module, other, STREAM[:20], path), chosen)
    best = distill.ranked(module, params, STREAM[:20], 3)
    assert best.shape == (16, 3)
    np.testing.assert_array_equal(best[:, 0], chosen)
    logits = trainer.logits_of(module, params, jnp.asarray(STREAM[:8])[None])[0]
    np.testing.assert_array_equal(best[:8], np.argsort(-logits, -1)[:, :3])
    with pytest.raises(ValueError, match="3 tokens are fewer than a window of 8"):
        distill.choices(module, params, STREAM[:3])
