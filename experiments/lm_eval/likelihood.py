"""Teacher-forced log-likelihoods of continuations under the target, without speculation.

Texts of similar lengths share a batch and are padded to a power of two, so that a benchmark
compiles few programs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.runner import teacher

LEAST = 64  # shortest padded length


class Likelihood(NamedTuple):
    """The likelihood of a continuation under the target.

    Attributes:
      log: natural logarithm of its probability.
      greedy: whether greedy decoding generates it.
    """

    log: float
    greedy: bool


def bucket(length: int, least: int = LEAST) -> int:
    """Returns the smallest power of two that is at least `length` and `least`."""
    return 1 << (max(length, least, 1) - 1).bit_length()


def log_likelihoods(
    model: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch: int,
    progress: bool = False,
) -> list[Likelihood]:
    """Returns the likelihood of each continuation after its context.

    Args:
      model: a loaded model.
      pairs: tokens of context and continuation, at least one each.
      batch: texts per forward pass.
      progress: whether to show a progress bar.

    Raises:
      ValueError: an empty context or continuation, or a text longer than the model's positions.
    """
    for i, (context, continuation) in enumerate(pairs):
        _check(model, i, context, continuation)
    likelihoods: dict[int, Likelihood] = {}
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    for start in tqdm(range(0, len(order), batch), unit="batch", disable=not progress):
        indices = order[start : start + batch]
        scored = _score_batch(model, [pairs[i] for i in indices], batch)
        likelihoods.update(zip(indices, scored, strict=True))
    return [likelihoods[i] for i in range(len(pairs))]


def _check(model: Any, i: int, context: Sequence[int], continuation: Sequence[int]) -> None:
    if not len(context) or not len(continuation):
        empty = "context" if not len(context) else "continuation"
        raise ValueError(f"text {i} has an empty {empty}: it needs at least 1 token")
    # The last token is scored, but not an input.
    length, positions = len(context) + len(continuation) - 1, model.config.max_positions
    if length > positions:
        raise ValueError(
            f"text {i} has {length} input tokens, but the model has {positions} positions: shorten "
            f"its context of {len(context)} tokens"
        )


def _score_batch(model: Any, pairs: list, batch: int) -> list[Likelihood]:
    """Returns the likelihoods of at most `batch` pairs from one forward pass of `batch` rows."""
    texts = [np.array([*context, *continuation], np.int32) for context, continuation in pairs]
    widest = bucket(max(len(continuation) for _, continuation in pairs), least=16)
    length = min(bucket(max(map(len, texts)) - 1), model.config.max_positions)
    tokens = np.zeros((batch, length), np.int32)
    index = np.zeros((batch, widest), np.int32)
    following = np.zeros((batch, widest), np.int32)
    for row, (text, (context, continuation)) in enumerate(zip(texts, pairs, strict=True)):
        count = len(continuation)
        tokens[row, : len(text) - 1] = text[:-1]
        index[row, :count] = len(context) - 1 + np.arange(count)
        following[row, :count] = continuation
    logs, best = map(np.asarray, teacher.log_probs(model, tokens, index, following))
    counts = [len(continuation) for _, continuation in pairs]
    return [
        Likelihood(float(logs[row, :n].sum(dtype=np.float64)), bool(best[row, :n].all()))
        for row, n in enumerate(counts)
    ]
