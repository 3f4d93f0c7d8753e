"""Are a speculative run's tokens those of plain greedy decoding?

Equal means equal, with one exception that is counted: where two rows first part, both tokens may
be the best to within rounding. A teacher-forced forward of the target decides that. Beyond such a
tie the two texts differ rightly, and nothing can be said.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.runner import teacher

TIE = 1e-5  # of the largest logit


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where a row first leaves plain decoding.

    Attributes:
      row: of the batch.
      position: among the new tokens.
      expected, found: plain decoding's token and the other.
      margin: how far the worse of the two lies below the best logit, over the largest logit.
    """

    row: int
    position: int
    expected: int
    found: int
    margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin < TIE

    def __str__(self) -> str:
        kind = "tie decided by rounding" if self.is_tie else "WRONG"
        return (
            f"row {self.row}, new token {self.position}: {self.found} instead of {self.expected}, "
            f"margin {self.margin:.1e} of the largest logit: {kind}"
        )


@dataclasses.dataclass(frozen=True)
class Match:
    """How a run compares with plain decoding, row by row."""

    rows: int
    divergences: tuple[Divergence, ...]

    @property
    def ties(self) -> int:
        """Rows that part from plain decoding at a tie."""
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
    """Returns the comparison of `found` with plain decoding's `expected`, of the same shape."""
    divergences = []
    for row, position, pair in _partings(expected, found):
        # Causal: one shape for every position, so that the forward compiles once.
        text = np.concatenate([prompts[row], expected[row]])[None]
        at = np.array([prompts.shape[1] + position - 1])
        logits = np.asarray(teacher.logits_at(target, text, at)[0], np.float64)
        margin = (logits.max() - logits[list(pair)].min()) / np.abs(logits).max()
        divergences.append(Divergence(row, position, *pair, float(margin)))
    return Match(len(expected), tuple(divergences))


def compare_sampled(expected: Int[np.ndarray, "B M"], found: Int[np.ndarray, "B M"]) -> Match:
    """Returns the comparison of two texts sampled with the same random numbers: no ties."""
    partings = _partings(expected, found)
    return Match(
        len(expected), tuple(Divergence(r, at, *pair, math.inf) for r, at, pair in partings)
    )


def _partings(
    expected: Int[np.ndarray, "B M"], found: Int[np.ndarray, "B M"]
) -> list[tuple[int, int, tuple[int, int]]]:
    """Returns (row, position, (token expected, token found)) where each row first differs."""
    if expected.shape != found.shape:
        raise ValueError(
            f"cannot compare {found.shape} new tokens with {expected.shape} of plain decoding"
        )
    partings = []
    for row in np.flatnonzero((expected != found).any(1)).tolist():
        at = int((expected[row] != found[row]).argmax())
        partings.append((row, at, (int(expected[row, at]), int(found[row, at]))))
    return partings
