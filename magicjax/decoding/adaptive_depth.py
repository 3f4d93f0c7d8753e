"""When to speculate: the depth of the next call of the loop, from counted acceptance and times.

An engine, whose rows are requests, takes the depth of the most expected tokens per second. A batch
that is done when its last row ends takes the depth at which that row ends soonest. Both compare
depths by the expected tokens of a round of each row and by its seconds. The depth changes only for
a gain above `HYSTERESIS`. At depth 0, plain decoding, nothing is drafted and no acceptance is
counted; a call at the smallest depth then probes it, after pauses that grow without a gain.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

HYSTERESIS = 0.05  # the least relative gain for a change of depth
FIRST_PAUSE, LONGEST_PAUSE = 2, 64  # calls at depth 0 before a probe
PAUSE_AFTER_JOIN = 16  # the longest pause between probes after a request has joined
HALF_LIFE = 32  # rounds after which counted acceptance has half its weight
FIRST_RATE, FIRST_ROUNDS = 0.7, 8  # acceptance before any is counted, and its weight in rounds
POOLED_ROUNDS = 8  # rounds of the whole batch that are added to each row's counts
MAX_CORRECTION = 1.25  # of a depth's seconds by one call: one call can be slow for other reasons

Table = Float[np.ndarray, "B D"]


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
class RoundTimes:
    """Seconds of a round by depth and by the length of the rows.

    Attributes:
      lengths: increasing, tokens in the target's cache of each row.
      seconds: by depth, at each length.
      speed: measured divided by expected seconds of the newest call, which the machine's other
        work changes; the same for all depths.
      newest: depth of the newest call; None: there was none.
    """

    lengths: tuple[int, ...]
    seconds: Mapping[int, tuple[float, ...]]
    speed: float = 1.0
    newest: int | None = None

    def of(self, depth: int, length: int) -> float:
        """Returns the expected seconds at a depth, interpolated between the lengths."""
        return float(np.interp(length, self.lengths, self.seconds[depth]))

    def corrected(self, depth: int, length: int, seconds: float) -> "RoundTimes":
        """Returns the times after a call in which a round took so many seconds.

        While the depth stays the same, a change is the machine's. A jump at a change of the depth
        is an error of that depth's seconds, half of which is corrected.
        """
        ratio = seconds / self.of(depth, length)
        if self.newest in (None, depth):
            return dataclasses.replace(self, speed=ratio, newest=depth)
        jump = np.clip(ratio / self.speed, 1 / MAX_CORRECTION, MAX_CORRECTION)
        corrected = tuple(float(s * jump**0.5) for s in self.seconds[depth])
        return dataclasses.replace(self, seconds={**self.seconds, depth: corrected}, newest=depth)


@dataclasses.dataclass(frozen=True)
class DepthChooser:
    """The choice of the depth; each method returns the next one.

    Attributes:
      depths: to choose from, increasing.
      rule: which has the depth of the next call.
      histogram: int [B, A], rounds of each row that accepted 0, 1, ... tokens, after the newest
        call.
      tried, accepted: [B + 1, D], decayed counts of each row, and of what was known before:
        earlier requests, or trials.
      times: of rounds; None: they have not been measured, and the depth does not change.
      length: tokens of the longest live row.
      until_last_row_ends: whether to minimise the time until the last row ends, rather than to
        maximise tokens per second.
    """

    depths: tuple[int, ...]
    rule: DepthRule
    histogram: Int[np.ndarray, "B A"]
    tried: Table
    accepted: Table
    times: RoundTimes | None = None
    length: int = 0
    until_last_row_ends: bool = False

    @classmethod
    def create(
        cls,
        depths: Iterable[int],
        rows: int,
        *,
        first: int | None = None,
        rates: Sequence[float] = (FIRST_RATE,),
        rounds: float = FIRST_ROUNDS,
        times: RoundTimes | None = None,
        until_last_row_ends: bool = False,
    ) -> "DepthChooser":
        """Returns the choice before any acceptance is counted.

        Args:
          depths: to choose from.
          rows: B, of the batch.
          first: depth of the first call; None: the largest.
          rates: acceptance rates by depth, given that all tokens before are accepted; the last one
            also stands for deeper tokens. Empty: 0.
          rounds: the weight of these rates.
          times, until_last_row_ends: see the class.
        """
        depths = tuple(sorted(depths))
        deepest = depths[-1]
        known = [*rates, *[rates[-1] if rates else 0.0] * deepest][:deepest]
        tried = np.zeros((rows + 1, deepest))
        tried[-1] = rounds
        return cls(
            depths,
            DepthRule(deepest if first is None else first),
            np.zeros((rows, deepest + 1), np.int32),
            tried,
            np.array(known) * tried,
            times,
            until_last_row_ends=until_last_row_ends,
        )

    @property
    def depth(self) -> int:
        """The depth of the next call."""
        return self.rule.depth

    def joined(self, slot: int) -> "DepthChooser":
        """Returns the choice after a request has joined; the one before it becomes history."""
        histogram, tried, accepted = self.histogram.copy(), self.tried.copy(), self.accepted.copy()
        histogram[slot] = 0
        for table in (tried, accepted):
            table[-1] += table[slot]
            table[slot] = 0
        pause = min(self.rule.pause, PAUSE_AFTER_JOIN)
        rule = dataclasses.replace(self.rule, pause=pause)
        return dataclasses.replace(
            self, rule=rule, histogram=histogram, tried=tried, accepted=accepted
        )

    def chosen(self, live: Mapping[int, tuple[int, int]]) -> "DepthChooser":
        """Returns the choice for the next call.

        Args:
          live: by the index of each live row, its tokens so far and the new ones it may still emit.
        """
        if self.times is None or not live:
            return self
        length = max(length for length, _ in live.values())
        left = np.array([left for _, left in live.values()])
        costs = {}
        for depth in self.depths:
            tokens, seconds = self.tokens(depth)[list(live)], self.times.of(depth, length)
            rounds = (left / tokens).max()  # until the last row ends
            per_token = 1 / np.minimum(tokens, left).sum()
            costs[depth] = seconds * (rounds if self.until_last_row_ends else per_token)
        return dataclasses.replace(self, rule=self.rule.next(costs), length=length)

    def tokens(self, depth: int) -> Float[np.ndarray, "B"]:
        """Returns the expected tokens of a round of each row at a depth."""
        return row_tokens(row_rates(self.tried, self.accepted), depth)[:-1]

    def counted(
        self, histogram: Int[np.ndarray, "B A"], rounds: int, seconds: float | None
    ) -> "DepthChooser":
        """Returns the choice after a call.

        Args:
          histogram: the state's, of all rounds since each row joined.
          rounds: of the call.
          seconds: of the call; None: it loaded its program, and does not count.
        """
        histogram = np.array(histogram)[:, : self.depths[-1] + 1]  # the state may be deeper
        new = dataclasses.replace(self, histogram=histogram)
        if self.times is None or not rounds:
            return new
        if seconds is not None:
            times = self.times.corrected(self.depth, self.length, seconds / rounds)
            new = dataclasses.replace(new, times=times)
        if not self.depth:  # nothing was drafted
            return new
        deepest = self.depths[-1]
        since = tried_and_accepted(histogram - self.histogram, self.depth, deepest)
        decay = 0.5 ** (rounds / HALF_LIFE)
        tried, accepted = decay * self.tried, decay * self.accepted
        tried[:-1] += since[0]
        accepted[:-1] += since[1]
        return dataclasses.replace(new, tried=tried, accepted=accepted)


def tried_and_accepted(histogram: npt.ArrayLike, depth: int, deepest: int) -> tuple[Table, Table]:
    """Returns how many rounds of each row tried, and accepted, the token at depth 1, 2, ...

    Args:
      histogram: [B, A], rounds of each row that accepted 0, 1, ... tokens.
      depth: of the tree that ran.
      deepest: D; deeper tokens than `depth` have counts of 0.
    """
    at_least = np.asarray(histogram, float)[:, ::-1].cumsum(1)[:, ::-1]
    tried, accepted = np.zeros((2, len(at_least), deepest))
    tried[:, :depth], accepted[:, :depth] = at_least[:, :depth], at_least[:, 1 : depth + 1]
    return tried, accepted


def row_rates(tried: Table, accepted: Table) -> Table:
    """Returns each row's acceptance rate by depth, given that all tokens before are accepted.

    The arguments are those from `tried_and_accepted`.
    """
    all_tried, all_accepted = tried.sum(0), accepted.sum(0)
    # The rate over all depths counts as one more round: few rounds reach the deepest tokens.
    pooled = (all_accepted + all_accepted.sum() / all_tried.sum()) / (all_tried + 1)
    return (accepted + POOLED_ROUNDS * pooled) / (tried + POOLED_ROUNDS)


def row_tokens(rates: Table, depth: int) -> Float[np.ndarray, "B"]:
    """Returns the expected tokens of each row's round at a depth, bonus token included."""
    return 1 + np.cumprod(rates[:, :depth], axis=1).sum(1)
