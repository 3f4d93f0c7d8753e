"""How likely the target finds given texts: log-likelihoods of continuations, teacher-forced.

Speculation has no part in it, so these are exact. Texts of similar lengths go together, padded to a
power of two, so that few programs are compiled for a whole benchmark.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.runner import teacher

LEAST = 64  # tokens of the shortest text's shape


class Likelihood(NamedTuple):
    """What the target says of a continuation.

    Attributes:
      log: the natural logarithm of its probability.
      greedy: whether greedy decoding would write it.
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
    """Returns the likelihood of each continuation behind its context.

    Args:
      model: as `magicjax.load` returns it.
      pairs: tokens of (context, continuation), at least one each.
      batch: texts of a forward.
      progress: whether a bar is shown.

    Raises:
      ValueError: an empty context or continuation, a text longer than the model's positions, or a
        batch below 1.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}: it must be at least 1")
    for i, (context, continuation) in enumerate(pairs):
        _check(model, i, context, continuation)
    found: list[Likelihood | None] = [None] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    for start in tqdm(range(0, len(order), batch), unit="batch", disable=not progress):
        chosen = order[start : start + batch]
        for i, likelihood in zip(chosen, _together(model, [pairs[i] for i in chosen], batch)):
            found[i] = likelihood
    return [likelihood for likelihood in found if likelihood is not None]


def _check(model: Any, i: int, context: Sequence[int], continuation: Sequence[int]) -> None:
    if not len(context) or not len(continuation):
        empty = "context" if not len(context) else "continuation"
        raise ValueError(f"text {i} has an empty {empty}: it needs at least 1 token")
    # The last token is asked about, and not read.
    read, most = len(context) + len(continuation) - 1, model.config.max_positions
    if read > most:
        raise ValueError(
            f"text {i} has {read} tokens to read, and the model has {most} positions: cut its "
            f"context, of {len(context)} tokens"
        )


def _together(model: Any, pairs: list, batch: int) -> list[Likelihood]:
    """Returns the likelihoods of at most `batch` pairs, by one forward of `batch` rows."""
    texts = [np.array([*context, *continuation], np.int32) for context, continuation in pairs]
    widest = bucket(max(len(continuation) for _, continuation in pairs), least=16)
    length = min(bucket(max(map(len, texts)) - 1), model.config.max_positions)
    tokens = np.zeros((batch, length), np.int32)
    index = np.zeros((batch, widest), np.int32)
    following = np.zeros((batch, widest), np.int32)
    for row, (text, (context, continuation)) in enumerate(zip(texts, pairs, strict=True)):
        wanted = len(continuation)
        tokens[row, : len(text) - 1] = text[:-1]
        index[row, :wanted] = len(context) - 1 + np.arange(wanted)
        following[row, :wanted] = continuation
    logs, best = map(np.asarray, teacher.log_probs_of(model, tokens, index, following))
    counts = [len(continuation) for _, continuation in pairs]
    return [
        Likelihood(float(logs[row, :n].sum(dtype=np.float64)), bool(best[row, :n].all()))
        for row, n in enumerate(counts)
    ]
