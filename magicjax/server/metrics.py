"""Metrics in the format of Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from magicjax.decoding.text import Result
from magicjax.server.worker import Worker

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)


class Metrics:
    """The registry of one server; all metrics have the label `model`.

    Attributes:
      registry: for `prometheus_client.generate_latest`.
    """

    def __init__(self, model: str, worker: Worker):
        """Registers all metrics of the worker of a model."""
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(model, worker))
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            labels = ("model", *labels)
            return Counter(f"magicjax_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"magicjax_{name}", text, ("model",), buckets=buckets, registry=self.registry
            )

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
        stats, model = result.stats, self._model
        self._prompt.labels(model).inc(stats.prompt_tokens)
        self._new.labels(model).inc(stats.new_tokens)
        self._drafted.labels(model).inc(stats.drafted)
        self._accepted.labels(model).inc(stats.accepted)
        for depth, rounds in enumerate(stats.at_least):
            self._by_depth.labels(model, str(depth)).inc(rounds)
        self._queue.labels(model).observe(stats.queue_s)
        self._total.labels(model).observe(stats.total_s)
        if stats.ttft_s is not None:
            self._ttft.labels(model).observe(stats.ttft_s)
        if stats.tpot_s is not None:
            self._tpot.labels(model).observe(stats.tpot_s)
        for seconds in stats.itl_s:
            self._itl.labels(model).observe(seconds)


class _OfEngine(Collector):
    """What the engine itself counts."""

    def __init__(self, model: str, worker: Worker):
        self._model, self._worker = model, worker

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric_class, name, text, labels, values in _measured(self._worker):
            family = metric_class(f"magicjax_{name}", text, labels=("model", *labels))
            for label_values, value in values.items():
                family.add_metric((self._model, *label_values), value)
            yield family


def _measured(worker: Worker) -> Iterator[tuple]:
    """Yields (type, name, text, labels besides the model, values by these labels)."""
    snapshot, stats = worker.snapshot, worker.snapshot.stats
    gauges: dict[str, tuple[str, float]] = {
        "slots": ("Slots of the engine", worker.config.slots),
        "slots_in_use": ("Requests that are decoded", stats.running),
        "requests_waiting": ("Requests in the queue or in prefill", stats.waiting),
        "prefix_bytes": ("Bytes of prefixes on the device", stats.prefix_bytes),
        "prefix_host_bytes": ("Bytes of prefixes in host memory", stats.prefix_host_bytes),
        "probe_lost_seconds": ("Seconds that probes lost", stats.probe_lost_s),
        "kv_bytes": ("Bytes of keys and values of all slots", stats.kv_bytes),
    }
    counters: dict[str, tuple[str, float]] = {
        "loop_tokens": ("Tokens of the loop; divided by rounds: tau", snapshot.tokens),
        "rounds": ("Rounds of the loop, summed over requests", snapshot.rounds),
        "prefix_lookups": ("Prompts looked up in the prefix store", stats.prefix_lookups),
        "prefix_hits": ("Prompts that reused tokens", stats.prefix_hits),
        "prefix_host_hits": ("Hits of prefixes in host memory", stats.prefix_host_hits),
        "reused_tokens": ("Prompt tokens whose keys and values were stored", stats.reused_tokens),
        "loop_seconds": ("Seconds of the compiled loop", stats.loop_s),
        "prefill_seconds": ("Seconds of prefill", stats.prefill_s),
        "probe_rounds": ("Rounds of the batch that probed a drafter", stats.probe_rounds),
        "host_seconds": ("Seconds of scheduling and detokenization", stats.host_s),
    }
    for metric_class, described in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, value) in described.items():
            yield metric_class, name, text, (), {(): value}
    finished = {(reason,): count for reason, count in stats.finished.items()}
    text = "Finished requests by reason"
    yield CounterMetricFamily, "requests_finished", text, ("reason",), finished
    rounds = {(mode.drafter, str(mode.depth)): n for mode, n in stats.rounds_by_arm.items()}
    text = "Rounds of the batch by drafter and by the depth of the tree"
    yield CounterMetricFamily, "batch_rounds", text, ("drafter", "depth"), rounds
