"""What speculation is worth where weights are streamed from host memory (SpecInfer, section 6.3).

`python -m experiments.studies.offloading` times passes of an offloaded model of random weights,
plain ones
and such as verify trees. What a tree emits in a round is **not measured**: it is what the paper
gives, tokens by width of its table 2 and success rates by rank of its table 1, so speed-ups have
synthetic acceptance. With `--foretell DEVICE ...` nothing runs: times are those of the cost terms,
bytes over the link and over memory.

Three tables: the link's rate beside a plain copy's, speed-up by batch and width of the paper's
trees, and tokens a second by nodes of the best trees, with the number of nodes that is best.
"""

import argparse
import csv
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

import magicjax
from magicjax import cost_model, planner
from magicjax.benchmarks.bench import Setup
from magicjax.benchmarks.step_times import step_times
from magicjax.cli.plan import check_context
from magicjax.generation import config_of
from magicjax.model import DTYPES
from magicjax.parallel.offloading import in_words
from magicjax.trees.sequoia import expected_tokens, optimal
from magicjax.trees.token_tree import ROOT_ONLY
from pallas_kernels.benchmarks.bandwidth import host_bandwidth
from pallas_kernels.benchmarks.bench import best_backend, write_json

DEPTH = 8  # of the paper's trees, <1,1,w,1,1,1,1,1>
WIDTHS = (1, 2, 3, 4, 5)
DRAFT = "draft"
REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
PAPER = "the paper, offloaded, against FlexGen: 2.6 to 3.5"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    found = argparse.ArgumentParser(
        prog="python -m experiments.studies.offloading",
        description="Speculation with weights in host memory: passes are timed, acceptance is the "
        "paper's.",
        allow_abbrev=False,
    )
    found.add_argument(
        "--target",
        nargs="+",
        default=["tinyllama-1.1b"],
        help="presets, with random weights, or directories; tinyllama-1.1b if not given",
    )
    found.add_argument(
        "--draft",
        nargs="+",
        default=["llama-68m"],
        help="one for each target, of its vocabulary, on the device; llama-68m if not given",
    )
    found.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="rows")
    found.add_argument("--context", type=int, default=128, help="tokens of each row; 128")
    found.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="of the trees, the root included; 1 to 64 if not given",
    )
    found.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the models")
    found.add_argument("--int8", action="store_true", help="the blocks are quantized on the host")
    found.add_argument(
        "--resident", action="store_true", help="beside it the same with all weights on the device"
    )
    found.add_argument("--turns", type=int, default=5, help="each pass is timed once in each; 5")
    found.add_argument(
        "--foretell",
        nargs="+",
        default=[],
        metavar="DEVICE",
        help="run nothing, foretell the times of these devices, or profiles",
    )
    found.add_argument("--out", type=pathlib.Path, help="a JSON file to write")
    return found


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds at one batch.

    Attributes:
      passes: of the target, by new tokens of a row, with all that a round adds but the draft; 1:
        plain decoding.
      draft: of drafting one level.
    """

    passes: dict[int, float]
    draft: float


@functools.cache
def published() -> tuple[dict[int, float], list[float]]:
    """Returns (tokens a round by width, success rates by rank), means of the greedy datasets."""

    def rows(name: str) -> list[dict[str, str]]:
        with (REFERENCE / name).open() as lines:
            return [row for row in csv.DictReader(lines) if row["decoding"] == "greedy"]

    tokens = rows("specinfer_table2_tokens_per_step.csv")
    rates = rows("specinfer_table1_success_rate.csv")
    of_top = [np.mean([float(row[f"top{k}"]) for row in rates]) for k in WIDTHS]
    by_width = {w: float(np.mean([float(row[f"width{w}"]) for row in tokens])) for w in WIDTHS}
    return by_width, np.diff(of_top, prepend=0).tolist()


def nodes_of(width: int) -> int:
    """Returns the nodes of the paper's tree of that width."""
    return magicjax.expansion((1, 1, width, *(1,) * (DEPTH - 3))).num_nodes


def wanted_nodes(options: argparse.Namespace) -> list[int]:
    """Returns the numbers of nodes of all passes."""
    return sorted({*options.nodes, *map(nodes_of, WIDTHS)} - {1})


def measured(options: argparse.Namespace, target: magicjax.Model, draft: str, batch: int) -> Times:
    """Returns times of this device."""
    small = magicjax.SmallModel(magicjax.load(draft, options.dtype))
    found = step_times(
        Setup(target, best_backend(target.dtype, target.config.head_dim, jax.devices()[0])),
        batch,
        options.context,
        wanted_nodes(options),
        {DRAFT: small},
        DEPTH,
        options.turns,
    )
    return Times(found.passes, found.drafts[DRAFT])


def foretold(
    options: argparse.Namespace,
    source: str,
    draft: str,
    device: cost_model.Device,
    batch: int,
    offload: bool | Literal["int8"],
) -> Times:
    """Returns times by the cost terms."""
    target = cost_model.sizes_of(config_of(source), options.dtype, source, offload)
    small = cost_model.Draft(cost_model.sizes_of(config_of(draft), options.dtype, draft))
    where = cost_model.Machine(device), batch, options.context
    cost_model.check_dtype(device, options.dtype)
    for name in (source, draft):
        check_context(name, options.context)
    planner.check_fits(target, *where)
    rounds = {n: cost_model.round_cost(target, small, *where, n, 1) for n in wanted_nodes(options)}
    passes = {n: cost.verify + cost.rest for n, cost in rounds.items()}
    any_round = next(iter(rounds.values()))
    return Times({1: any_round.target} | passes, any_round.draft)


