"""The cost model beside the papers' tables: `python -m experiments.studies.cost_tables`.

Times and speed-ups of MagicDec's tables 6 and 1, its claim about batch and context, and the tokens
of SpecInfer's table 2 from the success rates of its table 1. One set of constants, none for a row;
`magicjax/cost_model/device.py` says where they come from.
"""

import argparse
import csv
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import models
from magicjax import cost_model
from magicjax.planner import Candidate, acceptance, inflection, rate_of
from magicjax.trees.sequoia import expected_tokens
from magicjax.trees.token_tree import chain, expansion

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
TARGET = "llama-3.1-8b"
ACCEPTANCE = REFERENCE / "magicdec_acceptance.csv"
DRAFT = "self:streaming:512"
TIMES = ("t_target_ms", "t_verify_ms", "gamma_t_draft_ms", "speedup")
TIE = 0.03  # speed-ups closer than this share name no winner

CLAIM_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLAIM_CONTEXTS = (1000, 2000, 4000, 8000, 16000, 32000)
CLAIM_GAMMA = 3
CLAIM_BUDGET = 512
WIDTHS = range(1, 6)


class Compared(NamedTuple):
    """A published row, what is foretold, and the relative errors.

    Attributes:
      row: as published.
      foretold: by column.
      errors: foretold / published - 1, by column.
    """

    row: dict[str, Any]
    foretold: dict[str, float]
    errors: dict[str, float]


