"""Speedup of speculation with weights in host memory: `python -m experiments.studies.offloading`.

Times plain passes and tree verification of an offloaded model with random weights (SpecInfer,
section 6.3). The acceptance is **synthetic**: tokens per round by tree width are from the paper's
table 2, success rates by rank from its table 1. With `--predict DEVICE ...` nothing runs, and the
cost model predicts the times.

Prints three tables: the bandwidth of the host link, the speedup of the paper's trees by batch and
width, and tokens/s of the best trees by number of nodes.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import magicjax
from experiments.studies import cost_tables
from magicjax import cost_model, planner
from magicjax.benchmarks.step_times import step_times
from magicjax.benchmarks.synthetic import Setup
from magicjax.benchmarks.tables import record_table
from magicjax.cli.options import check_context
from magicjax.files import write_atomically
from magicjax.loading import config_of, weight_format
from magicjax.model import DTYPES
from magicjax.parallel.offloading import describe
from magicjax.trees.sequoia import expected_tokens, optimal
from magicjax.trees.token_tree import ROOT_ONLY
from pallas_kernels.benchmarks.bandwidth import host_bandwidth
from pallas_kernels.benchmarks.bench import best_backend

DEPTH = 8  # of the paper's trees, <1,1,w,1,1,1,1,1>
WIDTHS = (1, 2, 3, 4, 5)
DRAFT = "draft"
PAPER = "the paper, offloaded, against FlexGen: 2.6 to 3.5"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.offloading",
        description="Speedup with weights in host memory: measured times, the paper's acceptance.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    target, draft, nodes = ["tinyllama-1.1b"], ["llama-68m"], [1, 2, 4, 8, 16, 32, 64]
    add("--target", nargs="+", default=target, help="presets, or model directories")
    add("--draft", nargs="+", default=draft, help="one for each target, on the device")
    add("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="rows")
    add("--context", type=int, default=128, help="tokens per row")
    add("--nodes", type=int, nargs="+", default=nodes, help="of the trees, including the root")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of the models")
    add("--weights", help="quantize the target's matrices: int8, int4 or int4:32")
    add("--resident", action="store_true", help="also measure with all weights on the device")
    add("--repeats", type=int, default=5, help="timings of each pass; the median counts")
    add("--predict", nargs="+", default=[], metavar="DEVICE", help="predict, for these devices")
    add("--out", type=pathlib.Path, help="write the results to this JSON file")
    return parser


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds at one batch.

    Attributes:
      passes: by nodes: a round without its draft; 1: a step of plain decoding.
      draft: of drafting one level.
    """

    passes: dict[int, float]
    draft: float


@functools.cache
def published() -> tuple[dict[int, float], list[float]]:
    """Returns τ by width and success rates by rank, means over the paper's greedy datasets."""

    def means(table: str, column: str) -> list[float]:
        rows = cost_tables.published(table, decoding="greedy")
        return [float(np.mean([row[f"{column}{k}"] for row in rows])) for k in WIDTHS]

    tokens = means("specinfer_table2_tokens_per_step", "width")
    rates = means("specinfer_table1_success_rate", "top")
    return dict(zip(WIDTHS, tokens)), np.diff(rates, prepend=0).tolist()


def tree_nodes(width: int) -> int:
    """Returns the nodes of the paper's tree of a width."""
    return magicjax.expansion((1, 1, width, *(1,) * (DEPTH - 3))).num_nodes


def all_nodes(options: argparse.Namespace) -> list[int]:
    """Returns the numbers of nodes of all passes."""
    return sorted({*options.nodes, *map(tree_nodes, WIDTHS)} - {1})


def measured(options: argparse.Namespace, target: magicjax.Model, draft: str, batch: int) -> Times:
    """Returns times measured on this device."""
    backend = best_backend(target.dtype, target.config.kv_head_dim, jax.devices()[0])
    drafters = {DRAFT: (magicjax.SmallModel(magicjax.load(draft, options.dtype)), DEPTH)}
    shape = batch, options.context, all_nodes(options)
    times = step_times(Setup(target, backend), *shape, drafters, options.repeats)
    return Times(times.passes, max(0.0, times.drafts[DRAFT]))


def predicted(
    options: argparse.Namespace,
    source: str,
    draft: str,
    device: cost_model.Device,
    batch: int,
    offload: bool,
) -> Times:
    """Returns times predicted by the cost model."""
    weights = weight_format(source, options.weights)
    target = cost_model.sizes_of(config_of(source), options.dtype, source, offload, weights)
    small = cost_model.Draft(cost_model.sizes_of(config_of(draft), options.dtype, draft))
    where = cost_model.Machine(device), batch, options.context
    for name in (source, draft):
        check_context(name, options.context)
    planner.check_fits(target, *where)
    rounds = {n: cost_model.round_cost(target, small, *where, n, 1) for n in all_nodes(options)}
    passes = {n: cost.verify + cost.rest for n, cost in rounds.items()}
    first = next(iter(rounds.values()))
    return Times({1: first.target} | passes, first.draft)


