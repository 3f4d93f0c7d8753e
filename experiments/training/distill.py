"""Distillation: drafts learn the target's greedy token at every position of a text."""

import functools
import io
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from experiments.training.trainer import logits_of
from magicjax.files import write_atomically

CONTEXT = 2048  # length of the windows in which a text is labelled


@functools.partial(jax.jit, static_argnums=(0, 3))
def _best(model: nn.Module, params, window: Int[Array, "B T"], count: int) -> Int[Array, "B T N"]:
    """Returns the top-N next tokens at each position, best first."""
    logits = logits_of(model, params, window)
    if count == 1:  # faster than sorting
        return logits.argmax(-1)[..., None]
    return jax.lax.top_k(logits, count)[1]


def ranked(
    model: nn.Module,
    params,
    tokens: Int[np.ndarray, "T"],
    count: int,
    path: pathlib.Path | None = None,
) -> Int[np.ndarray, "M N"]:
    """Returns the model's top-N next tokens, N = `count`, after each token, best first.

    Args:
      model, params: the model.
      tokens: a text, read in windows of `CONTEXT`; an incomplete last window is dropped, so M <= T.
      count: tokens per position.
      path: a file that caches the result.

    Raises:
      ValueError: fewer tokens than one window.
    """
    if path is not None and path.exists():
        return np.load(path)
    windows = len(tokens) // CONTEXT
    if windows == 0:
        raise ValueError(
            f"{len(tokens)} tokens are fewer than a window of {CONTEXT}: give more text"
        )
    split = tokens[: windows * CONTEXT].reshape(windows, 1, CONTEXT)
    bar = tqdm(split, desc=path.stem if path else "score", unit="window", mininterval=5)
    chosen = np.concatenate([np.asarray(_best(model, params, w, count)[0], np.int32) for w in bar])
    if path is not None:
        buffer = io.BytesIO()
        np.save(buffer, chosen)
        write_atomically(path, buffer.getvalue())
    return chosen


def choices(
    model: nn.Module, params, tokens: Int[np.ndarray, "T"], path: pathlib.Path | None = None
) -> Int[np.ndarray, "M"]:
    """Returns the model's greedy next token after each token; arguments as for `ranked`."""
    return ranked(model, params, tokens, 1, path)[:, 0]


def label_loss(model: nn.Module, params, windows: Int[Array, "B T 3"]) -> Float[Array, ""]:
    """Returns the mean loss on labels; the columns are token, label and weight."""
    tokens, labels, weights = (windows[:, :-1, i] for i in range(3))
    logits = logits_of(model, params, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    total = jnp.maximum(weights.sum(), 1)  # all weights of a batch may be 0
    return (losses * weights).sum() / total.astype(jnp.float32)
