"""When to speculate: the depth of an engine's tree in each call of the loop.

The engine compares depths, 0 (plain decoding) included, by expected tokens per second: expected
tokens of a round, summed over the live rows, divided by the seconds of a round. `time_rounds`
measures these seconds at two lengths of the rows before the first request; calls correct them.
Acceptance is counted for each row. A request that has just joined has the rates of all others.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from magicjax.decoding import paired_timing, runner
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request
from magicjax.drafters import Ensemble
from magicjax.engine.templates import Templates, empty_state
from magicjax.prediction.autotune.depth_controller import DepthRule
from magicjax.prediction.autotune.trial import Table, row_rates, row_tokens, tried_and_accepted
from magicjax.settings import Settings
from magicjax.trees.token_tree import ROOT_ONLY, DynamicTree, Tree, truncated
from sharding import processes

HALF_LIFE = 32  # rounds after which counted acceptance has half its weight
FIRST_RATE, FIRST_ROUNDS = 0.7, 8  # acceptance before any is counted, and its weight in rounds
PAUSE_AFTER_JOIN = 16  # the longest pause between probes after a request has joined
REPEATS = 3  # of each timing, after one that loads the program
MAX_CORRECTION = 1.25  # of a depth's seconds by one call: one call can be slow for other reasons


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
      histogram: int [B, A], of the slots after the newest call.
      tried, accepted: [B + 1, D], decayed counts of each slot's request, and of earlier requests.
      times: None: they have not been measured, and the depth does not change.
      length: tokens of the longest live row.
    """

    depths: tuple[int, ...]
    rule: DepthRule
    histogram: Int[np.ndarray, "B A"]
    tried: Table
    accepted: Table
    times: RoundTimes | None = None
    length: int = 0

    @classmethod
    def create(cls, depths: Iterable[int], slots: int) -> "DepthChooser":
        """Returns the choice before any acceptance is counted, at the largest depth."""
        depths = tuple(sorted(depths))
        tried = np.zeros((slots + 1, depths[-1]))
        tried[-1] = FIRST_ROUNDS
        histogram = np.zeros((slots, depths[-1] + 1), np.int32)
        return cls(depths, DepthRule(depths[-1]), histogram, tried, FIRST_RATE * tried)

    @property
    def depth(self) -> int:
        """Of the next call."""
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
          live: of each slot with a live row, its tokens so far and the new ones it may still emit.
        """
        if self.times is None or not live:
            return self
        length = max(length for length, _ in live.values())
        left = np.array([left for _, left in live.values()])
        costs = {
            depth: self.times.of(depth, length)
            / np.minimum(self.tokens(depth)[list(live)], left).sum()
            for depth in self.depths
        }
        return dataclasses.replace(self, rule=self.rule.next(costs), length=length)

    def tokens(self, depth: int) -> Float[np.ndarray, "B"]:
        """Returns the expected tokens of a round of each slot at a depth."""
        return row_tokens(row_rates(self.tried, self.accepted), depth)[:-1]

    def counted(
        self, histogram: Int[np.ndarray, "B A"], rounds: int, seconds: float
    ) -> "DepthChooser":
        """Returns the choice after a call; `histogram` is the state's, since each row joined."""
        new = dataclasses.replace(self, histogram=np.array(histogram))
        if self.times is None or not rounds:
            return new
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


def loops(request: Request, adaptive_depth: bool) -> dict[int, Settings]:
    """Returns the settings of the loop by the depth of its tree.

    Args:
      request: of all rows.
      adaptive_depth: False: only its own tree. True: also 0, 1, 2, 4, ... up to its depth; of a
        dynamic tree only 0, because a shallower one would grow elsewhere.

    Raises:
      ValueError: adaptive_depth without a drafter, for an ensemble whose members have trees of
        their own, for a verifier whose text depends on the depth, for a drafter that cannot be
        timed, or in several processes.
    """
    settings = request.settings
    if not adaptive_depth:
        return {settings.shape.depth: settings}
    _check_adaptive(request)
    tree, deepest = settings.tree, settings.shape.depth
    trees: dict[int, Tree] = {0: ROOT_ONLY, deepest: tree}
    if not isinstance(tree, DynamicTree):
        powers = (2**n for n in range(deepest.bit_length()))
        trees |= {depth: truncated(tree, depth) for depth in powers}
    return {depth: _with_tree(request, trees[depth]) for depth in sorted(trees)}


