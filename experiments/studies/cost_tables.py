"""Compares the cost model with published tables, or with measured cells.

    python -m experiments.studies.cost_tables
    python -m experiments.studies.cost_tables --summary results/NAME/summary.csv --profile FILE.json

The times and speedups of MagicDec's tables 6 and 1, its times of plain decoding on three devices,
and gpt-fast's on A100; the notebook plan_and_fit shows MagicDec's claim about batch and context.
The constants are those of the presets; `magicjax/prediction/cost_model/device.py` documents their
sources.

With a summary of a grid and a profile of the device that ran it (`magicjax calibrate`), the
speedups of the grid at their measured τ.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import models
from experiments.studies import tables
from magicjax.benchmarks.tables import markdown_table
from magicjax.drafters.spec import make_drafter
from magicjax.loading import abstract_model
from magicjax.prediction import cost_model
from magicjax.prediction.planner import Candidate, acceptance, inflection
from magicjax.prediction.planner.candidates import make_draft, model_sizes
from magicjax.trees.sequoia import expected_tokens
from magicjax.trees.token_tree import chain

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
TARGET = "llama-3.1-8b"
ACCEPTANCE = REFERENCE / "magicdec_acceptance.csv"
DRAFT = "self:streaming:512"
TIMES = ("t_target_ms", "t_verify_ms", "gamma_t_draft_ms", "speedup")
TIE = 0.03  # published speedups within this share of the best are ties

# Of a summary. The starts of methods that it predicts, and words of those that it does not.
COLUMNS = {"status", "target", "target_weights", "target_kv_dtype", "activations", "offload"}
COLUMNS |= {"dtype", "batch", "context", "method", "tau", "speedup", "nodes", "gamma"}
MODELLED = "self:", "quest:", "full", "prompt-lookup"
NOT_MODELLED = " + ", " -> ", "refresh_every", "dynamic:"

CLAIM_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLAIM_CONTEXTS = (1000, 2000, 4000, 8000, 16000, 32000)
CLAIM_GAMMA = 3
CLAIM_BUDGET = 512


class Compared(NamedTuple):
    """A published row and its prediction.

    Attributes:
      row: as published.
      predicted: by column.
    """

    row: dict[str, Any]
    predicted: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Predicted / published - 1, by column."""
        return {column: value / self.row[column] - 1 for column, value in self.predicted.items()}


