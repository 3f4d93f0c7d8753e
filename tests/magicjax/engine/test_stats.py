"""Percentiles of an engine: those of NumPy over the newest values of finished requests."""

from types import SimpleNamespace

import numpy as np

from magicjax.decoding.controller import PLAIN, Mode, Probes
from magicjax.decoding.decoder import Clock
from magicjax.decoding.text import Result
from magicjax.engine.handle import RequestStats
from magicjax.engine.stats import WINDOW, Counters, EngineStats, Percentiles

SCHEDULER = SimpleNamespace(waiting=[], prefilling=[], running={})
STORE = SimpleNamespace(lookups=0, hits=0, host_hits=0, reused_tokens=0)
STORE.num_bytes = STORE.num_host_bytes = 0


def result(reason: str = "length", **times) -> Result:
    counts = dict(prompt_tokens=1, new_tokens=1, reused_tokens=0, prefilled_tokens=1)
    times = dict(queue_s=0.0, ttft_s=None, tpot_s=None, itl_s=(), total_s=1.0) | times
    stats = RequestStats(finish_reason=reason, **counts, **times)
    return Result(np.zeros(1, np.int32), np.zeros(1, np.int32), None, None, None, reason, stats)


def stats(counters: Counters) -> EngineStats:
    return counters.stats(SCHEDULER, STORE, Clock(), 0, Probes())


def test_percentiles_are_those_of_the_newest_values():
    rng, counters = np.random.default_rng(0), Counters([])
    queue_s, ttft_s, tpot_s = rng.random((3, WINDOW + 100))
    itl_s = rng.random((WINDOW + 100, 3))
    for a, b, c, d in zip(queue_s, ttft_s, tpot_s, itl_s, strict=True):
        counters.count(result(queue_s=a, ttft_s=b, tpot_s=c, itl_s=tuple(d)))
        if a < 0.01:
            stats(counters)  # between two requests
    found = stats(counters)
    for name, values in dict(queue_s=queue_s, ttft_s=ttft_s, tpot_s=tpot_s, itl_s=itl_s).items():
        newest = np.percentile(values.ravel()[-WINDOW:], (50, 90, 99))
        each = getattr(found, name)
        np.testing.assert_allclose((each.p50, each.p90, each.p99), newest)


def test_requests_without_a_time_do_not_count():
    counters = Counters([])
    assert stats(counters).ttft_s is stats(counters).itl_s is None
    counters.count(result(queue_s=1.0))
    counters.count(result("cancelled", queue_s=3.0, ttft_s=3.0))
    found = stats(counters)
    assert found.queue_s == Percentiles(1.0, 1.0, 1.0) and found.ttft_s is found.tpot_s is None
    counters.count(result("deadline", queue_s=2.0, ttft_s=0.5))
    assert stats(counters).ttft_s == Percentiles(0.5, 0.5, 0.5)
    assert stats(counters).queue_s.p50 == 1.5


def test_printed_statistics_are_a_few_lines_without_empty_ones():
    counters = Counters([PLAIN, Mode("prompt-lookup", 4)])
    assert str(stats(counters)).splitlines() == [
        "0 requests finished, 0 running, 0 waiting",
        "0 tokens: 0.0 tokens/s, loop 0.000 s, prefill 0.000 s, host 0.000 s (0 steps)",
        "KV cache: 0.0 MB",
    ]
    counters.count(result(ttft_s=0.5))
    counters.rounds_by_arm[Mode("prompt-lookup", 4)] = 3
    counters.host_s, counters.steps = 0.25, 1
    store = SimpleNamespace(**vars(STORE) | dict(lookups=2, hits=1, reused_tokens=7))
    found = counters.stats(SCHEDULER, store, Clock(0.25, 0.5), 3_000_000, Probes())
    assert str(found).splitlines() == [
        "1 request finished (length 1), 0 running, 0 waiting",
        "1 token: 1.0 tokens/s, loop 0.500 s, prefill 0.250 s, host 0.250 s (1 step)",
        "rounds by drafter and depth  prompt-lookup 4: 3",
        "queue p50 0.000  p90 0.000  p99 0.000 s",
        "ttft  p50 0.500  p90 0.500  p99 0.500 s",
        "prefixes: 1 of 2 prompts reused 7 tokens; 0.0 MB on the device, 0.0 MB in host memory",
        "KV cache: 3.0 MB",
    ]
