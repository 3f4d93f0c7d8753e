"""Adapts the depth of a chain between calls of the loop, from counted acceptance and measured time.

After each call the controller estimates for every depth when all rows will have ended, and selects
the depth that ends soonest. It changes the depth only for a gain above `HYSTERESIS`. At depth 0,
plain decoding, nothing is drafted and no acceptance is counted; it then probes the smallest depth
for one call, and doubles the pause after each probe without a gain.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from magicjax.prediction.autotune.trial import Table, row_rates, row_tokens, tried_and_accepted

HYSTERESIS = 0.05  # the least relative gain for a change of depth
DECAY = 0.5  # weight of earlier calls' counts, per call
PRIOR_ROUNDS = 16  # weight of the trial's rates, in rounds of the whole batch
FIRST_PAUSE, LONGEST_PAUSE = 2, 64  # calls at depth 0 before a probe


@dataclasses.dataclass(frozen=True)
class DepthRule:
    """The depth of the next call, given what each depth costs.

    Attributes:
      depth: of the next call.
      pause, waited: calls at depth 0 before the next probe, and since the last one.
      probing: whether the next call is a probe.
    """

    depth: int
    pause: int = FIRST_PAUSE
    waited: int = 0
    probing: bool = False

    def next(self, costs: Mapping[int, float]) -> "DepthRule":
        """Returns the rule after a call; `costs` has each depth's, the smallest is best."""
        current = 0 if self.probing else self.depth  # a probe must gain something to continue
        best = min(costs, key=lambda depth: costs[depth])
        if costs[current] <= (1 + HYSTERESIS) * costs[best]:
            best = current
        if 0 not in costs:
            return dataclasses.replace(self, depth=best)
        if self.depth:
            return DepthRule(best, FIRST_PAUSE if best else self.pause)
        # A call at depth 0 counts no acceptance, so only a probe leads to another depth.
        if self.waited + 1 < self.pause:
            return dataclasses.replace(self, waited=self.waited + 1)
        smallest = min(depth for depth in costs if depth)
        pause = min(2 * self.pause, LONGEST_PAUSE)
        return dataclasses.replace(self, depth=smallest, pause=pause, probing=True)


@dataclasses.dataclass(frozen=True)
class DepthController:
    """The state of the controller; `create` makes the first one, `update` the next one.

    Attributes:
      rule: which has the depth of the next call.
      seconds: per round by depth: predicted, then corrected by measured times.
      rates: [D], the trial's acceptance rates by depth.
      known_rounds: next rounds of each row that a trial on the same text has already counted. They
        are not counted again, and calls within them keep the depth: the plan is for the whole run.
      prior_rounds: weight of `rates`.
      tried, accepted: [B, D], decayed counts of each row.
      calls: by depth.
    """

    rule: DepthRule
    seconds: Mapping[int, float]
    rates: Float[np.ndarray, "D"]
    known_rounds: int
    tried: Table
    accepted: Table
    calls: Mapping[int, int]
    prior_rounds: float = PRIOR_ROUNDS

    @property
    def depth(self) -> int:
        """Of the next call."""
        return self.rule.depth

    @classmethod
    def create(
        cls, seconds: Mapping[int, float], rates: Sequence[float], depth: int, known_rounds: int = 0
    ) -> "DepthController":
        """Returns the controller before the first call.

        Args:
          seconds: per round, predicted for each depth to choose from.
          rates: acceptance rates by depth, given that all tokens before are accepted; the last one
            also stands for deeper tokens. Empty: 0.
          depth: of the first call.
          known_rounds: see the class.
        """
        deepest = max(seconds)
        rates = list(rates) or [0.0]
        padded = np.array([*rates, *[rates[-1]] * deepest][:deepest], float)
        nothing = np.zeros((1, deepest))
        return cls(
            *(DepthRule(depth), dict(seconds), padded, known_rounds, nothing, nothing),
            calls=dict.fromkeys(seconds, 0),
        )

    def update(
        self, histogram: npt.ArrayLike, left: npt.ArrayLike, seconds: float, rounds: int
    ) -> "DepthController":
        """Returns the controller after a call at `depth`.

        Args:
          histogram: [B, A], rounds of each row that accepted 0, 1, ... tokens.
          left: [B], tokens that each row may still emit; 0 if it has ended.
          seconds: of the call.
          rounds: of the call.
        """
        new = dataclasses.replace(self, known_rounds=self.known_rounds - rounds)
        if rounds:
            new = new._with_time(seconds / rounds)
        if new.known_rounds >= 0:
            return new
        if self.depth:
            tried, accepted = tried_and_accepted(histogram, self.depth, self.rates.size)
            new = dataclasses.replace(
                new,
                prior_rounds=DECAY * self.prior_rounds,
                tried=DECAY * self.tried + tried,
                accepted=DECAY * self.accepted + accepted,
            )
        remaining = np.asarray(left, float)
        costs = {d: (remaining / new.tokens(d)).max() * s for d, s in new.seconds.items()}
        return dataclasses.replace(new, rule=new.rule.next(costs))

    def _with_time(self, seconds: float) -> "DepthController":
        """Returns the controller with seconds per round corrected by those of a call.

        The first call at a depth loads its program and is not counted. The second also corrects
        depths of its kind (with or without a draft) that have no time of their own. Later calls
        measure changes of the machine and correct all depths.
        """
        calls = dict(self.calls) | {self.depth: self.calls[self.depth] + 1}
        if calls[self.depth] == 1:
            return dataclasses.replace(self, calls=calls)

        def is_corrected(other: int) -> bool:
            same_kind = (other == 0) == (self.depth == 0)
            untimed = calls[other] < 2
            return other == self.depth or calls[self.depth] > 2 or (same_kind and untimed)

        factor = seconds / self.seconds[self.depth]
        corrected = {d: s * (factor if is_corrected(d) else 1.0) for d, s in self.seconds.items()}
        return dataclasses.replace(self, calls=calls, seconds=corrected)

    def tokens(self, depth: int) -> Float[np.ndarray, "B"]:
        """Returns the expected tokens of each row's round at a depth."""
        rates = row_rates(self.tried, self.accepted, self.rates, self.prior_rounds)
        return row_tokens(rates, depth)
