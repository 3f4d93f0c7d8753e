"""Latency and goodput of an engine by arrival rate, drafter and slots.

`python -m experiments.studies.serving.arrivals` sends the same requests of ragged lengths at
several rates: with exponential intervals, or in bursts. It writes `arrivals.csv` and `goodput.png`.
Goodput is the number of requests per second whose time to first token and time per output token
are within limits. Requests above the rate that an engine can serve wait longer and longer, so the
numbers of such rates depend on the number of requests.

A drafter runs with the fixed depth of its tree, and with `adaptive_depth`.
"""

import csv
import dataclasses
import io
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import tyro
from matplotlib.figure import Figure

import magicjax
from experiments.studies import plots
from experiments.studies.serving.workload import (
    Arrivals,
    Requests,
    Served,
    arrivals,
    make_workload,
    serve,
)
from magicjax.benchmarks.tables import record_table
from magicjax.drafters.spec import make_drafter
from magicjax.files import write_atomically

PLAIN = "none"


@dataclasses.dataclass
class Settings(Requests):
    """Requests, and the engines that serve them.

    Attributes:
      drafters: as on the command line; "none": plain decoding.
      tree: of the drafters.
      adaptive: depths of the drafters: fixed (False), adaptive (True), or both.
      slots: of the engines.
      rates: requests per second.
      arrivals: of the requests.
      burst: requests of a burst.
      ttft_limit_s, tpot_limit_ms: that a request must meet to count for goodput.
      results: folder.
    """

    drafters: tuple[str, ...] = (PLAIN, "prompt-lookup:4")
    tree: str = "chain:4"
    adaptive: tuple[bool, ...] = (False, True)
    slots: tuple[int, ...] = (4, 8)
    rates: tuple[float, ...] = (2.0, 4.0, 8.0)
    arrivals: tuple[Arrivals, ...] = ("poisson", "burst")
    burst: int = 8
    ttft_limit_s: float = 1.0
    tpot_limit_ms: float = 20.0
    results: str = "results/serving"


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields a record for each number of slots, kind of arrivals, rate and engine."""
    target = magicjax.load(settings.target, dtype=settings.dtype)
    kinds = [
        (name, adaptive)
        for name in settings.drafters
        for adaptive in ((False,) if name == PLAIN else settings.adaptive)
    ]
    for slots in settings.slots:
        engines = [_engine(settings, target, name, slots, adaptive) for name, adaptive in kinds]
        # Engines take turns, so that a change of the machine's speed affects all of them.
        for kind, rate in itertools.product(settings.arrivals, settings.rates):
            arriving = arrivals(kind, rate, settings.requests, settings.seed, settings.burst)
            workload = make_workload(settings, target.tokenizer, arriving)
            for (name, adaptive), engine in zip(kinds, engines, strict=True):
                before = engine.stats.rounds_by_depth
                engine.forget_prefixes()
                served = serve(engine, workload)
                after = engine.stats.rounds_by_depth
                rounds = {depth: count - before[depth] for depth, count in after.items()}
                yield {
                    "arrivals": kind,
                    "slots": slots,
                    "drafter": f"{name}, adaptive" if adaptive else name,
                    "rate": rate,
                    "mean depth": sum(d * n for d, n in rounds.items()) / sum(rounds.values()),
                    **_record(settings, served),
                }


def _record(settings: Settings, served: Served) -> dict[str, float]:
    goodput = served.goodput(settings.ttft_limit_s, settings.tpot_limit_ms / 1e3)
    return {"goodput": goodput, **served.record()}


def _engine(
    settings: Settings, target: magicjax.Model, name: str, slots: int, adaptive: bool
) -> magicjax.Engine:
    """Returns an engine that has compiled its programs."""
    longest = max(settings.prompt_tokens[1], settings.long_tokens or 0) + settings.shared_tokens
    drafting: dict[str, Any] = {}
    if name != PLAIN:
        drafter = make_drafter(name, lambda path: magicjax.load(path, dtype=settings.dtype))
        tree = magicjax.parse_tree(settings.tree)
        drafting = dict(drafter=drafter, tree=tree, adaptive_depth=adaptive)
    engine = magicjax.Engine(
        target,
        slots=slots,
        capacity=longest + settings.new_tokens[1],
        max_new_tokens=settings.new_tokens[1],
        prefix_bytes=None if settings.shared_tokens else 0,
        eos_token_id=[],
        **drafting,
    )
    engine.warm_up()
    return engine


def table(records: Sequence[dict[str, Any]]) -> str:
    """Returns the records as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def figure(records: Sequence[dict[str, Any]]) -> Figure:
    """Returns goodput by rate: a panel for each kind of arrivals and number of slots."""
    panels = list(dict.fromkeys((r["arrivals"], r["slots"]) for r in records))
    drafters = list(dict.fromkeys(r["drafter"] for r in records))
    found = Figure(figsize=(3.2 * len(panels) + 1.5, 3), layout="constrained")
    for axes, panel in zip(found.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for drafter, colour in zip(drafters, itertools.cycle(plots.COLOURS)):
            points = [
                (r["rate"], r["goodput"])
                for r in records
                if (r["arrivals"], r["slots"], r["drafter"]) == (*panel, drafter)
            ]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=drafter)
        axes.set(xlabel="requests/s", ylabel="goodput, requests/s", ylim=(0, None))
        axes.set_title(f"{panel[0]}, {panel[1]} slots", fontsize=9)
        plots.clean(axes)
    plots.add_legend(axes)
    return found


def main(settings: Settings) -> None:
    """Measures, and writes the table after every run."""
    records: list[dict[str, Any]] = []
    folder = pathlib.Path(settings.results)
    for record in measure(settings):
        records.append(record)
        write_atomically(folder / "arrivals.csv", table(records))
    plots.write_png(folder / "goodput.png", figure(records))
    print(record_table(records))
    limits = f"{settings.ttft_limit_s:g} s and {settings.tpot_limit_ms:g} ms"
    print(f"Goodput: requests/s with TTFT and TPOT of at most {limits}.")


if __name__ == "__main__":
    main(tyro.cli(Settings))
