"""Compares the tokens of a speculative run with those of plain greedy decoding.

Tokens are equal or wrong, with one exception that is counted: where a row first diverges, both
tokens may be the best up to rounding. A teacher-forced forward of the target in float32 decides
that. After such a tie the two texts rightly differ, and nothing more can be compared.

For a 16-bit model, rounding is estimated at the same position: the largest difference between its
logits and those in float32. It is a tie if both tokens are within twice this difference of the
best. This is no proof: a plain step and a tree round differently, and a small error can look like a
tie. Only float32 proves that a method is exact.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from experiments.runner import teacher

TIE = 1e-5  # relative to the largest logit


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where a row first differs from plain decoding.

    Attributes:
      row: index in the batch.
      position: index among the new tokens.
      expected, found: plain decoding's token and the other one.
      margin: difference of the best logit and the lower one of the two, in float32, relative to the
        largest.
      bound: smaller margins are ties.
    """

    row: int
    position: int
    expected: int
    found: int
    margin: float
    bound: float = TIE

    @property
    def is_tie(self) -> bool:
        return self.margin < self.bound

    def __str__(self) -> str:
        kind = "tie decided by rounding" if self.is_tie else "WRONG"
        return (
            f"row {self.row}, new token {self.position}: {self.found} instead of {self.expected}, "
            f"margin {self.margin:.1e} of the largest logit, ties below {self.bound:.1e}: {kind}"
        )


@dataclasses.dataclass(frozen=True)
class Match:
    """How the rows of a run compare with plain decoding's."""

    rows: int
    divergences: tuple[Divergence, ...]

    @property
    def ties(self) -> int:
        """Rows that diverge at a tie."""
        return sum(d.is_tie for d in self.divergences)

    @property
    def exact(self) -> float:
        """Share of rows that are equal, ties included."""
        return 1.0 - (len(self.divergences) - self.ties) / self.rows


def compare(
    target: Any,
    prompts: Int[np.ndarray, "B T"],
    expected: Int[np.ndarray, "B M"],
    found: Int[np.ndarray, "B M"],
) -> Match:
    """Returns how `found` compares with plain decoding's `expected`.

    Without a target there are no ties, as between tokens sampled with the same random numbers.
    """
    if expected.shape != found.shape:
        raise ValueError(
            f"cannot compare {found.shape} new tokens with {expected.shape} of plain decoding"
        )
    divergences = []
    for row in np.flatnonzero((expected != found).any(1)).tolist():
        position = int((expected[row] != found[row]).argmax())
        tokens = int(expected[row, position]), int(found[row, position])
        margin, bound = math.inf, TIE
        if target is not None:
            # One shape for every position, so that the forward compiles once; attention is causal.
            text = np.concatenate([prompts[row], expected[row]])[None]
            index = np.array([prompts.shape[1] + position - 1])
            logits, rounding = _logits(target, text, index)
            largest = np.abs(logits).max()
            margin = float((logits.max() - logits[list(tokens)].min()) / largest)
            bound = max(TIE, float(2 * rounding / largest))
        divergences.append(Divergence(row, position, *tokens, margin, bound))
    return Match(len(expected), tuple(divergences))


def _logits(
    target: Any, text: Int[np.ndarray, "1 T"], index: Int[np.ndarray, "1"]
) -> tuple[Float[np.ndarray, "V"], float]:
    """Returns the logits, and the largest difference that 16-bit rounding makes to one of them."""
    own = np.asarray(teacher.logits_at(target, text, index)[0], np.float64)
    if target.dtype.itemsize >= 4:
        return own, 0.0
    wide = np.asarray(teacher.logits_in_float32(target, text, index)[0], np.float64)
    return wide, float(np.abs(wide - own).max())
