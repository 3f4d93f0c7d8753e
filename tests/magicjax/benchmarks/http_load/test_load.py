"""Levels of load: how many requests are in flight, when they are sent, and when they stop."""

import asyncio

import numpy as np
import pytest

from magicjax.benchmarks.http_load import load
from magicjax.benchmarks.http_load.client import OK, Request, Sample, Server
from magicjax.benchmarks.http_load.load import Level, Run, arrivals

ON, OFF = Server("on", "http://on", "a"), Server("off", "http://off", "a")
ANSWER_S = 0.01


@pytest.fixture
def sent(monkeypatch):
    """Requests that were sent, as (label, requests in flight before it)."""
    found, in_flight = [], []

    async def send(client, server, request, start, due):
        found.append((server.label, len(in_flight)))
        in_flight.append(request)
        await asyncio.sleep(ANSWER_S)
        in_flight.pop()
        return Sample(OK, "", due - start, ANSWER_S)

    monkeypatch.setattr(load, "send", send)
    return found


def measure(servers, levels, count, seconds=60.0, repeats=1) -> list[Run]:
    runs: list[Run] = []
    requests = [Request("completions", {"prompt": str(n)}) for n in range(count)]
    options = dict(seconds=seconds, seed=0, repeats=repeats, runs=runs, note=lambda _: None)
    asyncio.run(load.measure(None, servers, levels, requests, **options))
    return runs


def test_a_closed_loop_keeps_its_concurrency(sent):
    (run,) = measure([ON], [Level(concurrency=3)], 9)
    assert len(run.samples) == 9 and run.seconds >= 3 * ANSWER_S
    assert [before for _, before in sent] == [0, 1, 2] + 6 * [2]


def test_an_open_loop_sends_when_requests_are_due(sent):
    (run,) = measure([ON], [Level(rate=1e4)], 20)
    due = arrivals(1e4, 20, 0)
    assert sorted(sample.due_s for sample in run.samples) == pytest.approx(due)
    assert max(before for _, before in sent) > 5  # answers are not waited for


def test_arrivals_are_poisson_and_scale_with_the_rate():
    slow, fast = (np.array(arrivals(rate, 4000, 3)) for rate in (1.0, 4.0))
    np.testing.assert_allclose(slow, 4 * fast)
    gaps = np.diff(slow)
    assert slow[0] == 0 and gaps.min() > 0
    assert gaps.mean() == pytest.approx(1, rel=0.1) and gaps.std() == pytest.approx(1, rel=0.1)
    assert arrivals(1.0, 5, 3) != arrivals(1.0, 5, 4)
