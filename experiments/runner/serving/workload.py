"""Requests of ragged lengths that arrive over time, and how an engine served them."""

import bisect
import dataclasses
import time
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int

import magicjax
from magicjax.decoding.controller import Mode
from magicjax.engine.handle import Handle, RequestStats


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests: token ids, parameters, and seconds of arrival, which increase."""

    rows: list[np.ndarray]
    params: list[magicjax.SamplingParams]
    arrivals: list[float]


@dataclasses.dataclass(frozen=True)
class ServingRun:
    """One run: its texts and seconds, and of each request the seconds from its arrival.

    Attributes:
      texts: new tokens of each request.
      seconds: from the first arrival to the last end.
      prefill_s: of all requests.
      ttft_s: time to first token.
      total_s: time to the end of the request.
      stats: of each request.
      rounds_by_arm: of the engine's loop.
    """

    texts: list[np.ndarray]
    seconds: float
    ttft_s: list[float]
    total_s: list[float]
    prefill_s: float
    stats: tuple[RequestStats, ...]
    rounds_by_arm: Mapping[Mode, int]

    @property
    def tpot_s(self) -> list[float | None]:
        """Time per output token after the first ones that arrived; None if no others did."""
        return [request.tpot_s for request in self.stats]

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Returns the requests per second that meet both limits.

        A request without a time per output token meets any limit of it.
        """
        met = sum(
            ttft <= ttft_s and (tpot or 0.0) <= tpot_s
            for ttft, tpot in zip(self.ttft_s, self.tpot_s, strict=True)
        )
        return met / self.seconds


def percentiles(values: Iterable[float | None]) -> dict[int, float]:
    """Returns the median and the 95th percentile; 0 without values."""
    known = [value for value in values if value is not None] or [0.0]
    return {p: float(np.percentile(known, p)) for p in (50, 95)}


def arrivals(kind: str, rate: float, count: int, seed: int) -> list[float]:
    """Returns the seconds of arrival.

    Args:
      kind: "poisson" has exponential intervals, the same for all rates but for a factor; with
        "burst:n", n requests arrive together, at equal intervals.
      rate: mean requests per second; infinity: all arrive at once.
      count, seed: of the requests.
    """
    if kind == "poisson":
        gaps = np.random.default_rng([seed, 1]).exponential(size=count)
        return ((np.cumsum(gaps) - gaps[0]) / rate).tolist()
    size = int(kind.removeprefix("burst:"))
    return [n // size * size / rate for n in range(count)]


def ragged(rng: np.random.Generator, low: int, high: int, count: int) -> Int[np.ndarray, "N"]:
    """Returns lengths from `low` to `high`, uniform in the logarithm."""
    drawn = np.exp(rng.uniform(np.log(low), np.log(high + 1), count))
    return np.clip(drawn.astype(int), low, high)  # rounding can cross a bound


def zipf(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    """Returns numbers from `low` to `high`, n with a probability proportional to 1/n."""
    numbers = np.arange(low, high + 1)
    return rng.choice(numbers, count, p=(1 / numbers) / (1 / numbers).sum()).tolist()


def serve(engine: magicjax.Engine, workload: Workload) -> ServingRun:
    """Returns the run of an engine; sleeps while no request has arrived.

    Args:
      engine: idle.
      workload: the requests, each of which is submitted when it arrives.
    """
    before, start, count = engine.stats, time.monotonic(), len(workload.rows)
    handles: list[Handle] = []
    unfinished: dict[int, Handle] = {}
    while len(handles) < count or unfinished:
        now = time.monotonic() - start
        arrived = bisect.bisect_right(workload.arrivals, now)
        for i in range(len(handles), arrived):
            handles.append(engine.submit(workload.rows[i], workload.params[i]))
            unfinished[i] = handles[i]
        if not unfinished:
            time.sleep(max(0.0, workload.arrivals[len(handles)] - now))
            continue
        engine.step()
        unfinished = {i: handle for i, handle in unfinished.items() if not handle.finished}
    results = [handle.result() for handle in handles]
    submit_delays = [  # from the arrival, which can be during a step, to `submit`
        handle.submitted_at - start - arrival
        for handle, arrival in zip(handles, workload.arrivals, strict=True)
    ]
    return ServingRun(
        [result.tokens for result in results],
        time.monotonic() - start,
        [
            (result.stats.ttft_s or 0.0) + delay
            for result, delay in zip(results, submit_delays, strict=True)
        ],
        [
            result.stats.total_s + delay
            for result, delay in zip(results, submit_delays, strict=True)
        ],
        engine.stats.prefill_s - before.prefill_s,
        tuple(result.stats for result in results),
        {a: n - before.rounds_by_arm[a] for a, n in engine.stats.rounds_by_arm.items()},
    )
