"""Statistics of an engine."""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from magicjax.checks import counted
from magicjax.decoding.controller import Mode, Probes
from magicjax.decoding.decoder import Clock
from magicjax.decoding.text import FINISH_REASONS, Result
from magicjax.engine.prefix_store import PrefixStore
from magicjax.engine.scheduler import Scheduler

TIMES = ("queue_s", "ttft_s", "tpot_s", "itl_s")
WINDOW = 1024  # the newest values of each time, of which percentiles are taken


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Percentiles of the newest values."""

    p50: float
    p90: float
    p99: float


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts and times since the engine was created or warmed up; seconds of the wall clock.

    Attributes:
      finished: number of requests by finish reason.
      waiting, running: requests in the queue or in prefill, and in slots.
      new_tokens: tokens of finished requests.
      steps: calls of `Engine.step`.
      loop_s, prefill_s: seconds of the compiled loop, and of the programs that prefill and copy
        rows.
      host_s: seconds of the steps, without the two before and without compilation: scheduling,
        transfers and detokenization.
      tokens_per_s: new_tokens divided by the sum of the three times.
      prefix_lookups, prefix_hits: prompts looked up in the prefix store, and those that reused
        tokens.
      prefix_host_hits: the hits of prefixes that were in host memory.
      reused_tokens: prompt tokens whose keys and values were stored; the last of them are
        computed again where a drafter reads their attention.
      prefix_bytes, prefix_host_bytes: bytes of the prefixes on the device and in host memory.
      kv_bytes: bytes of the keys and values of all slots, target and drafter.
      rounds_by_arm: rounds of the loop by what drafted, and the depth of its tree.
      probe_rounds: rounds of the loop that measured the acceptance of an idle drafter.
      probe_lost_s: seconds of these rounds, beyond those that their tokens would have taken.
      queue_s, ttft_s, tpot_s, itl_s: percentiles of the newest 1,024 values of `RequestStats` of
        finished requests, cancelled ones excluded; None without a value.
    """

    finished: dict[str, int]
    waiting: int
    running: int
    new_tokens: int
    steps: int
    loop_s: float
    prefill_s: float
    host_s: float
    tokens_per_s: float
    prefix_lookups: int
    prefix_hits: int
    prefix_host_hits: int
    reused_tokens: int
    prefix_bytes: int
    prefix_host_bytes: int
    kv_bytes: int
    rounds_by_arm: dict[Mode, int]
    probe_rounds: int
    probe_lost_s: float
    queue_s: Percentiles | None
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None

    def __str__(self) -> str:
        """Returns requests, rates, times and memory as a few lines of text."""
        reasons = ", ".join(f"{reason} {n}" for reason, n in self.finished.items() if n)
        rounds = ", ".join(f"{mode}: {n}" for mode, n in self.rounds_by_arm.items() if n)
        lines = [
            f"{counted(sum(self.finished.values()), 'request')} finished"
            + (f" ({reasons})" if reasons else "")
            + f", {self.running} running, {self.waiting} waiting",
            f"{counted(self.new_tokens, 'token')}: {self.tokens_per_s:.1f} tokens/s, "
            f"loop {self.loop_s:.3f} s, prefill {self.prefill_s:.3f} s, host {self.host_s:.3f} s "
            f"({counted(self.steps, 'step')})",
        ]
        if rounds:
            lines.append(f"rounds by drafter and depth  {rounds}")
        for name in TIMES:
            if (times := getattr(self, name)) is not None:
                label = name.removesuffix("_s")
                percentiles = f"p50 {times.p50:.3f}  p90 {times.p90:.3f}  p99 {times.p99:.3f}"
                lines.append(f"{label:<6}{percentiles} s")
        if self.prefix_lookups:
            lines.append(
                f"prefixes: {self.prefix_hits} of {counted(self.prefix_lookups, 'prompt')} reused "
                f"{counted(self.reused_tokens, 'token')}; {self.prefix_bytes / 1e6:.1f} MB on the "
                f"device, {self.prefix_host_bytes / 1e6:.1f} MB in host memory"
            )
        return "\n".join([*lines, f"KV cache: {self.kv_bytes / 1e6:.1f} MB"])


class Counters:
    """What an engine counts; the fields are those of `EngineStats`."""

    def __init__(self, modes: Iterable[Mode]):
        """Starts at 0; `modes` are those of the loop."""
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.steps = self.new_tokens = 0
        self.host_s = 0.0
        self.rounds_by_arm = dict.fromkeys(modes, 0)
        self._newest = {name: collections.deque[float](maxlen=WINDOW) for name in TIMES}
        self._percentiles: dict[str, Percentiles | None] = dict.fromkeys(self._newest)
        self._changed = False  # since the percentiles were computed

    def count(self, result: Result) -> None:
        """Counts a finished request."""
        self.finished[result.finish_reason] += 1
        self.new_tokens += len(result.tokens)
        if result.finish_reason == "cancelled":
            return
        stats, newest = result.stats, self._newest
        newest["queue_s"].append(stats.queue_s)
        if stats.ttft_s is not None:
            newest["ttft_s"].append(stats.ttft_s)
        if stats.tpot_s is not None:
            newest["tpot_s"].append(stats.tpot_s)
        newest["itl_s"].extend(stats.itl_s)
        self._changed = True

    def stats(
        self,
        scheduler: Scheduler,
        store: PrefixStore,
        clock: Clock,
        kv_bytes: int,
        probes: Probes,
    ) -> EngineStats:
        """Returns the statistics so far."""
        seconds = clock.prefill_s + clock.decode_s + self.host_s
        if self._changed:  # a server reads the statistics after every step
            self._percentiles = {
                name: _percentiles(values) for name, values in self._newest.items()
            }
            self._changed = False
        return EngineStats(
            finished=dict(self.finished),
            waiting=len(scheduler.waiting) + len(scheduler.prefilling),
            running=len(scheduler.running),
            new_tokens=self.new_tokens,
            steps=self.steps,
            loop_s=clock.decode_s,
            prefill_s=clock.prefill_s,
            host_s=self.host_s,
            tokens_per_s=self.new_tokens / seconds if seconds else 0.0,
            prefix_lookups=store.lookups,
            prefix_hits=store.hits,
            prefix_host_hits=store.host_hits,
            reused_tokens=store.reused_tokens,
            prefix_bytes=store.num_bytes,
            prefix_host_bytes=store.num_host_bytes,
            kv_bytes=kv_bytes,
            rounds_by_arm=dict(self.rounds_by_arm),
            probe_rounds=probes.probed,
            probe_lost_s=probes.lost_s,
            **self._percentiles,
        )


def _percentiles(values: Iterable[float]) -> Percentiles | None:
    array = np.fromiter(values, float)
    return Percentiles(*np.percentile(array, (50, 90, 99)).tolist()) if len(array) else None
