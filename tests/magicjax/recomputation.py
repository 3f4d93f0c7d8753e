"""Logits of any family by a forward pass over the whole text, without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import magicjax
from tests.reference_attention import attend_of


@functools.cache
def forward_of(module, shift: int):
    """Returns a compiled forward pass over whole texts."""
    attend = attend_of(module.config, shift)

    @jax.jit
    def run(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _, _ = module.apply(params, tokens, positions, attend)
        return module.apply(params, hidden, method="unembed")

    return run


def logits(target: magicjax.Model, text, width: int = 64, shift: int = 0) -> np.ndarray:
    """Returns the logits after every token of one text, [T,V] in float32.

    Args:
      target: of any family.
      text: at most `width` tokens; all texts of one width share a program.
      width: of the pass.
      shift: is added to the windows of layers, for controls.
    """
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(forward_of(target.module, shift)(target.params, tokens))[0, : len(text)]
