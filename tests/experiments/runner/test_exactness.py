import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runner import exactness, teacher
from tests.magicjax import tiny as tiny_models

PROMPTS = np.arange(24, dtype=np.int32).reshape(3, 8)
PLAIN = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32)


@pytest.fixture
def logits(monkeypatch):
    """Replaces the target's passes, and records the texts that it reads."""
    read = []

    def last_hidden_states(model, tokens, count, *, in_float32):
        read.append(np.asarray(tokens)[0])
        return jnp.arange(tokens.shape[1])[None, -count:, None]  # the index of each token

    def unembed(model, hidden, *, in_float32):
        at = int(hidden.squeeze())
        return jnp.where(at == model.index, jnp.asarray(model.logits), jnp.nan)[None, None]

    monkeypatch.setattr(teacher, "last_hidden_states", last_hidden_states)
    monkeypatch.setattr(teacher, "unembed", unembed)
    return read


def target(**logits):
    values = np.zeros(16, np.float32)
    for name, value in logits.items():
        values[int(name[1:])] = value
    # New token 1 follows from the prompt, of 8 tokens, and new token 0.
    return SimpleNamespace(logits=values, dtype=np.dtype(np.float32), index=8, kv_bits=None)


def test_a_row_that_diverges_at_a_tie_is_exact(logits):
    found = PLAIN.copy()
    found[1, 1:] = [11, 0]
    match = exactness.compare(target(t5=100.0, t11=99.9999), PROMPTS, PLAIN, found)
    assert (match.exact, match.ties) == (1.0, 1)
    assert "new token 1: 11 instead of 5" in str(match.divergences[0])
    assert [text.tolist() for text in logits] == [[*PROMPTS[1], *PLAIN[1, :-1]]]


@pytest.mark.parametrize(
    "values",
    [
        {"t5": 100.0, "t11": 99.99},  # close, but not a tie
        {"t5": 100.0, "t6": 100.0, "t11": 3.0},  # a tie, but of other tokens
    ],
)
def test_a_row_that_diverges_elsewhere_is_wrong(logits, values):
    found = PLAIN.copy()
    found[1, 1] = 11
    match = exactness.compare(target(**values), PROMPTS, PLAIN, found)
    assert match.exact == pytest.approx(2 / 3)
    assert match.ties == 0
    assert "WRONG" in str(match.divergences[0])


def test_a_real_model_is_read_at_the_position_of_the_divergence(tiny):
    text = np.random.default_rng(0).integers(0, 64, (1, 12)).astype(np.int32)
    best = np.asarray(teacher.greedy_tokens(tiny, text))[0, 7]
    expected, found = text[:, 8:].copy(), text[:, 8:].copy()
    expected[0, 0], found[0, 0] = best, (best + 1) % 64
    (divergence,) = exactness.compare(tiny, text[:, :8], expected, found).divergences
    logits = np.asarray(teacher.logits(tiny, text))[0, 7]
    gap = (logits[best] - logits[found[0, 0]]) / np.abs(logits).max()
    assert divergence.margin == pytest.approx(gap, rel=1e-4)
    assert not divergence.is_tie


def test_sampled_texts_are_equal_or_wrong_and_never_tied():
    found = PLAIN.copy()
    found[2, 1] = 11
    match = exactness.compare(None, PROMPTS, PLAIN, found)
    assert (match.exact, match.ties) == (pytest.approx(2 / 3), 0)
    assert "row 2, new token 1: 11 instead of 8" in str(match.divergences[0])
    assert exactness.compare(None, PROMPTS, PLAIN, PLAIN).exact == 1.0
    with pytest.raises(ValueError, match="cannot compare"):
        exactness.compare(None, PROMPTS, PLAIN, PLAIN[:, :2])


@pytest.fixture(scope="module")
def rounded():
    """(a random model in bfloat16, the same weights in float32)."""
    model = tiny_models.model()
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    high = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    module = model.module.clone(dtype=jnp.bfloat16)
    return dataclasses.replace(model, module=module, params=low), dataclasses.replace(
        model, params=high
    )


def test_the_logits_of_a_16_bit_model_in_float32_are_those_of_its_weights(rounded):
    low, high = rounded
    text = np.random.default_rng(1).integers(0, 47, (1, 12)).astype(np.int32)
    hidden = teacher.last_hidden_states(low, text, text.shape[1], in_float32=True)
    found = teacher.unembed(low, hidden, in_float32=True)
    np.testing.assert_allclose(found, teacher.logits(high, text), rtol=1e-5, atol=1e-5)
    assert np.abs(found - teacher.logits(low, text)).max() > 1e-3


def test_a_16_bit_model_has_a_tie_where_rounding_can_exchange_two_tokens(rounded):
    low, high = rounded
    text = np.random.default_rng(1).integers(0, 47, (1, 128)).astype(np.int32)
    best = np.sort(teacher.logits(high, text)[0, :-1])[:, -2:]
    at = int((best[:, 1] - best[:, 0]).argmin())  # where the target can hardly decide
    prompt, expected = text[:, : at + 1], text[:, at + 1 :].copy()
    logits, own = (np.asarray(teacher.logits(model, text))[0, at] for model in (high, low))
    order, rounding = np.argsort(-logits), np.abs(logits - own).max()
    expected[0, 0] = order[0]
    ties = {}
    for token in (order[1], order[-1]):
        found = expected.copy()
        found[0, 0] = token
        match = exactness.compare(low, prompt, expected, found)
        ties[token] = bool(logits[order[0]] - logits[token] < 2 * rounding)
        assert (match.ties, match.exact) == (ties[token], ties[token])
    assert ties == {order[1]: True, order[-1]: False}