def published(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a reference table; what is written as a number is one."""
    with (REFERENCE / f"{name}.csv").open(encoding="utf-8") as file:
        return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


@functools.cache
def sizes(name: str) -> cost_model.Sizes:
    """Returns the sizes of a preset in bfloat16."""
    return cost_model.sizes_of(models.preset(name), "bfloat16", name)


def compared(row: dict[str, Any], foretold: dict[str, float]) -> Compared:
    """Returns the row with what is foretold of its columns."""
    return Compared(row, foretold, {k: v / row[k] - 1 for k, v in foretold.items()})


def table6() -> list[Compared]:
    """Returns MagicDec's table 6 foretold: times in ms, and the speed-up at its tokens per step."""
    return [compared(row, _times(row)) for row in published("magicdec_table6")]


def _times(row: dict[str, Any]) -> dict[str, float]:
    gamma = row["gamma"]
    of_round = _round(row, row["draft"].split("+")[0])
    return {
        "t_target_ms": 1e3 * of_round.target,
        "t_verify_ms": 1e3 * of_round.verify,
        "gamma_t_draft_ms": 1e3 * gamma * of_round.draft,
        "speedup": of_round.speed_up(row["tokens_per_step"]),
    }


def _round(row: dict[str, Any], drafter: str) -> cost_model.RoundCost:
    draft = cost_model.Draft(sizes(row["model"] if drafter == "self" else drafter), row["budget"])
    machine = cost_model.Machine(cost_model.find_device(row["device"]), model=row["n_devices"])
    gamma = row["gamma"]
    where = row["batch"], row["context"]
    return cost_model.round_cost(sizes(row["model"]), draft, machine, *where, gamma + 1, gamma)


def table1() -> list[Compared]:
    """Returns MagicDec's table 1 foretold, at the acceptance published for Llama-3.1-8B."""
    found = []
    for row in published("magicdec_table1"):
        tokens = expected_tokens(chain(row["gamma"]), rate_at(row["context"]))
        found.append(compared(row, {"speedup": _round(row, "self").speed_up(tokens)}))
    return found


def rate_at(context: int) -> list[float]:
    """Returns the acceptance published for Llama-3.1-8B with a streaming cache of 512."""
    measured = acceptance.read_table(ACCEPTANCE, TARGET)
    table, _ = acceptance.at_context(measured, context)[DRAFT]
    return table[0].tolist()


def published_acceptance() -> list[acceptance.Measured]:
    """Returns all acceptance published for Llama-3.1-8B on PG-19.

    By context for a streaming cache of 512; the other drafts' follows from the tokens per step of
    table 6, at its one context: the mean over its batches of the rate that gives them.
    """
    rates: dict[tuple[str, int], list[float]] = {}
    for row in published("magicdec_table6"):
        drafter, policy = row["draft"].split("+")
        name = f"self:{policy}" if drafter == "self" else f"small:{drafter}:{policy}"
        rate = rate_of(row["tokens_per_step"], row["gamma"])
        assert rate is not None  # no round emits more than its nodes
        rates.setdefault((f"{name}:{row['budget']}", row["context"]), []).append(rate)
    found = acceptance.read_table(ACCEPTANCE, TARGET)
    by_context = {measured.drafter for measured in found}
    return found + [
        acceptance.Measured(name, context, ((float(np.mean(each)),),))
        for (name, context), each in rates.items()
        if name not in by_context
    ]


def winners(rows: Sequence[Compared]) -> list[tuple[int, set[str], str]]:
    """Returns by batch (B, the drafts that are fastest as published, the fastest as foretold).

    Those within `TIE` of the fastest published are fastest too.
    """
    found = []
    for batch in dict.fromkeys(r.row["batch"] for r in rows):
        mine = [r for r in rows if r.row["batch"] == batch]
        most = max(r.row["speedup"] for r in mine)
        best = {r.row["draft"] for r in mine if r.row["speedup"] >= (1 - TIE) * most}
        foretold = max(mine, key=lambda r: r.foretold["speedup"]).row["draft"]
        found.append((batch, best, foretold))
    return found


def claim(device: str = "a100", devices: int = 8) -> tuple[np.ndarray, float | None]:
    """Returns (speed-ups [contexts, batches] of the claim, the context where they turn)."""
    machine = cost_model.Machine(cost_model.find_device(device), model=devices)
    target = sizes(TARGET)
    draft = cost_model.Draft(target, CLAIM_BUDGET)
    found = np.zeros((len(CLAIM_CONTEXTS), len(CLAIM_BATCHES)))
    for i, context in enumerate(CLAIM_CONTEXTS):
        tokens = expected_tokens(chain(CLAIM_GAMMA), rate_at(context))
        for j, batch in enumerate(CLAIM_BATCHES):
            where = batch, context, CLAIM_GAMMA + 1, CLAIM_GAMMA
            found[i, j] = cost_model.round_cost(target, draft, machine, *where).speed_up(tokens)
    candidate = Candidate(DRAFT, draft, ((1.0,),))
    ends = CLAIM_BATCHES[0], CLAIM_BATCHES[-1]
    return found, inflection(target, candidate, machine, CLAIM_GAMMA, ends)


def table2() -> list[Compared]:
    """Returns SpecInfer's table 2 foretold from its table 1: <1,1,k,1,1,1,1,1> for widths k."""
    rates = {(r["dataset"], r["decoding"]): r for r in published("specinfer_table1_success_rate")}
    found = []
    for row in published("specinfer_table2_tokens_per_step"):
        ranks = by_rank(rates[row["dataset"], row["decoding"]])
        trees = {f"width{k}": expansion((1, 1, k, 1, 1, 1, 1, 1)) for k in WIDTHS}
        found.append(compared(row, {k: expected_tokens(t, ranks) for k, t in trees.items()}))
    return found


def by_rank(row: dict[str, Any]) -> np.ndarray:
    """Returns how often the target's token is each of the draft's five likeliest."""
    return np.diff([0.0, *(row[f"top{k}"] for k in WIDTHS)])


def most_gain(row: dict[str, Any]) -> float:
    """Returns the most tokens that width can add at these rates: every miss of level 3 is caught.

    Two levels are passed, the third misses, and a caught miss emits itself and what the five
    levels below it bring.
    """
    rate = row["top1"]
    return rate**2 * (1 - rate) * sum(rate**i for i in range(6))


def summary(rows: Sequence[Compared], column: str) -> str:
    """Returns the mean and the largest error of a column in words."""
    errors = np.abs([row.errors[column] for row in rows])
    return f"{column}: mean {errors.mean():.1%}, largest {errors.max():.1%}"


def report() -> str:
    """Returns everything as text."""
    return "\n\n".join([_table6(), _table1(), _claim(), _table2()])


def _beside(foretold: float, row: dict[str, Any], column: str) -> str:
    return f"{foretold:7.2f} {row[column]:6.2f} {foretold / row[column] - 1:+6.1%}"


def _table6() -> str:
    rows = table6()
    lines = [
        "MagicDec, table 6: Llama-3.1-8B on 8 H100, context 32,000 (foretold, published, error)",
        f"{'draft':24}{'B':>4}{'γ':>3}  " + "  ".join(f"{name:>21}" for name in TIMES),
    ]
    for r in rows:
        name = f"{r.row['draft']}:{r.row['budget']}"
        figures = "  ".join(_beside(r.foretold[column], r.row, column) for column in TIMES)
        lines.append(f"{name:27}{r.row['batch']:>4}{r.row['gamma']:>3} {figures}")
    lines += [summary(rows, column) for column in TIMES]
    for batch, best, foretold in winners(rows):
        right = "as published" if foretold in best else "NOT as published"
        lines.append(
            f"batch {batch}: fastest {' or '.join(sorted(best))}; foretold {foretold}, {right}"
        )
    return "\n".join(lines)


def _table1() -> str:
    rows = table1()
    lines = ["MagicDec, table 1: a streaming cache of 512 drafts (foretold, published, error)"]
    for r in rows:
        row = r.row
        where = f"{row['n_devices']} x {row['device']}"
        place = f"context {row['context']}, batch {row['batch']}, γ {row['gamma']}"
        figures = _beside(r.foretold["speedup"], row, "speedup")
        lines.append(f"{row['model']:16}{where:10}{place:38}{figures}")
    lines.append(summary(rows, "speedup"))
    lines.append(
        "Acceptance is Llama-3.1-8B's at that context, 0.81 at 32,000 and 0.83 at 8,000, also for "
        "Llama-2-7B, of which none is published."
    )
    return "\n".join(lines)


def _claim() -> str:
    found, turn = claim()
    rates = ", ".join(f"{rate_at(context)[0]:.2f} at {context}" for context in CLAIM_CONTEXTS)
    lines = [
        f"MagicDec's claim: speed-up of {TARGET} on 8 A100, γ {CLAIM_GAMMA}, budget {CLAIM_BUDGET}",
        f"{'context':>8}" + "".join(f"{f'B={b}':>8}" for b in CLAIM_BATCHES),
    ]
    for context, row in zip(CLAIM_CONTEXTS, found, strict=True):
        lines.append(f"{context:8}" + "".join(f"{value:8.2f}" for value in row))
    lines.append(f"Acceptance as published: {rates} (below 4,000 that of 4,000).")
    lines.append(
        f"From context {turn:,.0f} on {CLAIM_BATCHES[-1]} rows gain more than one."
        if turn is not None
        else "It does not turn."
    )
    return "\n".join(lines)


def _table2() -> str:
    rows = table2()
    columns = [f"width{k}" for k in WIDTHS]
    lines = [
        "SpecInfer, table 2 from table 1: <1,1,k,1,1,1,1,1> (foretold, published, error)",
        f"{'':18}" + "".join(f"{column:>23}" for column in columns),
    ]
    for r in rows:
        figures = "  ".join(_beside(r.foretold[column], r.row, column) for column in columns)
        lines.append(f"{r.row['dataset']:7}{r.row['decoding']:11}{figures}")
    for decoding in ("greedy", "stochastic"):
        mine = [r for r in rows if r.row["decoding"] == decoding]
        of_width = ", ".join(
            f"k={k} {np.mean([r.errors[f'width{k}'] for r in mine]):+.1%}" for k in WIDTHS
        )
        lines.append(f"{decoding}: mean error {of_width}")
    return "\n".join([*lines, _missed(rows)])


def _missed(rows: Sequence[Compared]) -> str:
    """Returns what a success rate by rank alone cannot say."""
    rates = {(r["dataset"], r["decoding"]): r for r in published("specinfer_table1_success_rate")}
    beyond = []
    for r in rows:
        gain = r.row["width5"] - r.row["width1"]
        most = most_gain(rates[r.row["dataset"], r.row["decoding"]])
        if gain > most:
            name = f"{r.row['dataset']} {r.row['decoding']}"
            beyond.append(f"{name} ({gain:.2f}, at most {most:.2f})")
    return (
        "What the model misses: it has one success rate for each rank, the same at every depth, in "
        "every prompt and round. Chains come out too long (width 1), under sampling most: the "
        "positions where rounds begin, behind a token that the draft missed or never saw, seem "
        "harder for it than the average position that table 1 counts. And width brings more than "
        "foretold: from 1 to 5 published tokens rise by more than these rates admit even if a "
        f"wider third level caught every miss there: {', '.join(beyond) or 'nowhere'}. No choice "
        "of rates for the later ranks mends that, so a plan for trees wants acceptance measured by "
        "depth and rank in rounds as they happen (stats.acceptance_by_rank)."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after printing the comparison."""
    argparse.ArgumentParser(
        prog="python -m experiments.studies.cost_tables", description=__doc__.split("\n", 1)[0]
    ).parse_args(arguments)
    print(report())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