def _with_tree(request: Request, tree: Tree) -> Settings:
    assert request.drafter is not None
    shape = request.drafter.shape(tree)
    return dataclasses.replace(request.settings.with_tree(tree), shape=shape)


def _check_adaptive(request: Request) -> None:
    drafter, verifier = request.drafter, request.settings.verifier
    if drafter is None:
        raise ValueError(
            "adaptive_depth=True has no effect without a drafter: pass drafter=... or omit "
            "adaptive_depth"
        )
    if isinstance(drafter, Ensemble) and drafter.trees is not None:
        raise ValueError(
            "adaptive_depth=True with an ensemble whose members have trees of their own: pass one "
            "tree for all members, or omit adaptive_depth"
        )
    if verifier not in ("greedy", "naive"):
        raise ValueError(
            f"verifier={verifier!r} with adaptive_depth=True: the text of a seed would depend on "
            "the depths, and so on other requests; use verifier='naive', or omit adaptive_depth"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"adaptive_depth=True in {jax.process_count()} processes, whose times differ: omit "
            "adaptive_depth"
        )
    state = runner.state_shapes(request)
    try:
        jax.eval_shape(drafter.synthetic_state, state.drafter, state.cache.lengths)
    except NotImplementedError as error:
        raise ValueError(
            f"adaptive_depth=True times rounds before the first request, and {error}: define it, "
            "or omit adaptive_depth"
        ) from error


def time_rounds(
    templates: Templates, settings: Mapping[int, Settings], state: DecodeState
) -> tuple[RoundTimes, DecodeState]:
    """Returns (the seconds of rounds at each depth, an empty state); compiles all loops.

    Args:
      templates: of the engine.
      settings: of the loop, by depth.
      state: without live rows; donated.
    """
    request = templates.slots
    lengths = sorted({1, max(1, 3 * templates.capacity // 4)})
    variants = [
        paired_timing.Variant(request, one, "decode_until_row_ends") for one in settings.values()
    ]
    seconds: list[list[float]] = []
    for length in lengths:
        state = _live(templates, state, length)
        drafters = {id(request.drafter): state.drafter}
        times, state = paired_timing.time_interleaved(variants, state, drafters, REPEATS)
        seconds.append([statistics.median(each) for each in times])
        del state, drafters  # before others are allocated
        state = empty_state(templates)
    by_depth = dict(zip(settings, zip(*seconds, strict=True), strict=True))
    return RoundTimes(tuple(lengths), by_depth), state


def _live(templates: Templates, state: DecodeState, length: int) -> DecodeState:
    """Returns a state in which all rows are live and have `length` tokens, of no meaning."""
    request = templates.slots
    assert request.drafter is not None

    def rows(value: Any, like: jax.Array) -> jax.Array:
        return processes.put(np.full(like.shape, value, like.dtype), like.sharding)

    lengths = rows(length, state.cache.lengths)
    # They end before they fill their slots.
    room = request.settings.capacity - length - request.settings.shape.depth - 1
    drafter = request.drafter.synthetic_state(state.drafter, rows(length, lengths))
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, lengths=lengths),
        drafter=jax.tree.map(
            lambda x, old: jax.device_put(x, old.sharding), drafter, state.drafter
        ),
        emitted=rows(1, state.emitted),
        limits=rows(max(2, room), state.limits),
        ended=rows(False, state.ended),
        eos=rows(-1, state.eos),
    )
