"""Levels of load, closed and open, on servers that take turns."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx
import numpy as np

from magicjax.benchmarks.http_load.client import OK, Request, Sample, Server, send


@dataclasses.dataclass(frozen=True)
class Level:
    """Concurrency, a closed loop, or requests per second, a Poisson process."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g}/s"


@dataclasses.dataclass
class Run:
    """One level on one server.

    Attributes:
      server, level: which.
      samples: requests in the order of their ends.
      seconds: from the first request to the last end.
    """

    server: Server
    level: Level
    samples: list[Sample] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


async def warm_up(
    client: httpx.AsyncClient, servers: Sequence[Server], request: Request
) -> list[Sample]:
    """Returns the samples of a request to every server; raises ValueError if one fails."""
    samples = []
    for server in servers:
        now = time.perf_counter()
        sample = await send(client, server, request, now, now)
        if sample.status != OK:
            raise ValueError(
                f"url={server.url}: the first request failed: {sample.status}: {sample.error}"
            )
        samples.append(sample)
    return samples


async def measure(
    client: httpx.AsyncClient,
    servers: Sequence[Server],
    levels: Sequence[Level],
    requests: Sequence[Request],
    *,
    seconds: float,
    seed: int,
    repeats: int,
    runs: list[Run],
    note: Callable[[str], None],
) -> None:
    """Appends the runs to `runs`: each level on all servers, whose order alternates.

    An interrupt leaves the runs so far, the last one with the requests that have ended.

    Args:
      client: with the key.
      servers, levels: what to measure.
      requests: of each run.
      seconds: after which a run sends no more requests; those that were sent end.
      seed: of the arrivals.
      repeats: of all levels.
      runs: to append to.
      note: prints a line.
    """
    for repeat, (number, level) in itertools.product(range(repeats), enumerate(levels)):
        for server in servers if (repeat + number) % 2 == 0 else reversed(servers):
            run = Run(server, level)
            runs.append(run)
            await _fill(client, run, requests, seconds, seed)
            note(
                f"{server.label}, {level.label}: {len(run.samples)} requests in {run.seconds:.1f} s"
            )


async def _fill(
    client: httpx.AsyncClient, run: Run, requests: Sequence[Request], seconds: float, seed: int
) -> None:
    start = time.perf_counter()

    async def post(request: Request, due: float) -> None:
        run.samples.append(await send(client, run.server, request, start, due))

    try:
        if run.level.rate is None:
            assert run.level.concurrency is not None
            await _closed(post, run.level.concurrency, requests, start + seconds)
        else:
            due = [start + at for at in arrivals(run.level.rate, len(requests), seed)]
            await _open(post, due, requests, start + seconds)
    finally:
        run.seconds = time.perf_counter() - start


Post = Callable[[Request, float], Coroutine[Any, Any, None]]


async def _closed(post: Post, concurrency: int, requests: Sequence[Request], until: float) -> None:
    """Sends the requests from users who wait for one answer before they send the next request."""
    waiting = iter(requests)

    async def user() -> None:
        while (now := time.perf_counter()) < until and (request := next(waiting, None)):
            await post(request, now)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(user())


async def _open(
    post: Post, due: Sequence[float], requests: Sequence[Request], until: float
) -> None:
    """Sends the requests when they are due, whatever has been answered."""
    async with asyncio.TaskGroup() as group:
        for request, at in zip(requests, due, strict=True):
            if at >= until:
                break
            await asyncio.sleep(at - time.perf_counter())
            group.create_task(post(request, at))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Returns the seconds of Poisson arrivals, the first at 0; rates differ by a factor only."""
    gaps = np.random.default_rng(seed).exponential(size=count)
    return ((np.cumsum(gaps) - gaps[0]) / rate).tolist()
