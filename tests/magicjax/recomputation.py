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
    target: magicjax.Model,
    prompts: Sequence,
    new_tokens: int,
    width: int = 64,
    shift: int = 0,
    guess: Sequence | None = None,
) -> list[np.ndarray]:
    """Returns greedy texts; `width` is at least the tokens of the longest one.

    A guess of the texts saves passes: tokens after the first wrong one are chosen again, so the
    result does not depend on it.
    """
    run, tokens = forward_of(target.module, shift), np.zeros((len(prompts), width), np.int32)
    starts = np.array([len(prompt) for prompt in prompts])
    for row, prompt, own in zip(tokens, prompts, guess or [()] * len(prompts), strict=True):
        whole = np.concatenate([np.asarray(prompt, np.int32), np.asarray(own, np.int32)])
        row[: len(whole)] = whole
    rows, known = np.arange(len(prompts))[:, None], np.zeros(len(prompts), int)
    places = starts[:, None] + np.arange(new_tokens)
    while (known < new_tokens).any():
        chosen = np.asarray(run(target.params, tokens))[rows, places - 1]
        wrong = np.pad(chosen != tokens[rows, places], ((0, 0), (0, 1)), constant_values=True)
        known = wrong.argmax(1) + 1  # the first wrong token had the right text before it
        index = np.minimum(known, new_tokens) - 1
        tokens[rows[:, 0], places[rows[:, 0], index]] = chosen[rows[:, 0], index]
    return [row[start : start + new_tokens] for row, start in zip(tokens, starts, strict=True)]
