"""Drafts learn what the target would say: its greedy choice at every position of a text."""

import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from experiments.training.trainer import logits_of

CONTEXT = 2048  # windows in which a text is labelled


@functools.partial(jax.jit, static_argnums=(0, 3))
def _best(model: nn.Module, params, window: Int[Array, "B T"], count: int) -> Int[Array, "B T N"]:
    """Returns the likeliest next tokens at each position, best first."""
    logits = logits_of(model, params, window)
    if count == 1:  # far cheaper than sorting
        return logits.argmax(-1)[..., None]
    return jax.lax.top_k(logits, count)[1]


def ranked(
    model: nn.Module,
    params,
    tokens: Int[np.ndarray, "T"],
    count: int,
    path: pathlib.Path | None = None,
) -> Int[np.ndarray, "M N"]:
    """Returns the model's N = `count` likeliest next tokens behind each token, best first.

    Args:
      model, params: whose choices they are.
      tokens: a text, read in windows of `CONTEXT`; what does not fill one is left out, so M <= T.
      count: how many tokens at each position.
      path: where the result is kept, and read back from.

    Raises:
      ValueError: fewer tokens than one window.
    """
    if path is not None and path.exists():
        return np.load(path)
    windows = len(tokens) // CONTEXT
    if windows == 0:
        raise ValueError(f"{len(tokens)} tokens do not fill a window of {CONTEXT}: give more text")
    split = tokens[: windows * CONTEXT].reshape(windows, 1, CONTEXT)
    bar = tqdm(split, desc=path.stem if path else "score", unit="window", mininterval=5)
    chosen = np.concatenate([np.asarray(_best(model, params, w, count)[0], np.int32) for w in bar])
    if path is not None:
        partial = path.with_suffix(".partial.npy")
        np.save(partial, chosen)
        partial.rename(path)
    return chosen


def choices(
    model: nn.Module, params, tokens: Int[np.ndarray, "T"], path: pathlib.Path | None = None
) -> Int[np.ndarray, "M"]:
    """Returns the model's greedy next token behind each token; arguments as for `ranked`."""
    return ranked(model, params, tokens, 1, path)[:, 0]


def label_loss(model: nn.Module, params, windows: Int[Array, "B T 3"]) -> Float[Array, ""]:
    """Returns the mean loss on labels; columns are token, label, weight (0 drops the position)."""
    tokens, labels, weights = (windows[:, :-1, i] for i in range(3))
    logits = logits_of(model, params, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    total = jnp.maximum(weights.sum(), 1)  # a batch may have lost every position
    return (losses * weights).sum() / total.astype(jnp.float32)
