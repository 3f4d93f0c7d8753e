"""Chunked, windowed attention equals attention with a dense mask."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runner import teacher
from tests.magicjax import recomputation
from tests.magicjax import tiny as small


def dense_mask(length, sinks, window):
    """Returns the view of a draft cache: sinks, the `window` previous tokens, the current token.

    With 8 tokens, 2 sinks and a window of 3, query 7 sees 0 1 . . 4 5 6 7.
    """
    query, key = np.arange(length)[:, None], np.arange(length)
    mask = key <= query
    if window is not None:
        mask &= (key < sinks) | (query - key <= window)
    return mask


def dense(q, k, v, mask):
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights, v)


def random_qkv(length):
    random = np.random.default_rng(0)
    q = random.normal(size=(2, length, 4, 8))
    k, v = random.normal(size=(2, 2, length, 2, 8))
    return q, k, v


CASES = [
    (8, 2, 3),
    (37, 4, 10),  # the last chunk is not full
    (64, 4, 12),
    (64, 0, 5),  # no sinks
    (64, 4, 1),
    (64, 20, 9),  # more sinks than a chunk holds
    (40, 4, 100),  # the window covers the text
    (50, 0, None),  # plain causal
    (5, 8, 2),  # fewer tokens than sinks
]


@pytest.mark.parametrize(("length", "sinks", "window"), CASES)
def test_windowed_attention_equals_attention_with_a_dense_mask(monkeypatch, length, sinks, window):
    monkeypatch.setattr(teacher, "CHUNK", 16)
    q, k, v = random_qkv(length)
    attention = teacher.windowed_attention(sinks, window)
    out, _ = attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
    expected = dense(q, k, v, dense_mask(length, sinks, window))
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)


def test_a_window_off_by_one_differs():
    q, k, v = random_qkv(64)
    attention = teacher.windowed_attention(4, 12)
    out, _ = attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
    for sinks, window in ((4, 11), (4, 13), (3, 12), (5, 12)):
        wrong = dense(q, k, v, dense_mask(64, sinks, window))
        assert np.abs(out - wrong).max() > 1e-3


@pytest.mark.slow
def test_greedy_tokens_and_logits_agree_with_a_pass_over_each_prefix(monkeypatch, tiny):
    monkeypatch.setattr(teacher, "CHUNK", 8)
    text = np.random.default_rng(1).integers(0, 64, (2, 21)).astype(np.int32)
    greedy = teacher.greedy_tokens(tiny, text)
    np.testing.assert_array_equal(greedy, teacher.logits(tiny, text).argmax(-1))
    for length in (1, 8, 13, 21):
        alone = teacher.logits(tiny, text[:, :length])[:, -1]
        within = teacher.logits(tiny, text)[:, length - 1]
        np.testing.assert_allclose(alone, within, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(greedy[:, length - 1], alone.argmax(-1))


@pytest.mark.parametrize("length", [8, 21])
def test_a_text_is_read_in_chunks_with_a_cache(monkeypatch, tiny, length):
    monkeypatch.setattr(teacher, "CHUNK", 8)
    text = np.random.default_rng(3).integers(0, 64, (1, length)).astype(np.int32)
    whole = teacher.logits(tiny, text)
    for count in {1, length // 2 or 1, length}:
        hidden = teacher.last_hidden_states(tiny, text, count)
        assert hidden.shape[1] == count
        found = teacher.unembed(tiny, hidden)
        np.testing.assert_allclose(found, whole[:, -count:], rtol=0, atol=1e-5)


def test_layers_with_states_read_the_whole_text(monkeypatch):
    monkeypatch.setattr(teacher, "CHUNK", 8)
    model = small.model("hybrid")
    text = np.random.default_rng(3).integers(0, small.VOCAB, (1, 21)).astype(np.int32)
    expected = recomputation.logits(model, text[0])
    tolerance = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(teacher.logits(model, text)[0], expected, rtol=0, atol=tolerance)
    hidden = teacher.last_hidden_states(model, text, 15)
    found = teacher.unembed(model, hidden)[0]
    np.testing.assert_allclose(found, expected[-15:], rtol=0, atol=tolerance)
