"""Planning the depth of a chain anew between calls of the loop, by what was accepted and timed.

A controller knows what a round of each depth is foretold to take. After every call, behind rounds
that a trial saw, it learns what each row accepted and still wants, and how long the rounds took; it
forgets half of what was accepted before, and says with which depth the next call should run: the
one that soonest ends all rows, which is when the row that needs most rounds ends. It changes only
for a gain that is more than noise. At depth 0 nothing is drafted and so nothing is learned: from
time to time it tries the least depth for one call, after twice as long a pause each time that did
not pay (also when the rows have ended that gained nothing).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from magicjax.autotune.to_come import FEW

HYSTERESIS = 0.05  # what must be gained by a change of depth
KEPT = 0.5  # of what was counted, from call to call
PRIOR = 16  # rounds that the trial's acceptance weighs among those of all rows together
FIRST_PAUSE, LONGEST_PAUSE = 2, 64  # calls at depth 0 before it tries again


@dataclasses.dataclass
class Controller:
    """Chooses the depth of the next call.

    Attributes:
      seconds: foretold, of a round by depth; depth 0 is plain decoding.
      rates: how often a token was accepted if all before it were, by depth, before the run.
      depth: of the next call.
      known: rounds of each row, from the first, that were planned with: those of a trial on this
        very text. What they accept is no news, and calls within them keep the depth. (A row's next
        rounds need not be like these: the plan is of a whole run.)
    """

    seconds: Mapping[int, float]
    rates: Sequence[float]
    depth: int
    known: int = 0

    def __post_init__(self):
        deepest = max(self.seconds)
        self._prior, self._rates = float(PRIOR), _filled(self.rates or [0.0], deepest)
        # [B, deepest]; of how many rows nobody knows before the first call.
        self._tried = np.zeros((1, deepest))
        self._went = np.zeros((1, deepest))
        self._rounds = 0  # so far
        self._ratio = dict.fromkeys(self.seconds, 1.0)
        self._calls = dict.fromkeys(self.seconds, 0)
        self._pause, self._waited, self._probes = FIRST_PAUSE, 0, False

    def learn(
        self, accepted: npt.ArrayLike, left: npt.ArrayLike, seconds: float, rounds: int
    ) -> None:
        """Learns from a call that ran at `depth`, and chooses the next one; see `known`.

        Args:
          accepted: [B, A], rounds of each row that accepted 0, 1, ... tokens.
          left: [B], tokens that each row may still emit; 0 of those that have ended.
          seconds: of the call.
          rounds: of it.
        """
        ran, counts = self.depth, np.asarray(accepted, float)
        self._rounds += rounds
        if rounds:
            self._learn_time(ran, seconds / rounds)
        if self._rounds <= self.known:
            return
        if ran:
            at_least = counts[:, ::-1].cumsum(1)[:, ::-1]
            tried, went = np.zeros((2, len(counts), self._rates.size))
            tried[:, :ran], went[:, :ran] = at_least[:, :ran], at_least[:, 1 : ran + 1]
            self._prior *= KEPT
            self._tried = KEPT * self._tried + tried
            self._went = KEPT * self._went + went
        self.depth = self._choose(ran, np.asarray(left, float))

    def _learn_time(self, depth: int, seconds: float) -> None:
        """Sets the foretold times right by a round's.

        The first call of a depth loads its program, so its time says nothing. The second says
        what this depth takes, and by how much those of its kind (with a draft, or without) that
        have not been timed are likely off. Later ones say how fast the machine is now, for all.
        """
        self._calls[depth] += 1
        if self._calls[depth] == 1:
            return
        changed = seconds / self.seconds[depth] / self._ratio[depth]
        again = self._calls[depth] > 2
        for other in self.seconds:
            alike = (other == 0) == (depth == 0) and self._calls[other] < 2
            if again or alike or other == depth:
                self._ratio[other] *= changed

    def tokens(self, depth: int) -> Float[np.ndarray, "B"]:
        """Returns what each row is now expected to emit in a round of a depth."""
        tried = self._prior + self._tried.sum(0)
        went = self._prior * self._rates + self._went.sum(0)
        # Where few rounds got so deep, the rate of all depths together says more; and a few rounds
        # of all rows together stand beside each row's own.
        of_all = (went + went.sum() / tried.sum()) / (tried + 1)
        rates = (self._went + FEW * of_all) / (self._tried + FEW)
        return 1 + np.cumprod(rates[:, :depth], axis=1).sum(1)

    def _seconds_left(self, depth: int, left: Float[np.ndarray, "B"]) -> float:
        """Returns when all rows are now expected to have ended, if a depth is kept."""
        rounds = (left / self.tokens(depth)).max()
        return float(rounds * self.seconds[depth] * self._ratio[depth])

    def _choose(self, ran: int, left: Float[np.ndarray, "B"]) -> int:
        expected = {depth: self._seconds_left(depth, left) for depth in self.seconds}
        stays = 0 if self._probes else ran  # a trial from depth 0 must gain something to go on
        self._probes = False
        best = min(expected, key=lambda depth: expected[depth])
        if expected[stays] <= (1 + HYSTERESIS) * expected[best]:
            best = stays
        if 0 not in self.seconds:
            return best
        if ran != 0:
            self._waited = 0
            if best != 0:
                self._pause = FIRST_PAUSE
            return best
        # Nothing new is known of acceptance: only time decides when to look again.
        self._waited += 1
        if self._waited < self._pause:
            return 0
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._probes = True
        return min(depth for depth in self.seconds if depth)


def _filled(known: Sequence[float], count: int) -> np.ndarray:
    """Returns so many numbers, the last one again where no more are known."""
    return np.array([*known, *[known[-1]] * count][:count], float)
