"""Compares the tokens of a speculative run with those of plain greedy decoding.

Tokens are equal or wrong, with one exception that is counted: where a row first diverges, both
tokens may be the best up to rounding. A teacher-forced forward of the target in float32 decides
that. After such a tie the two texts rightly differ, and nothing more can be compared.

For a 16-bit model, rounding is estimated at the same position: the largest difference between its
logits and those in float32. It is a tie if both tokens are within twice this difference of the
best. This is a heuristic: a plain step and a tree round differently, and a small error can pass as
a tie. Exactness is verified in float32.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from experiments.runner import teacher

TIE = 1e-5  # relative to the largest logit
KV_TIE = 1e-3  # with a cache in 8 bits: float32 may round an element to either of two steps


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where a row first differs from plain decoding.

    Attributes:
      row: index in the batch.
      position: index among the new tokens.
      expected, actual: plain decoding's token and the other one.
      margin: difference of the best logit and the lower one of the two, in float32, relative to the
        largest.
      bound: smaller margins are ties.
    """

    row: int
    position: int
    expected: int
    actual: int
    margin: float
    bound: float = TIE

    @property
    def is_tie(self) -> bool:
        return self.margin < self.bound

    def __str__(self) -> str:
        verdict = "tie decided by rounding" if self.is_tie else "WRONG"
        return (
            f"row {self.row}, new token {self.position}: {self.actual} instead of {self.expected}, "
            f"margin {self.margin:.1e} of the largest logit, ties below {self.bound:.1e}: {verdict}"
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


def columns(match: Match | None) -> dict[str, Any]:
    """Returns the columns of the summary; None: nothing was compared."""
    divergences = match.divergences if match else ()
    first = min(divergences, key=lambda d: d.position, default=None)
    return {
        "exact_match": match.exact if match else None,
        "ties": match.ties if match else 0,
        "first_divergence": first.position if first else None,
        "top2_margin": first.margin if first else None,
    }


def compare(
    target: Any,
    prompts: Int[np.ndarray, "B T"],
    expected: Int[np.ndarray, "B M"],
    actual: Int[np.ndarray, "B M"],
) -> Match:
    """Returns how `actual` compares with plain decoding's `expected`.

    Args:
      target: as for `magicjax.generate`, which reads the rows that diverge; None: there are no
        ties, as between tokens sampled with the same random numbers.
      prompts: of the rows.
      expected, actual: new tokens.

    Raises:
      ValueError: the shapes differ.
    """
    if expected.shape != actual.shape:
        raise ValueError(
            f"cannot compare {actual.shape} new tokens with {expected.shape} of plain decoding"
        )
    divergences = []
    for row in np.flatnonzero((expected != actual).any(1)).tolist():
        position = int((expected[row] != actual[row]).argmax())
        expected_token, token = int(expected[row, position]), int(actual[row, position])
        margin, bound = math.inf, TIE
        if target is not None:
            logits, rounding = _logits(target, prompts[row], expected[row], position)
            largest = np.abs(logits).max()
            lower = np.minimum(logits[expected_token], logits[token])
            margin = float((logits.max() - lower) / largest)
            bound = max(KV_TIE if target.kv_bits else TIE, float(2 * rounding / largest))
        divergences.append(Divergence(row, position, expected_token, token, margin, bound))
    return Match(len(actual), tuple(divergences))


def _logits(
    target: Any, prompt: Int[np.ndarray, "T"], new: Int[np.ndarray, "M"], position: int
) -> tuple[Float[np.ndarray, "V"], float]:
    """Returns the logits of a new token, and the largest rounding error of one of them.

    The error is that of a 16-bit model; for others it is 0.
    """
    text = np.concatenate([prompt, new[:-1]])[None]
    logits = []
    for in_float32 in (False,) if target.dtype.itemsize >= 4 else (False, True):
        # A new token follows from the state of the token before it.
        hidden = teacher.last_hidden_states(target, text, len(new), in_float32=in_float32)
        state = hidden[:, position : position + 1]
        token_logits = teacher.unembed(target, state, in_float32=in_float32)
        logits.append(np.asarray(token_logits, np.float64)[0, 0])
    return logits[-1], float(np.abs(logits[-1] - logits[0]).max())