def published(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a reference table."""
    return pd.read_csv(REFERENCE / f"{name}.csv").to_dict("records")


@functools.cache
def sizes(name: str) -> cost_model.Sizes:
    """Returns the sizes of a preset in bfloat16."""
    return cost_model.sizes_of(models.preset(name), "bfloat16", name)


def _round_cost(row: dict[str, Any], drafter: str) -> cost_model.RoundCost:
    draft = cost_model.Draft(sizes(row["model"] if drafter == "self" else drafter), row["budget"])
    machine = cost_model.Machine(cost_model.find_device(row["device"]), model=row["n_devices"])
    batch, context, gamma = row["batch"], row["context"], row["gamma"]
    return cost_model.round_cost(
        sizes(row["model"]), draft, machine, batch, context, gamma + 1, gamma
    )


def table6() -> list[Compared]:
    """Returns MagicDec's table 6: times in ms, and the speedup at its tokens per step."""
    rows = []
    for row in published("magicdec_table6"):
        cost = _round_cost(row, row["draft"].split("+")[0])
        seconds = cost.target, cost.verify, row["gamma"] * cost.draft
        predicted = [*(1e3 * s for s in seconds), cost.speedup(row["tokens_per_step"])]
        rows.append(Compared(row, dict(zip(TIMES, predicted, strict=True))))
    return rows


def table1() -> list[Compared]:
    """Returns MagicDec's table 1, at the acceptance published for Llama-3.1-8B."""
    rows = []
    for row in published("magicdec_table1"):
        tokens = expected_tokens(chain(row["gamma"]), rate_at(row["context"]))
        rows.append(Compared(row, {"speedup": _round_cost(row, "self").speedup(tokens)}))
    return rows


def plain_decoding(table: str = "magicdec_rooflines") -> list[Compared]:
    """Returns published times of plain decoding in ms: MagicDec's, or those of another table."""
    rows = []
    for row in published(table):
        machine = cost_model.Machine(cost_model.find_device(row["device"]), model=row["n_devices"])
        step = cost_model.plain_step(sizes(row["model"]), machine, row["batch"], row["context"])
        rows.append(Compared(row, {"reported_ms": 1e3 * sum(step.values())}))
    return rows


def rate_at(context: int) -> list[float]:
    """Returns the acceptance published for Llama-3.1-8B with a streaming cache of 512."""
    measured = acceptance.read_table(ACCEPTANCE, TARGET)
    table, _ = acceptance.at_context(measured, context)[DRAFT]
    return table[0].tolist()


def winners(rows: Sequence[Compared]) -> list[tuple[int, set[str], str]]:
    """Returns (batch, fastest drafts as published, fastest draft as predicted) for each batch."""
    result = []
    for batch in dict.fromkeys(r.row["batch"] for r in rows):
        same = [r for r in rows if r.row["batch"] == batch]
        top = max(r.row["speedup"] for r in same)
        best = {r.row["draft"] for r in same if r.row["speedup"] >= (1 - TIE) * top}
        predicted = max(same, key=lambda r: r.predicted["speedup"]).row["draft"]
        result.append((batch, best, predicted))
    return result


def of_grid(summary: str, profile: str) -> list[dict[str, Any]]:
    """Returns the measured and predicted speedup of each cell of a grid whose cost is modelled.

    Not modelled are ensembles, cascades, refreshes and dynamic trees, and small models are left
    out because a summary has no paths of drafts.

    Args:
      summary: CSV file of a finished grid, of cells that ran on this device.
      profile: file of this device.

    Raises:
      ValueError, OSError: files that cannot be read, or a profile of another device or version.
    """
    device = cost_model.device_of(profile)
    table = pd.read_csv(summary)
    if missing := COLUMNS - {*table}:
        raise ValueError(f"{summary} is not the summary of a grid: it lacks {sorted(missing)}")
    target_of = functools.cache(abstract_model)
    rows = []
    for row in table[table.status == "ok"].to_dict("records"):
        text = row["method"].split(", ")[0]
        if not text.startswith(MODELLED) or any(word in row["method"] for word in NOT_MODELLED):
            continue
        weights, kv_dtype = (
            row[name] if isinstance(row[name], str) else None
            for name in ("target_weights", "target_kv_dtype")
        )
        storage: Any = dict(weights=weights, kv_dtype=kv_dtype, offload=row["offload"] == "yes")
        packed = row["activations"] == "int8"
        model = target_of(row["target"], row["dtype"], packed=packed, **storage)
        target = model_sizes(model, row["dtype"])
        load = functools.partial(abstract_model, dtype=row["dtype"])
        draft = make_draft(make_drafter(text, load), target, row["dtype"])
        batch, context = int(row["batch"]), int(row["context"])
        nodes, gamma = int(row["nodes"]), int(row["gamma"])
        cells = {"batch": batch, "context": context, "method": row["method"], "tau": row["tau"]}
        cells["speedup"] = row["speedup"]
        for source, constants in (
            ("from constants", dataclasses.replace(device, measured=())),
            ("from timed passes", device),
        ):
            machine = cost_model.Machine(constants)
            cost = cost_model.round_cost(target, draft, machine, batch, context, nodes, gamma)
            cells[source] = cost.speedup(row["tau"])
        rows.append(cells)
    if not rows:
        raise ValueError(f"{summary} has no cell of self-speculation or prompt lookup that ran")
    return rows


def claim() -> tuple[np.ndarray, float | None]:
    """Returns the speedups [contexts, batches] of MagicDec's claim, and the inflection context."""
    machine = cost_model.Machine(cost_model.find_device("a100"), model=8)
    target = sizes(TARGET)
    draft = cost_model.Draft(target, CLAIM_BUDGET)
    speedups = np.zeros((len(CLAIM_CONTEXTS), len(CLAIM_BATCHES)))
    for i, context in enumerate(CLAIM_CONTEXTS):
        tokens = expected_tokens(chain(CLAIM_GAMMA), rate_at(context))
        for j, batch in enumerate(CLAIM_BATCHES):
            cost = cost_model.round_cost(
                target, draft, machine, batch, context, CLAIM_GAMMA + 1, CLAIM_GAMMA
            )
            speedups[i, j] = cost.speedup(tokens)
    candidate = Candidate(DRAFT, draft, ((1.0,),))
    ends = CLAIM_BATCHES[0], CLAIM_BATCHES[-1]
    return speedups, inflection(target, candidate, machine, CLAIM_GAMMA, ends)


def summary(rows: Sequence[Compared], column: str) -> str:
    """Returns the mean and the largest error of a column in words."""
    errors = np.abs([row.errors[column] for row in rows])
    return f"{column}: mean error {errors.mean():.1%}, largest {errors.max():.1%}"


def report() -> str:
    """Returns all tables as Markdown; a cell is predicted / published (relative error)."""
    return "\n\n".join([*_table6(), *_plain_decoding(), *_table1()])


def _cells(compared: Compared) -> list[str]:
    return [
        f"{value:.2f} / {compared.row[column]:.2f} ({compared.errors[column]:+.1%})"
        for column, value in compared.predicted.items()
    ]


def _table6() -> list[str]:
    rows = table6()
    body = [
        (f"{r.row['draft']}:{r.row['budget']}", r.row["batch"], r.row["gamma"], *_cells(r))
        for r in rows
    ]
    fastest = [
        f"- batch {batch}: fastest {' or '.join(sorted(best))}; predicted {predicted}, "
        + ("as published" if predicted in best else "NOT as published")
        for batch, best, predicted in winners(rows)
    ]
    return [
        "## MagicDec, table 6: Llama-3.1-8B on 8 H100, context 32,000 (predicted / published)",
        markdown_table(("draft", "batch", "γ", *TIMES), body),
        "\n".join([*(f"- {summary(rows, column)}" for column in TIMES), *fastest]),
    ]


def _workload(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], f"{row['n_devices']} × {row['device']}", row["context"], row["batch"]


def _plain_decoding() -> list[str]:
    text = []
    for title, table, note in (
        (
            "MagicDec",
            "magicdec_rooflines",
            "The latencies of all-reduces on A100 and L40 are fitted.",
        ),
        ("gpt-fast", "gpt_fast_a100", "Nothing is fitted."),
    ):
        rows = plain_decoding(table)
        body = [(*_workload(r.row), *_cells(r)) for r in rows]
        text += [
            f"## {title}, plain decoding (predicted / published)",
            markdown_table(("model", "devices", "context", "batch", "t_target_ms"), body),
            f"t_target_ms: {summary(rows, 'reported_ms').partition(': ')[2]}. {note}",
        ]
    return text


def _table1() -> list[str]:
    rows = table1()
    body = [(*_workload(r.row), r.row["gamma"], *_cells(r)) for r in rows]
    return [
        "## MagicDec, table 1: a streaming draft cache of 512 slots (predicted / published)",
        markdown_table(("model", "devices", "context", "batch", "γ", "speedup"), body),
        f"{summary(rows, 'speedup')}. Acceptance is that of Llama-3.1-8B at the same context, for "
        "Llama-2-7B too, because none is published for it.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.cost_tables",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--summary", help="summary.csv of a grid, instead of published tables")
    parser.add_argument("--profile", help="of the device that ran it, by `magicjax calibrate`")
    tables.add_out(parser)
    options = parser.parse_args(arguments)
    if options.summary is None:
        if options.profile or options.out:
            parser.error("--profile and --out need --summary")
        print(report())
        return 0
    if options.profile is None:
        parser.error("--summary needs --profile")
    try:
        rows = of_grid(options.summary, options.profile)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    tables.publish(rows, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
