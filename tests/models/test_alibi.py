"""ALiBi: the slopes are Hugging Face's, and the added elements give the biased attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.positions import ALIBI_POSITIONS, Alibi, add_biases, slopes_of
from tests.models.conftest import attend_causally

with_biases = jax.jit(add_biases, static_argnums=5)


@pytest.mark.parametrize("scaled", [False, True])
def test_attention_to_longer_keys_is_that_with_biases(scaled):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 7, heads, 6), np.float32) for heads in (6, 2, 2))
    # Two rows at different positions, around a multiple of 256.
    positions = np.arange(7) + np.array([[3], [253]])
    slopes, attend = slopes_of(6), jax.jit(attend_causally(0))
    long = with_biases(q, k, v, positions, np.asarray(slopes, np.float32), Alibi(scaled))
    found = np.asarray(attend(*long)[0])
    assert np.all(found[..., 6:] == 0)

    keys, values = (np.repeat(x, 3, 2) for x in (k, v))
    distance = positions[:, None, None, :] - positions[:, None, :, None]
    scores = np.einsum("bthd,bshd->bhts", q, keys) / np.sqrt(6)
    scores = scores + slopes[:, None, None] * distance / (np.sqrt(6) if scaled else 1)
    scores = np.where(distance > 0, -np.inf, scores)
    expected = np.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), values)
    np.testing.assert_allclose(found[..., :6], expected, atol=3e-5)
    without, _ = attend(q, k, v)
    assert np.abs(without - expected).max() > 0.1  # control: biases matter


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_position_is_exact_in_every_dtype(dtype):
    positions = np.arange(ALIBI_POSITIONS)[None]
    zeros = np.zeros((1, ALIBI_POSITIONS, 1, 1), jnp.dtype(dtype))
    _, k, _ = with_biases(zeros, zeros, zeros, positions, np.ones(1, np.float32), Alibi())
    high, low = np.asarray(k, np.float64)[0, :, 0, 1:].T
    np.testing.assert_array_equal(256 * high + low, positions[0])
