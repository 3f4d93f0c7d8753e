"""Numbers that a speed-up must be read with.

Does the text loop, do the models agree?
"""

import numpy as np
from jaxtyping import Int


def repeated_ngrams(tokens: Int[np.ndarray, "B M"], n: int = 8) -> float:
    """Returns the share of n-grams that occurred before in the same row.

    A text that loops flatters every draft. Of `a b a b a b` the 2-grams are ab, ba, ab, ba, ab:
    three of five occurred before.

    Raises:
      ValueError: the rows are shorter than n.
    """
    if tokens.shape[1] < n:
        raise ValueError(f"{tokens.shape[1]} new tokens hold no {n}-gram: generate at least {n}")
    repeated = total = 0
    for row in tokens.tolist():
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total


def agreement(wanted: Int[np.ndarray, "B T"], drafted: Int[np.ndarray, "B T"]) -> float:
    """Returns the share of positions at which the draft's best token is the target's.

    Both are teacher-forced on real text (`teacher.greedy_tokens`). Only the second half counts:
    near the start even a small cache holds everything.
    """
    half = wanted.shape[1] // 2
    return float((np.asarray(wanted)[:, half:] == np.asarray(drafted)[:, half:]).mean())
