"""Drafts learn what the target would say: its greedy choice at every position of a text."""

import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from experiments.training import logits_of

CONTEXT = 2048  # windows in which a text is labelled


def choices(
    model: nn.Module, params, tokens: Int[np.ndarray, "T"], path: pathlib.Path | None = None
) -> Int[np.ndarray, "M"]:
    """Returns the model's greedy next token behind each token, in windows of `CONTEXT`.

    Args:
      model, params: whose choices they are.
      tokens: a text; what does not fill a window is left out, so M <= T.
      path: where the result is kept, and read back from.

    Raises:
      ValueError: fewer tokens than one window.
    """
    if path is not None and path.exists():
        return np.load(path)
    count = len(tokens) // CONTEXT
    if count == 0:
        raise ValueError(f"{len(tokens)} tokens do not fill a window of {CONTEXT}: give more text")
    score = jax.jit(lambda params, window: logits_of(model, params, window).argmax(-1))
    windows = tokens[: count * CONTEXT].reshape(count, 1, CONTEXT)
    chosen = [np.asarray(score(params, w), np.int32) for w in tqdm(windows, desc="labels")]
    labels = np.concatenate(chosen, axis=None)
    if path is not None:
        partial = path.with_suffix(".partial.npy")
        np.save(partial, labels)
        partial.rename(path)
    return labels


def label_loss(model: nn.Module, params, windows: Int[Array, "B T 3"]) -> Float[Array, ""]:
    """Returns the weighted loss on labels; columns are token, label, weight."""
    tokens, labels, weights = (windows[:, :-1, i] for i in range(3))
    logits = logits_of(model, params, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * weights).sum() / weights.sum().astype(jnp.float32)


def agreement(
    ours: tuple[nn.Module, Any], theirs: tuple[nn.Module, Any], tokens: Int[np.ndarray, "T"]
) -> float:
    """Returns the share of positions where two models, (module, params) each, choose the same."""
    a, b = (choices(module, params, tokens) for module, params in (ours, theirs))
    return float((a == b).mean())
