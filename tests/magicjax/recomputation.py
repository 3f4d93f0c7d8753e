"""Greedy texts of any family, each token by a forward pass over the whole text, without a cache."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import magicjax
from tests.reference_attention import attend_of


@functools.cache
def forward_of(module, shift: int = 0):
    """Returns a compiled forward pass over whole texts.

    `shift` is added to the windows of layers, for controls.
    """
    attend = attend_of(module.config, shift)

    @jax.jit
    def run(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _, _ = module.apply(params, tokens, positions, attend)
        return module.apply(params, hidden, method="unembed").argmax(-1)

    return run


def rerun(
    target: magicjax.Model, prompts: Sequence, new_tokens: int, width: int = 64, shift: int = 0
) -> list[np.ndarray]:
    """Returns greedy texts; `width` is at least the tokens of the longest one."""
    run, tokens = forward_of(target.module, shift), np.zeros((len(prompts), width), np.int32)
    ends = np.array([len(prompt) for prompt in prompts])
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    rows = np.arange(len(prompts))
    for _ in range(new_tokens):
        tokens[rows, ends] = np.asarray(run(target.params, tokens))[rows, ends - 1]
        ends += 1
    return [row[end - new_tokens : end] for row, end in zip(tokens, ends, strict=True)]