def speedups(batch: int, times: Times) -> list[dict[str, Any]]:
    """Returns the speedups of the paper's trees over plain decoding of the same target."""
    tokens, _ = published()
    rounds = {w: DEPTH * times.draft + times.passes[tree_nodes(w)] for w in WIDTHS}
    return [
        {
            "batch": batch,
            "width": w,
            "nodes": tree_nodes(w),
            "τ (paper)": tokens[w],
            "T_target ms": 1e3 * times.passes[1],
            "round ms": 1e3 * rounds[w],
            "speedup": tokens[w] * times.passes[1] / rounds[w],
        }
        for w in WIDTHS
    ]


def by_nodes(options: argparse.Namespace, batch: int, times: Times) -> list[dict[str, Any]]:
    """Returns tokens/s of the best tree of each number of nodes."""
    _, rates = published()
    trees = {n: optimal(rates, n, DEPTH) if n > 1 else ROOT_ONLY for n in options.nodes}
    rows = []
    for n, tree in trees.items():
        tokens = expected_tokens(tree, rates)
        seconds = times.passes[n] + tree.depth * times.draft
        row = {"batch": batch, "nodes": n, "depth": tree.depth, "τ (positional model)": tokens}
        rows.append(row | {"round ms": 1e3 * seconds, "tokens/s": batch * tokens / seconds})
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints the tables."""
    print(f"\n{title} ({PAPER})\nSYNTHETIC acceptance: τ is from the paper, not measured")
    for name in ("link", "speedup", "nodes"):
        table = [{k: v for k, v in r.items() if k != "table"} for r in rows if r["table"] == name]
        if table:
            print(f"\n{record_table(table)}")
    for batch in sorted({row["batch"] for row in table}):
        best = max((r for r in table if r["batch"] == batch), key=lambda r: r["tokens/s"])
        print(f"batch {batch}: best with {best['nodes']} nodes")


def link_rows(target: magicjax.Model, times: dict[int, Times]) -> list[dict[str, Any]]:
    """Returns the link's bandwidth in plain decoding by batch, and its share of a plain copy's."""
    copy = host_bandwidth()
    if not copy:
        return []
    streamed, rows = sum(leaf.nbytes for leaf in jax.tree.leaves(target.layout)), []
    for batch, each in times.items():
        rate = streamed / each.passes[1]
        row = {"batch": batch, "GB per pass": streamed / 1e9, "GB/s": rate / 1e9}
        rows.append(row | {"GB/s of a copy": copy / 1e9, "share": rate / copy})
    return rows


def outcomes(
    options: argparse.Namespace, source: str, draft: str, offload: bool
) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Yields (where, its columns, rows of the tables) for --predict, or else for this device."""

    def rows(times: dict[int, Times], link: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_batch = [(speedups(b, t), by_nodes(options, b, t)) for b, t in times.items()]
        speedup, nodes = (itertools.chain(*each) for each in zip(*by_batch, strict=True))
        tables = {"link": link, "speedup": speedup, "nodes": nodes}
        return [{"table": name} | row for name, table in tables.items() for row in table]

    for name in options.predict:
        device = cost_model.device_of(name)
        cost_model.check_dtype(device, options.dtype, name)
        times = {b: predicted(options, source, draft, device, b, offload) for b in options.batch}
        yield f"PREDICTED for one {device.name}", {"predicted for": device.name}, rows(times, [])
    if not options.predict:
        target = magicjax.load(source, options.dtype, weights=options.weights, offload=offload)
        times = {b: measured(options, target, draft, b) for b in options.batch}
        link = link_rows(target, times) if offload else []
        yield f"measured on {cost_model.device_kind()}", {}, rows(times, link)


def run(options: argparse.Namespace) -> None:
    """Prints and writes the tables of all targets; raises ValueError for invalid options."""
    results: list[dict[str, Any]] = []
    for source, draft in zip(options.target, options.draft, strict=True):
        sizes = [config_of(name).vocab_size for name in (source, draft)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{draft} has a vocabulary of {sizes[1]} and {source} of {sizes[0]}: use a draft "
                "with the target's vocabulary"
            )
        for offload in (True, False) if options.resident else (True,):
            weights = weight_format(source, options.weights)
            placement = describe(offload, weights) + ", on the device" * (not offload)
            title = f"{source}, {options.dtype}, context {options.context}{placement}"
            for where, about, rows in outcomes(options, source, draft, offload):
                show(f"{title}, {where}", rows)
                stored = weights and str(weights)
                about = {"target": source, "weights": stored, "offload": offload} | about
                results += [about | row for row in rows]
                if options.out:
                    content = {"jax": jax.__version__, "rows": results}
                    write_atomically(options.out, json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    command = parser()
    options = command.parse_args(arguments)
    if len(options.draft) != len(options.target):
        command.error(
            f"{len(options.draft)} --draft for {len(options.target)} --target: give one for each"
        )
    try:
        run(options)
    except ValueError as error:
        command.error(str(error))


if __name__ == "__main__":
    main()
