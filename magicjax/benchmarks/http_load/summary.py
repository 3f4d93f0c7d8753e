"""Rates and percentiles of runs, one row for each level and server."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from magicjax.benchmarks.http_load.client import OK, Sample
from magicjax.benchmarks.http_load.load import Run

PERCENTILES = (50, 95, 99)
REFUSED = "429"  # a full queue, which is no failure of the server
SCALES = {"ttft_s": ("ttft_ms", 1e3), "tpot_s": ("tpot_ms", 1e3), "total_s": ("e2e_s", 1.0)}


@dataclasses.dataclass(frozen=True)
class Targets:
    """Limits of a good request, in seconds; None: none."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, sample: Sample) -> bool:
        """Whether a request succeeded within the limits; one without a TPOT meets any."""
        pairs = ((sample.ttft_s, self.ttft_s), (sample.tpot_s, self.tpot_s))
        return sample.status == OK and all(
            value is None or limit is None or value <= limit for value, limit in pairs
        )


def summarize(runs: Sequence[Run], targets: Targets) -> list[dict[str, Any]]:
    """Returns a row for each level and server; the runs of repeats are pooled.

    `speedup` is the ratio of tokens/s to that of the last server; it needs two servers.
    `user_tokens_per_s` are the tokens/s that a user sees: 1,000 divided by the median TPOT in
    milliseconds.
    """
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault((run.level, run.server), []).append(run)
    servers = list(dict.fromkeys(run.server for run in runs))
    # The order of the servers alternates between levels; that of the rows does not.
    order = list(dict.fromkeys(run.level for run in runs))
    rows = []
    for level in order:
        of_level = [
            _row(groups[level, server], targets) for server in servers if (level, server) in groups
        ]
        base = next(
            (
                row["tokens_per_s"]
                for row in of_level
                if len(servers) > 1 and row["server"] == servers[-1].label
            ),
            None,
        )
        for row in of_level:
            row["speedup"] = row["tokens_per_s"] / base if base and row["tokens_per_s"] else None
        rows += of_level
    return rows


def by_category(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns a row for each category and server, of the requests of all levels.

    It is empty with fewer than two categories.
    """
    groups: dict[tuple[str, str], list[Sample]] = {}
    for run in runs:
        for sample in run.samples:
            if sample.status == OK:
                groups.setdefault((sample.category, run.server.label), []).append(sample)
    servers = list(dict.fromkeys(run.server.label for run in runs))
    categories = sorted({category for category, _ in groups})
    if len(categories) < 2:
        return []
    rows = []
    for category in categories:
        for server in servers:
            if good := groups.get((category, server)):
                tpots = [1e3 * x for sample in good if (x := sample.tpot_s) is not None]
                tpot = float(np.median(tpots)) if tpots else None
                rows.append(
                    {
                        "category": category,
                        "server": server,
                        "requests": len(good),
                        "prompt_tokens": _mean(sample.prompt_tokens for sample in good),
                        "tpot_ms_p50": tpot,
                        "user_tokens_per_s": 1e3 / tpot if tpot else None,
                        "tau": tau(good),
                    }
                )
    return rows


def _row(runs: Sequence[Run], targets: Targets) -> dict[str, Any]:
    samples = [sample for run in runs for sample in run.samples]
    good = [sample for sample in samples if sample.status == OK]
    seconds = sum(run.seconds for run in runs)
    tokens = _total(sample.new_tokens for sample in good)
    has_targets = targets != Targets()
    row: dict[str, Any] = dict(
        level=runs[0].level.label,
        server=runs[0].server.label,
        requests=len(samples),
        errors=errors(samples),
        seconds=seconds,
        new_tokens=tokens,
        tokens_per_s=None if tokens is None else tokens / seconds,
        requests_per_s=len(good) / seconds,
        goodput_per_s=sum(map(targets.met, good)) / seconds if has_targets else None,
        tau=tau(good),
        prompt_tokens=_mean(sample.prompt_tokens for sample in good),
        cached=_ratio(good, "cached_tokens", "prompt_tokens"),
    )
    for field, (name, scale) in SCALES.items():
        values = [value for sample in good if (value := getattr(sample, field)) is not None]
        for p in PERCENTILES:
            row[f"{name}_p{p}"] = scale * float(np.percentile(values, p)) if values else None
    tpot = row["tpot_ms_p50"]
    row["user_tokens_per_s"] = 1e3 / tpot if tpot else None
    return row


def errors(samples: Iterable[Sample]) -> str:
    """Returns the number of failed requests by status, such as "429: 3, ReadTimeout: 1"."""
    counts = collections.Counter(sample.status for sample in samples if sample.status != OK)
    return ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))


def failures(runs: Iterable[Run]) -> list[Sample]:
    """Returns the requests that failed with something other than 429."""
    return [s for run in runs for s in run.samples if s.status not in (OK, REFUSED)]


def tau(samples: Sequence[Sample]) -> float | None:
    """Returns the mean acceptance length; None if the servers do not count accepted tokens.

    A request of n tokens with a accepted ones has n - 1 - a rounds: prefill gives one token, and
    every round one more than it accepts.
    """
    pairs = [(s.new_tokens, s.accepted_tokens) for s in samples]
    known = [(n - 1, a) for n, a in pairs if n is not None and a is not None]
    after_prefill = sum(n for n, _ in known)
    rounds = after_prefill - sum(a for _, a in known)
    return after_prefill / rounds if rounds > 0 else None


def _total(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value or 0 for value in known)


def _mean(values: Iterable[int | None]) -> float | None:
    known = list(values)
    total = _total(known)
    return None if total is None or not known else total / len(known)


def _ratio(samples: Sequence[Sample], part: str, whole: str) -> float | None:
    parts, wholes = (_total(getattr(s, name) for s in samples) for name in (part, whole))
    return parts / wholes if parts is not None and wholes else None
