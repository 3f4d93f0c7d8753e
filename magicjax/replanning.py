"""Planning the depth of a chain anew between calls of the loop, by what was accepted and timed.

A controller knows what a round of each depth is foretold to take. After every call it learns how
many tokens were accepted and how long the rounds took, forgets half of what was accepted before,
and says with which depth the next call should run: the one that soonest ends the row that needs
most rounds, for which the others wait. It changes only for a gain that is more than noise. At depth
0 nothing is drafted and so nothing is learned: from time to time it tries the least depth for one
call, after twice as long a pause each time that did not pay.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

HYSTERESIS = 0.05  # what must be gained by a change of depth
KEPT = 0.5  # of what was counted, from call to call
PRIOR = 16  # rounds that the acceptance of the trial weighs
FIRST_PAUSE, LONGEST_PAUSE = 2, 64  # calls at depth 0 before it tries again


@dataclasses.dataclass
class Controller:
    """Chooses the depth of the next call.

    Attributes:
      seconds: foretold, of a round by depth; depth 0 is plain decoding.
      rates: how often a token was accepted if all before it were, by depth, before the run.
      depth: of the next call.
      tokens: foretold with these rates, of a round of the row that needs most rounds, by depth from
        1 on; (): rows are alike.
    """

    seconds: Mapping[int, float]
    rates: Sequence[float]
    depth: int
    tokens: Sequence[float] = ()

    def __post_init__(self):
        deepest = max(self.seconds)
        rates = _filled(self.rates or [0.0], deepest)
        accepted = np.cumprod(rates).cumsum()
        self._share = np.ones(deepest)  # of what rows accept on average, in the slowest
        if self.tokens and accepted[0] > 0:
            self._share = (_filled(self.tokens, deepest) - 1) / accepted
        self._tried = np.full(deepest, float(PRIOR))
        self._went = PRIOR * rates
        self._ratio = dict.fromkeys(self.seconds, 1.0)
        self._calls = dict.fromkeys(self.seconds, 0)
        self._pause, self._waited, self._probes = FIRST_PAUSE, 0, False

    def learn(self, accepted: npt.ArrayLike, seconds: float, rounds: int) -> None:
        """Learns from a call that ran at `depth`, and chooses the next one.

        Args:
          accepted: rounds of all rows that accepted 0, 1, ... tokens.
          seconds: of the call.
          rounds: of it.
        """
        ran, counts = self.depth, np.asarray(accepted, float)
        if rounds:
            self._learn_time(ran, seconds / rounds)
        if ran:
            at_least = counts[::-1].cumsum()[::-1]
            self._tried *= KEPT
            self._went *= KEPT
            self._tried[:ran] += at_least[:ran]
            self._went[:ran] += at_least[1 : ran + 1]
        self.depth = self._choose(ran)

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

    def tokens_per_second(self, depth: int) -> float:
        """Returns what the row that needs most rounds is now expected to emit at a depth."""
        # Where few rounds got so deep, the rate of all depths together says more.
        pooled = self._went.sum() / self._tried.sum()
        rates = (self._went + pooled) / (self._tried + 1)
        tokens = 1 + np.cumprod(rates[:depth]).sum() * (self._share[depth - 1] if depth else 0)
        return float(tokens / (self.seconds[depth] * self._ratio[depth]))

    def _choose(self, ran: int) -> int:
        expected = {depth: self.tokens_per_second(depth) for depth in self.seconds}
        stays = 0 if self._probes else ran  # a trial from depth 0 must gain something to go on
        self._probes = False
        best = max(expected, key=lambda depth: expected[depth])
        if expected[best] < (1 + HYSTERESIS) * expected[stays]:
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
