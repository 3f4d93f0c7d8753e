"""When to speculate and with what: the mode of each call of the loop, from acceptance and times.

A mode is plain decoding, or a drafter with a depth of its tree. An engine, whose rows are requests,
takes the mode of the most expected tokens per second. A batch that is done when its last row ends
takes the mode at which that row ends soonest. Both compare modes by the expected tokens of a round
of each row and by its seconds. The mode changes only for a gain above `HYSTERESIS`.

A drafter that does not draft has no new acceptance, unless it simulates its rounds
(`Drafter.simulated`). The others are probed: a call of `PROBE_ROUNDS` rounds runs the smallest tree
of the drafter that has been idle for longest. Probes are at most `PROBE_SHARE` of all rounds, and a
drafter that could not gain if all its tokens were accepted is not probed.

Plain rounds do not run a drafter that can be disabled (`Drafter.can_be_disabled`), nor does prefill
of a row that joins while they are the best. Speculation is then disabled for the row: it emits one
token per round, whatever the mode, and a drafter is not probed for such rows alone.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from magicjax.decoding.counts import tried_and_accepted

HYSTERESIS = 0.05  # the least relative gain for a change of the mode
HALF_LIFE = 16  # rounds after which counted acceptance has half its weight
IDLE_HALF_LIFE = 64  # the same for a drafter that does not draft
FIRST_RATE, FIRST_ROUNDS = 0.7, 8  # acceptance before any is counted, and its weight in rounds
POOLED_ROUNDS = 4  # rounds of the whole batch that are added to each row's counts
MAX_CORRECTION = 1.25  # of a mode's seconds by one call: one call can be slow for other reasons
PROBE_SHARE = 0.02  # of all rounds
PROBE_ROUNDS = 2  # of a probe
FREE_PROBE_ROUNDS = 4  # before any are earned
ENDLESS = 1 << 20  # new tokens of a row that ends after many rounds
IDLE_ROUNDS = 32  # without new acceptance, before a drafter is probed

Table = Float[np.ndarray, "B D"]
Histogram = Int[np.ndarray, "B A"]


class Mode(NamedTuple):
    """A mode of speculation: what a call of the loop drafts.

    Attributes:
      drafter: its name; several names for an ensemble; "" for plain decoding.
      depth: the depth of its tree; 0 for plain decoding.
    """

    drafter: str
    depth: int

    def __str__(self) -> str:
        return f"{self.drafter} {self.depth}" if self.depth else "plain"


PLAIN = Mode("", 0)


@dataclasses.dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round by mode, by the length of the rows, and by the number of live ones.

    Attributes:
      lengths: increasing, tokens in the target's cache of each row.
      seconds: seconds by mode, at each length, for each number of live rows.
      rows: increasing numbers of live rows.
      speed: measured divided by expected seconds of the newest call, which the machine's other
        work changes; the same for all modes.
      newest: mode of the newest call; None: there was none.
    """

    lengths: tuple[int, ...]
    seconds: Mapping[Mode, tuple[float, ...]]
    rows: tuple[int, ...] = (1,)
    speed: float = 1.0
    newest: Mode | None = None

    def of(self, mode: Mode, length: int, rows: int) -> float:
        """Returns the expected seconds of a mode, interpolated between lengths and live rows."""
        table = np.reshape(self.seconds[mode], (len(self.rows), len(self.lengths)))
        by_rows = [np.interp(length, self.lengths, seconds) for seconds in table]
        return float(np.interp(rows, self.rows, by_rows))

    def corrected(self, mode: Mode, length: int, rows: int, seconds: float) -> "RoundTimes":
        """Returns the times after a call in which a round took so many seconds.

        While the mode stays the same, a change is the machine's. A jump at a change of the mode is
        an error of that mode's seconds, half of which is corrected.
        """
        ratio = seconds / self.of(mode, length, rows)
        if self.newest in (None, mode):
            return dataclasses.replace(self, speed=ratio, newest=mode)
        jump = np.clip(ratio / self.speed, 1 / MAX_CORRECTION, MAX_CORRECTION)
        corrected = tuple(float(s * jump**0.5) for s in self.seconds[mode])
        return dataclasses.replace(self, seconds={**self.seconds, mode: corrected}, newest=mode)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counted acceptance of one drafter.

    Attributes:
      tried, accepted: [B + 1, D], decayed counts of each row, and of what was known before: earlier
        requests, or trials.
      simulated: int [B, A], simulated rounds of each row that accepted 0, 1, ... tokens; None for a
        drafter that simulates none.
      idle: rounds since the newest count.
    """

    tried: Table
    accepted: Table
    simulated: Histogram | None = None
    idle: int = 0

    @classmethod
    def known(cls, rows: int, deepest: int, rates: Sequence[float], rounds: float) -> "Acceptance":
        """Returns the acceptance before any is counted; see `Controller.create`."""
        rate_by_depth = [*rates, *[rates[-1] if rates else 0.0] * deepest][:deepest]
        tried = np.zeros((rows + 1, deepest))
        tried[-1] = rounds
        return cls(tried, np.array(rate_by_depth) * tried)

    def joined(self, slot: int) -> "Acceptance":
        """Returns the acceptance after a request has joined; the one before becomes history."""
        tried, accepted = self.tried.copy(), self.accepted.copy()
        for table in (tried, accepted):
            table[-1] += table[slot]
            table[slot] = 0
        simulated = None if self.simulated is None else self.simulated.copy()
        if simulated is not None:
            simulated[slot] = 0
        return dataclasses.replace(self, tried=tried, accepted=accepted, simulated=simulated)

    def counted(self, new_histogram: Histogram, depth: int, rounds: int) -> "Acceptance":
        """Returns the acceptance after new rounds.

        Args:
          new_histogram: int [B, A], new rounds of each row that accepted 0, 1, ... tokens.
          depth: the depth of the tree that ran.
          rounds: number of rounds of the call.
        """
        new = self._decayed(rounds, HALF_LIFE)
        tried, accepted = tried_and_accepted(new_histogram, depth, self.tried.shape[1])
        new.tried[:-1] += tried
        new.accepted[:-1] += accepted
        return dataclasses.replace(new, idle=0)

    def passed(self, rounds: int) -> "Acceptance":
        """Returns the acceptance after rounds in which the drafter did not draft.

        What was known decays down to the weight of `FIRST_ROUNDS` rounds.
        """
        outweighs = self.tried[:, 0].sum() > FIRST_ROUNDS
        new = self._decayed(rounds, IDLE_HALF_LIFE) if outweighs else self
        return dataclasses.replace(new, idle=self.idle + rounds)

    def _decayed(self, rounds: int, half_life: float) -> "Acceptance":
        decay = 0.5 ** (rounds / half_life)
        return dataclasses.replace(self, tried=decay * self.tried, accepted=decay * self.accepted)

    def tokens(self, depth: int) -> Float[np.ndarray, "B"]:
        """Returns the expected tokens of a round of each row at a depth."""
        return row_tokens(row_rates(self.tried, self.accepted), depth)[:-1]


@dataclasses.dataclass(frozen=True)
class Probes:
    """The rounds that probes may run, and what they cost.

    Attributes:
      rounds: number of rounds of all calls.
      probed: number of rounds of probes.
      lost_s: seconds of probes beyond those in which the mode before would have emitted as many
        tokens.
    """

    rounds: int = 0
    probed: int = 0
    lost_s: float = 0.0

    @property
    def allowed(self) -> bool:
        """Whether the next call may be a probe."""
        earned = FREE_PROBE_ROUNDS + PROBE_SHARE * self.rounds
        return self.probed + PROBE_ROUNDS <= earned


@dataclasses.dataclass(frozen=True)
class Controller:
    """The choice of the mode; each method returns the next one.

    Attributes:
      modes: to choose from.
      mode: the mode of the next call.
      best: the same, except before a probe: the mode to return to.
      histogram: int [B, A], rounds of each row that accepted 0, 1, ... tokens, after the newest
        call.
      acceptance: acceptance by drafter.
      times: seconds of a round by mode; None: they have not been measured, and the mode does not
        change.
      length: tokens of the longest live row.
      live: number of live rows.
      until_last_row_ends: whether to minimise the time until the last row ends, rather than to
        maximise tokens per second.
      probes: count and cost of probes.
      can_be_disabled: whether plain rounds do not run the drafter.
      disabled: the rows without speculation, until another request joins there.
    """

    modes: tuple[Mode, ...]
    mode: Mode
    best: Mode
    histogram: Histogram
    acceptance: Mapping[str, Acceptance]
    times: RoundTimes | None = None
    length: int = 0
    live: int = 0
    until_last_row_ends: bool = False
    probes: Probes = Probes()
    can_be_disabled: bool = False
    disabled: frozenset[int] = frozenset()

    @classmethod
    def create(
        cls,
        modes: Iterable[Mode],
        rows: int,
        *,
        first: Mode | None = None,
        rates: Sequence[float] = (FIRST_RATE,),
        rounds: float = FIRST_ROUNDS,
        times: RoundTimes | None = None,
        until_last_row_ends: bool = False,
        can_be_disabled: bool = False,
    ) -> "Controller":
        """Returns the choice before any acceptance is counted.

        Args:
          modes: to choose from.
          rows: B, of the batch.
          first: the mode of the first call; None: the deepest.
          rates: acceptance rates by depth, given that all tokens before are accepted; the last one
            also stands for deeper tokens. Empty: 0.
          rounds: the weight of these rates.
          times, until_last_row_ends, can_be_disabled: see the class.
        """
        modes = tuple(modes)
        first = first or max(modes, key=lambda mode: mode.depth)
        deepest: dict[str, int] = {}
        for mode in modes:
            if mode.depth:
                deepest[mode.drafter] = max(mode.depth, deepest.get(mode.drafter, 0))
        return cls(
            modes,
            first,
            first,
            np.zeros((rows, 1 + max(mode.depth for mode in modes)), np.int32),
            {name: Acceptance.known(rows, d, rates, rounds) for name, d in deepest.items()},
            times,
            until_last_row_ends=until_last_row_ends,
            can_be_disabled=can_be_disabled,
        )

    @property
    def is_probe(self) -> bool:
        """Whether the next call is a probe, of at most `PROBE_ROUNDS` rounds."""
        return self.mode != self.best

    def would_disable(
        self, live: Mapping[int, tuple[int, int]], joining: Mapping[int, tuple[int, int]]
    ) -> bool:
        """Returns whether speculation should be disabled for rows that join.

        Args:
          live, joining: by the index of each live row, and of each that joins, its tokens so far
            and the new ones it may still emit.
        """
        if not self.can_be_disabled:
            return False
        joined = functools.reduce(Controller.joined, joining, self)
        return not joined.chosen({**live, **joining}).mode.depth  # a probe needs rows that draft

    def joined(self, slot: int, disabled: bool = False) -> "Controller":
        """Returns the choice after a request has joined; the one before it becomes history.

        Args:
          slot: the row's slot.
          disabled: whether speculation is disabled for it.
        """
        histogram = self.histogram.copy()
        histogram[slot] = 0
        acceptance = {name: counts.joined(slot) for name, counts in self.acceptance.items()}
        others = self.disabled - {slot}
        return dataclasses.replace(
            self,
            histogram=histogram,
            acceptance=acceptance,
            disabled=others | {slot} if disabled else others,
        )

    def chosen(self, live: Mapping[int, tuple[int, int]]) -> "Controller":
        """Returns the choice for the next call.

        Args:
          live: by the index of each live row, its tokens so far and the new ones it may still emit.
        """
        if self.times is None or not live:
            return self
        longest = max(length for length, _ in live.values())
        new = dataclasses.replace(self, length=longest, live=len(live))
        remaining = np.array([remaining for _, remaining in live.values()])
        if self.can_be_disabled:  # a choice for the whole rest of the requests
            remaining = np.full_like(remaining, ENDLESS)
        costs = {
            mode: new._cost(mode, new.tokens(mode)[list(live)], remaining) for mode in self.modes
        }
        best = min(costs, key=lambda mode: costs[mode])
        if costs[self.best] <= (1 + HYSTERESIS) * costs[best]:
            best = self.best
        probe = None
        if self.probes.allowed:
            probe = new._probe(best, costs[best], list(live), remaining)
        return new.running(probe or best, best, live)

    def running(self, mode: Mode, best: Mode, live: Iterable[int]) -> "Controller":
        """Returns the choice of a mode, which these live rows run."""
        disabled = self.disabled
        if self.can_be_disabled and not mode.depth:
            disabled = disabled.union(live)
        return dataclasses.replace(self, mode=mode, best=best, disabled=disabled)

    def _cost(
        self, mode: Mode, tokens: Float[np.ndarray, "B"], remaining: Int[np.ndarray, "B"]
    ) -> float:
        """Returns the seconds per token of a mode, or those until the last row ends."""
        assert self.times is not None
        seconds = self.times.of(mode, self.length, self.live)
        if self.until_last_row_ends:
            return float(seconds * (remaining / tokens).max())
        return float(seconds / np.minimum(tokens, remaining).sum())

    def _probe(
        self, best: Mode, cost: float, rows: Sequence[int], remaining: Int[np.ndarray, "B"]
    ) -> Mode | None:
        """Returns the mode of a probe; None if no drafter is idle and could gain on these rows."""
        drafts = np.array([row not in self.disabled for row in rows])
        idle = [
            name
            for name, acceptance in self.acceptance.items()
            if name != best.drafter and acceptance.idle >= IDLE_ROUNDS
        ]
        for name in sorted(idle, key=lambda name: -self.acceptance[name].idle):
            modes = [mode for mode in self.modes if mode.drafter == name]
            if any(self._cost(mode, 1.0 + mode.depth * drafts, remaining) < cost for mode in modes):
                return min(modes, key=lambda mode: mode.depth)
        return None

    def tokens(self, mode: Mode) -> Float[np.ndarray, "B"]:
        """Returns the expected tokens of a round of each row."""
        if not mode.depth:
            return np.ones(len(self.histogram))
        tokens = self.acceptance[mode.drafter].tokens(mode.depth)
        tokens[list(self.disabled)] = 1
        return tokens

    def counted(
        self,
        histogram: Histogram,
        rounds: int,
        seconds: float | None,
        simulated: Mapping[str, Histogram] | None = None,
    ) -> "Controller":
        """Returns the choice after a call.

        Args:
          histogram: the state's, of all rounds since each row joined.
          rounds: number of rounds of the call.
          seconds: duration of the call; None: it loaded its program, and does not count.
          simulated: histograms of the simulated rounds, by drafter.
        """
        histogram = np.array(histogram)[:, : self.histogram.shape[1]]  # the state may be deeper
        if self.times is None or not rounds:
            return dataclasses.replace(self, histogram=histogram)
        times, probes = self.times, self.probes
        new_histogram = histogram - self.histogram
        new_histogram[list(self.disabled)] = 0
        if seconds is not None:
            times = times.corrected(self.mode, self.length, self.live, seconds / rounds)
        probes = dataclasses.replace(probes, rounds=probes.rounds + rounds)
        if self.is_probe:
            lost_s = 0.0 if seconds is None else seconds - self._seconds_at_best(new_histogram)
            probes = dataclasses.replace(
                probes, probed=probes.probed + rounds, lost_s=probes.lost_s + lost_s
            )
        acceptance = {
            name: self._counted_for(name, new_histogram, rounds, (simulated or {}).get(name))
            for name in self.acceptance
        }
        return dataclasses.replace(
            self, histogram=histogram, acceptance=acceptance, times=times, probes=probes
        )

    def _counted_for(
        self, name: str, new_histogram: Histogram, rounds: int, simulated: Histogram | None
    ) -> Acceptance:
        """Returns the acceptance of a drafter after a call; arguments as in `counted`."""
        acceptance = self.acceptance[name]
        if simulated is not None:
            simulated = np.array(simulated)
            before = 0 if acceptance.simulated is None else acceptance.simulated
            acceptance = dataclasses.replace(acceptance, simulated=simulated)
            if name != self.mode.drafter and (simulated != before).any():
                return acceptance.counted(simulated - before, simulated.shape[1] - 1, rounds)
        if name == self.mode.drafter:
            return acceptance.counted(new_histogram, self.mode.depth, rounds)
        return acceptance.passed(rounds)

    def _seconds_at_best(self, new_histogram: Histogram) -> float:
        """Returns the expected seconds of the mode before a probe for the tokens of the probe."""
        assert self.times is not None
        if not new_histogram.any():  # no row drafts
            return 0.0
        emitted = (new_histogram @ (1 + np.arange(new_histogram.shape[1]))).sum()
        per_round = self.tokens(self.best)[new_histogram.any(1)].sum()
        seconds = self.times.speed * self.times.of(self.best, self.length, self.live)
        return float(seconds * emitted / per_round)


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
