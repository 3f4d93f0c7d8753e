"""Gemma 4: heads of two sizes, values that are keys, and what wrong rules would compute."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

import models
from tests.models.conftest import GOLDEN
from tests.models.test_golden import TOLERANCE, read, relative_error
from tests.reference_attention import attend_of

DENSE = GOLDEN / "gemma4"


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


def test_values_are_keys_before_their_norm_and_rotation():
    """Negative control: values that are the final keys, as a cache without values would have."""
    checkpoint, tokens, expected = read(DENSE)
    assert relative_error(logits_with(checkpoint, tokens), expected) < TOLERANCE
    found = logits_with(checkpoint, tokens, lambda q, k, v: (q, k, k))
    assert relative_error(found, expected) > 20 * TOLERANCE


def test_float64_logits_are_those_of_hugging_face():
    with jax.enable_x64(True):
        checkpoint = models.load_checkpoint(DENSE, "float64")
        _, tokens, expected = read(DENSE)
        found = logits_with(checkpoint, tokens)
        assert found.dtype == np.float64
        assert relative_error(found, expected) < TOLERANCE
