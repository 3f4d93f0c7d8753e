"""How many rounds a batch still takes, drawn from the rounds that were counted.

A batch takes as many rounds as its slowest row, so means of rows do not do. Rounds to come are like
those of the row that were counted, and a few of all rows together.
"""

import numpy as np
from jaxtyping import Int

RUNS, LONGEST = 64, 512  # of what is to come, and its tokens
FEW = 8  # rounds of all rows together that stand beside each row's own


def slowest_tokens(
    histogram: Int[np.ndarray, "B A"], wanted: Int[np.ndarray, "B"]
) -> tuple[float, ...]:
    """Returns the tokens of a round of chains of depth 1, 2, ..., where the longest row ends last.

    A round of a chain of g accepts what a longer one would have, and at most g. Plain decoding
    takes as many rounds as the longest row has tokens.

    Args:
      histogram: rounds of each row that accepted 0, 1, ... tokens of the longest chain.
      wanted: tokens of each row, at least 1.
    """
    wanted = _shortened(wanted)
    accepted = drawn(histogram, int(wanted.max()))
    return tuple(
        float(wanted.max() / _rounds(1 + np.minimum(accepted, depth), wanted).max(1).mean())
        for depth in range(1, histogram.shape[1])
    )


def slowest_rounds(
    before: Int[np.ndarray, "B"], left: Int[np.ndarray, "B"], histogram: Int[np.ndarray, "B A"]
) -> float:
    """Returns the rounds until every row has ended.

    Args:
      before: rounds that each row takes first.
      left: tokens that it wants then.
      histogram: rounds of each row that are like those to come, by what they accepted.
    """
    if not left.any():
        return float(before.max())
    wanted = _shortened(left)
    tokens = 1 + drawn(histogram, int(wanted.max()))
    longer = left / np.maximum(wanted, 1)
    return float((before + longer * _rounds(tokens, wanted)).max(1).mean())


def drawn(histogram: Int[np.ndarray, "B A"], count: int) -> Int[np.ndarray, "runs B count"]:
    """Returns what rounds to come accept, in several runs.

    Args:
      histogram: rounds of each row that accepted 0, 1, ... tokens; of some row more than none.
      count: of rounds.
    """
    rng = np.random.default_rng(0)
    pooled = histogram.sum(0) / histogram.sum()
    shares = histogram + FEW * pooled
    shares = shares / shares.sum(1, keepdims=True)
    draws = [rng.choice(histogram.shape[1], (RUNS, count), p=row) for row in shares]
    return np.stack(draws, axis=1).astype(np.int16)


def _shortened(wanted: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
    """Returns numbers of tokens of which none is above `LONGEST`, in proportion."""
    return np.ceil(wanted * min(1.0, LONGEST / wanted.max())).astype(int)


def _rounds(
    tokens: Int[np.ndarray, "runs B M"], wanted: Int[np.ndarray, "B"]
) -> Int[np.ndarray, "runs B"]:
    """Returns the rounds until each row has all it wants."""
    enough = tokens.cumsum(2, dtype=np.int16) >= wanted[:, None]
    return np.where(wanted > 0, enough.argmax(2) + 1, 0)
