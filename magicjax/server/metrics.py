"""Metrics in the format of Prometheus."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from magicjax.engine.handle import Result
from magicjax.server.worker import Snapshot

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)


class Metrics:
    """The registry of one server.

    Attributes:
      registry: for `prometheus_client.generate_latest`.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], slots: int):
        """Registers all metrics; `snapshot` returns the newest state of the engine."""
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(snapshot, slots))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"magicjax_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"magicjax_{name}", text, buckets=buckets, registry=self.registry)

        self._prompt = counter("prompt_tokens", "Tokens of prompts of finished requests")
        self._new = counter("new_tokens", "New tokens of finished requests")
        self._drafted = counter("drafted_tokens", "Drafted tokens of finished requests")
        self._accepted = counter("accepted_tokens", "Accepted drafted tokens of finished requests")
        self._by_depth = counter(
            "accepted_rounds", "Rounds that accepted at least `depth` drafted tokens", "depth"
        )
        self._queue = histogram("queue_seconds", "From arrival to the start of prefill", SECONDS)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival", SECONDS)
        self._tpot = histogram(
            "time_per_output_token_seconds", "Time per output token after the first", TOKEN_SECONDS
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "Between two arrivals of new tokens", TOKEN_SECONDS
        )
        self._total = histogram("request_seconds", "From arrival to the end", SECONDS)

    def count(self, result: Result) -> None:
        """Counts a finished request."""
        stats = result.stats
        self._prompt.inc(stats.prompt_tokens)
        self._new.inc(stats.new_tokens)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for depth in range(len(stats.histogram)):
            self._by_depth.labels(depth=str(depth)).inc(sum(stats.histogram[depth:]))
        self._queue.observe(stats.queue_s)
        self._total.observe(stats.total_s)
        if stats.ttft_s is not None:
            self._ttft.observe(stats.ttft_s)
        if stats.tpot_s is not None:
            self._tpot.observe(stats.tpot_s)
        for seconds in stats.itl_s:
            self._itl.observe(seconds)


class _OfEngine(Collector):
    """What the engine itself counts."""

    def __init__(self, snapshot: Callable[[], Snapshot], slots: int):
        self._snapshot, self._slots = snapshot, slots

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        stats = snapshot.stats
        gauges: dict[str, tuple[str, float]] = {
            "slots": ("Slots of the engine", self._slots),
            "slots_in_use": ("Requests that are decoded", stats.running),
            "requests_waiting": ("Requests in the queue or in prefill", stats.waiting),
            "prefix_bytes": ("Bytes of prefixes on the device", stats.prefix_bytes),
            "prefix_host_bytes": ("Bytes of prefixes in host memory", stats.prefix_host_bytes),
            "probe_lost_seconds": ("Seconds that probes lost", stats.probe_lost_s),
            "kv_bytes": ("Bytes of keys and values of all slots", stats.kv_bytes),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"magicjax_{name}", text, value)
        counters: dict[str, tuple[str, float]] = {
            "loop_tokens": ("Tokens of the loop; divided by rounds: tau", snapshot.tokens),
            "rounds": ("Rounds of the loop, summed over requests", snapshot.rounds),
            "prefix_lookups": ("Prompts looked up in the prefix store", stats.prefix_lookups),
            "prefix_hits": ("Prompts that reused tokens", stats.prefix_hits),
            "prefix_host_hits": ("Hits of prefixes in host memory", stats.prefix_host_hits),
            "reused_tokens": ("Prompt tokens that were not prefilled", stats.reused_tokens),
            "loop_seconds": ("Seconds of the compiled loop", stats.loop_s),
            "prefill_seconds": ("Seconds of prefill", stats.prefill_s),
            "probe_rounds": ("Rounds of the batch that probed a drafter", stats.probe_rounds),
            "host_seconds": ("Seconds of scheduling and detokenization", stats.host_s),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"magicjax_{name}", text, value)
        finished = CounterMetricFamily(
            "magicjax_requests_finished", "Finished requests by reason", labels=["reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        by_arm = CounterMetricFamily(
            "magicjax_batch_rounds",
            "Rounds of the batch by drafter and by the depth of the tree",
            labels=["drafter", "depth"],
        )
        for arm, count in stats.rounds_by_arm.items():
            by_arm.add_metric([arm.drafter, str(arm.depth)], count)
        yield by_arm
