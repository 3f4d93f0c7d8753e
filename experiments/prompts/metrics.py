"""Statistics needed to interpret a speedup: repetition of the text, agreement of the models."""

import numpy as np
from jaxtyping import Int

NGRAM = 8


def repeated_ngrams(tokens: Int[np.ndarray, "B M"], n: int = NGRAM) -> float:
    """Returns the share of n-grams that occurred before in the same row.

    Repetitive text is easy to draft. The 2-grams of `a b a b a b` are ab, ba, ab, ba, ab: three of
    five occurred before.

    Raises:
      ValueError: the rows are shorter than n.
    """
    if tokens.shape[1] < n:
        raise ValueError(f"{tokens.shape[1]} new tokens contain no {n}-gram: generate at least {n}")
    repeated = total = 0
    for row in tokens.tolist():
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total


def agreement(target: Int[np.ndarray, "B T"], draft: Int[np.ndarray, "B T"]) -> float:
    """Returns the share of positions at which the draft's greedy token is the target's.

    Both are teacher-forced on the same text (`teacher.greedy_tokens`). Only the second half counts,
    because near the start even a small cache holds everything.
    """
    half = target.shape[1] // 2
    return float((np.asarray(target)[:, half:] == np.asarray(draft)[:, half:]).mean())