def speed_ups(batch: int, times: Times) -> list[dict[str, float]]:
    """Returns the speed-up over plain decoding, offloaded too, of the paper's trees."""
    tokens, _ = published()
    rounds = {w: DEPTH * times.draft + times.passes[nodes_of(w)] for w in WIDTHS}
    return [
        {
            "batch": batch,
            "width": w,
            "nodes": nodes_of(w),
            "tokens a round (paper)": tokens[w],
            "T_target ms": 1e3 * times.passes[1],
            "round ms": 1e3 * rounds[w],
            "speed-up": tokens[w] * times.passes[1] / rounds[w],
        }
        for w in WIDTHS
    ]


def by_nodes(options: argparse.Namespace, batch: int, times: Times) -> list[dict[str, float]]:
    """Returns tokens a second of the best tree of each number of nodes."""
    _, rates = published()
    found = []
    for n in options.nodes:
        tree = optimal(rates, n, DEPTH) if n > 1 else ROOT_ONLY
        tokens = expected_tokens(tree, rates)
        seconds = times.passes[n] + tree.depth * times.draft
        found.append(
            {
                "batch": batch,
                "nodes": n,
                "depth": tree.depth,
                "tokens a round (positional model)": tokens,
                "round ms": 1e3 * seconds,
                "tokens/s": batch * tokens / seconds,
            }
        )
    return found


def link_rate(target: magicjax.Model, times: Times, copy: float) -> dict[str, float]:
    """Returns what the link moves in plain decoding, beside a plain copy's bytes a second."""
    streamed = sum(leaf.nbytes for leaf in jax.tree.leaves(target.blocks))
    rate = streamed / times.passes[1]
    return {
        "GB streamed in a pass": streamed / 1e9,
        "GB/s": rate / 1e9,
        "GB/s of a copy": copy / 1e9,
        "share": rate / copy,
    }


def rows_of(
    options: argparse.Namespace, timed: dict[int, Times], link: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the rows of all tables of a target on a device.

    Args:
      options: whose nodes.
      timed: by batch.
      link: rows of the link's rate; none where times are foretold.
    """
    tables = {
        "link": link,
        "speed-up": [row for batch in timed for row in speed_ups(batch, timed[batch])],
        "nodes": [row for batch in timed for row in by_nodes(options, batch, timed[batch])],
    }
    return [{"table": name} | row for name, rows in tables.items() for row in rows]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints the tables."""
    print(f"\n{title}\nSYNTHETIC acceptance: tokens a round are the paper's, not measured")
    for name in ("link", "speed-up", "nodes"):
        found = [{k: v for k, v in row.items() if k != "table"} for row in rows]
        found = [row for row, of in zip(found, rows, strict=True) if of["table"] == name]
        if found:
            print(as_table(found))
    of_nodes = [row for row in rows if row["table"] == "nodes"]
    for batch in sorted({row["batch"] for row in of_nodes}):
        best = max((r for r in of_nodes if r["batch"] == batch), key=lambda r: r["tokens/s"])
        print(f"batch {batch}: best with {best['nodes']} nodes")


def as_table(rows: list[dict[str, float]]) -> str:
    """Returns rows as aligned text."""
    cells = [[*rows[0]], *([f"{value:.4g}" for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def ways(options: argparse.Namespace) -> list[bool | Literal["int8"]]:
    """Returns where the weights are, as `magicjax.load` takes it."""
    offload: bool | Literal["int8"] = "int8" if options.int8 else True
    return [offload, False] if options.resident else [offload]


def timed_rows(
    options: argparse.Namespace, source: str, draft: str, offload: bool | Literal["int8"]
) -> list[dict[str, Any]]:
    """Returns the rows of a target on this device."""
    target = magicjax.load(source, options.dtype, offload=offload)
    timed = {b: measured(options, target, draft, b) for b in options.batch}
    copy, link = host_bandwidth(), []
    if offload and copy:
        link = [{"batch": b} | link_rate(target, timed[b], copy) for b in timed]
    return rows_of(options, timed, link)


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


def run(options: argparse.Namespace) -> None:
    """Prints and writes what was asked for; raises ValueError for what cannot be."""
    rows: list[dict[str, Any]] = []
    for source, draft in zip(options.target, options.draft, strict=True):
        sizes = [config_of(name).vocab_size for name in (source, draft)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{draft} has {sizes[1]} tokens, and {source} {sizes[0]}: pick another"
            )
        for offload in ways(options):
            title = f"{source}, {options.dtype}, context {options.context}"
            title += in_words(offload) or ", on the device"
            for name in options.foretell:
                device = cost_model.device_of(name)
                timed = {
                    b: foretold(options, source, draft, device, b, offload) for b in options.batch
                }
                found = rows_of(options, timed, [])
                show(f"{title}, FORETOLD for one {device.name} ({PAPER})", found)
                about = {"target": source, "offload": offload, "foretold for": device.name}
                rows += [about | row for row in found]
            if not options.foretell:
                found = timed_rows(options, source, draft, offload)
                show(f"{title}, timed on {cost_model.device_kind()} ({PAPER})", found)
                rows += [{"target": source, "offload": offload} | row for row in found]
            if options.out:
                write_json(options.out, {"jax": jax.__version__, "rows": rows})


if __name__ == "__main__":
    main()
