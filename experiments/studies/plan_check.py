"""Compares the choices of `drafter="auto"` with a grid of measurements.

`python -m experiments.studies.plan_check` runs over batches and contexts. In each cell auto makes
its choice, with a predicted and a measured speedup. Then every drafter is measured at every depth
on the same prompts: the rounds of a whole run, and the time of a round, interleaved with plain
decoding. The fastest three and auto's pick are timed again with more repeats. The last column is a
whole run of auto with its adaptive depth against plain decoding. A finished cell is saved; rerun
the command with the same settings, profile and code to resume.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd
import tyro

import magicjax
from experiments import prompts
from experiments.runner import provenance
from experiments.schema import store
from magicjax import cost_model
from magicjax.autotune.auto import run_choice
from magicjax.decoding import runner
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.paired_timing import PrefilledPrompts, Variant, median_ratio, time_variants
from magicjax.decoding.request import Request, prepare
from magicjax.drafters.spec import make_drafter
from magicjax.files import write_atomically
from magicjax.planner.candidates import name_of
from magicjax.trees.token_tree import ROOT_ONLY, chain

PLAIN = ("plain", 0)
Method = tuple[str, int]  # a drafter's name and the depth of its chain


@dataclasses.dataclass
class Settings:
    """Auto's choices against a grid of measurements.

    Attributes:
      target: directory of the target.
      profile: of this device with times of the target; None: the default file of `magicjax
        calibrate`.
      results: folder for cells and tables.
      drafters: the candidates, as commands write them; budgets of at least the context are skipped.
      depths: of chains.
      batch: rows.
      context: tokens of each prompt.
      new_tokens: of each row.
      repeats: of the second timing of the fastest; the grid takes a quarter of them, whole runs of
        auto a third.
    """

    target: str = "experiments/zoo/target"
    profile: str | None = None
    results: str = "results/plan_check"
    drafters: tuple[str, ...] = (
        "self:streaming:64",
        "self:streaming:256",
        "self:streaming:1024",
        "small:experiments/zoo/draft-1",
        "small:experiments/zoo/draft-1:streaming:256",
        "prompt-lookup:4",
    )
    depths: tuple[int, ...] = (1, 2, 4, 6)
    batch: tuple[int, ...] = (1, 4, 8, 16)
    context: tuple[int, ...] = (1024, 4096, 8192)
    new_tokens: int = 96
    repeats: int = 60


class Cell:
    """One batch and context: the prompts after one prefill, and the runs that start from there."""

    def __init__(self, settings: Settings, target: magicjax.Model, drafters: list, rows: list):
        self.options: dict[str, Any] = {"max_new_tokens": settings.new_tokens, "eos_token_id": []}
        tree = chain(max(settings.depths))
        self.requests = {
            name_of(drafter): prepare(target, rows, drafter=drafter, tree=tree, **self.options)
            for drafter in drafters
        }
        first = next(iter(self.requests.values()))
        self.plain = dataclasses.replace(
            first, drafter=None, settings=first.settings.with_tree(ROOT_ONLY)
        )
        self.prefilled = PrefilledPrompts.create(first, drafters)
        self.text: np.ndarray | None = None

    def steps(self, method: Method) -> int:
        """Returns the rounds of a run until the last row has ended."""
        state, _ = self._run(self._request(method))
        return int(np.asarray(state.histogram).sum(1).max())

    def ratios(self, methods: Sequence[Method], repeats: int) -> dict[Method, float]:
        """Returns the time of a round relative to plain decoding, a median over repeats."""
        first = self.requests[methods[0][0]]  # one state for all variants
        plain = Variant(dataclasses.replace(first, drafter=None), self.plain.settings)
        requests = [(self.requests[name], chain(depth)) for name, depth in methods]
        variants = [Variant(one, one.settings.with_tree(tree)) for one, tree in requests]
        measured = time_variants(self.prefilled, [plain, *variants], repeats)
        (baseline, *times), self.prefilled = measured
        ratios = [float(median_ratio(own, baseline)) for own in times]
        return dict(zip(methods, ratios, strict=True))

    def auto_speedup(self, choice: magicjax.Choice, repeats: int) -> float:
        """Returns the median speedup over pairs of whole runs; 1 if auto is off.

        The order of the two runs alternates, and the first pair is not counted.
        """
        if choice.drafter is None:
            return 1.0
        speedups = []
        for repeat in range(repeats + 1):
            seconds = {}
            for auto in (True, False) if repeat % 2 else (False, True):
                request = self.requests[choice.name] if auto else self.plain
                seconds[auto] = self._run(request, choice if auto else None)[1]
            speedups.append(seconds[False] / seconds[True])
        return statistics.median(speedups[1:])

    def _request(self, method: Method) -> Request:
        if method == PLAIN:
            return self.plain
        request = self.requests[method[0]]
        return dataclasses.replace(request, settings=request.settings.with_tree(chain(method[1])))

    def _run(
        self, request: Request, choice: magicjax.Choice | None = None
    ) -> tuple[DecodeState, float]:
        """Returns (the last state, seconds); raises RuntimeError if the text differs from others'.

        With a choice it runs the loop of auto.
        """
        state = self.prefilled.start(request)
        if choice is None:
            state, seconds = runner.run(request, request.settings, state)
        else:
            state, _, seconds = run_choice(request, choice, state, searched=True)
        self.prefilled = self.prefilled.reset(state)
        text = np.asarray(state.output)[:, : request.settings.max_new_tokens]
        self.text = text if self.text is None else self.text
        if (text != self.text).any():
            name = PLAIN[0] if request.drafter is None else name_of(request.drafter)
            raise RuntimeError(f"the text of {name} differs from that of plain decoding")
        return state, seconds


def measure(settings: Settings, target: magicjax.Model, drafters: list, rows: list) -> dict:
    """Returns the choice and the measurements of a cell."""
    auto = magicjax.Auto(drafters, profile=settings.profile, tree=chain(max(settings.depths)))
    cell = Cell(settings, target, drafters, rows)
    choice = magicjax.choose_drafter(target, rows, auto, **cell.options)
    steps = {PLAIN: cell.steps(PLAIN)}

    def speedups(methods: Sequence[Method], repeats: int) -> dict[Method, float]:
        steps.update((method, cell.steps(method)) for method in methods if method not in steps)
        ratios = cell.ratios(methods, repeats)
        return {method: steps[PLAIN] / (steps[method] * ratios[method]) for method in methods}

    grid: dict[Method, float] = {}
    for name in cell.requests:
        grid |= speedups([(name, depth) for depth in settings.depths], settings.repeats // 4)
    fastest = sorted(grid, key=lambda method: -grid[method])[:3]
    timed = choice.timed[0] if choice.timed else None
    pick = (timed.drafter, timed.tree.depth) if timed else None
    again = speedups(list(dict.fromkeys([*([pick] if pick else []), *fastest])), settings.repeats)
    best = max(fastest, key=lambda method: again[method])
    is_on = choice.drafter is not None
    return {
        "chosen": _text(pick) if pick and is_on else "off",
        "pick": _text(pick) if pick else None,
        "predicted": choice.predicted_speedup[pick[0]] if pick else None,
        "timed": timed.speedup if timed else None,
        "measured": again[pick] if pick else None,
        "best": _text(best),
        "best_speedup": again[best],
        "chosen_speedup": again[pick] if pick and is_on else 1.0,
        "auto_speedup": cell.auto_speedup(choice, settings.repeats // 3),
        "again": {_text(method): speedup for method, speedup in again.items()},
        "steps": {_text(method): count for method, count in steps.items()},
        "grid": {_text(method): speedup for method, speedup in grid.items()},
        "trials": [dataclasses.asdict(trial) for trial in choice.trials],
        "skipped": choice.skipped,
    }


def _text(method: Method) -> str:
    name, depth = method
    return f"{name}, chain:{depth}" if depth else name


def row_of(batch: int, context: int, cell: dict[str, Any]) -> dict[str, Any]:
    """Returns a cell's row of the table."""
    predicted, timed, measured = cell["predicted"], cell["timed"], cell["measured"]
    return {
        "batch": batch,
        "context": context,
        "chosen": cell["chosen"],
        "best of grid": cell["best"],
        "best speedup": cell["best_speedup"],
        "chosen speedup": cell["chosen_speedup"],
        "chosen / best": cell["chosen_speedup"] / max(1.0, cell["best_speedup"]),
        "predicted": predicted,
        "timed by auto": timed,
        "measured": measured,
        "error of prediction": None if measured is None else predicted / measured - 1,
        "error of timing": None if measured is None else timed / measured - 1,
        "auto / plain": cell["auto_speedup"],
    }


def summary(table: pd.DataFrame) -> str:
    """Returns the table's extremes as one line."""

    def error(column: str) -> str:
        errors = table[column].dropna().abs()
        return (
            f"{column}: mean {errors.mean():.1%}, largest {errors.max():.1%} ({len(errors)} cells)"
        )

    return (
        f"chosen / best: at least {table['chosen / best'].min():.3f}; "
        f"{error('error of prediction')}; {error('error of timing')}; "
        f"auto / plain: at least {table['auto / plain'].min():.3f}"
    )


def made_by(settings: Settings) -> dict[str, Any]:
    """Returns what the results depend on apart from batch and context."""
    common = dataclasses.asdict(settings)
    for name in ("profile", "results", "batch", "context"):
        del common[name]
    return common | {
        "profile": store.digest(_profile_of(settings).read_text()),
        "device": cost_model.device_kind(),
        "jax": jax.__version__,
        "code": provenance.code(),
    }


def _profile_of(settings: Settings) -> pathlib.Path:
    return pathlib.Path(settings.profile or cost_model.default_profile())


def main(settings: Settings) -> None:
    """Measures the missing cells, prints the table and writes it.

    An invalid profile, target or drafter ends the command with one line.
    """

    def load(path: str, **options) -> magicjax.Model:
        return magicjax.load(path, dtype="float32", **options)

    folder, rows = pathlib.Path(settings.results), []
    try:
        cost_model.load_profile(_profile_of(settings))
        made = made_by(settings)
        target = load(settings.target)
        drafters = [make_drafter(text, load) for text in settings.drafters]
    except (ValueError, OSError) as error:
        sys.exit(f"plan_check: {error}")
    for context in settings.context:
        for batch in settings.batch:
            key = f"{batch}-{context}-{store.digest(json.dumps(made))}"
            cell = store.read_record(folder, key)
            if cell is None:
                fitting = [d for d in drafters if (getattr(d, "budget", None) or 0) < context]
                texts = prompts.make(prompts.STDLIB, target.tokenizer, "", batch, context)
                cell = measure(settings, target, fitting, [prompt.tokens for prompt in texts])
                store.write_record(folder, key, {"made_by": made} | cell)
            rows.append(row_of(batch, context, cell))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
    table = pd.DataFrame(rows)
    write_atomically(folder / "plan_check.csv", table.round(4).to_csv(index=False))
    print(table.round(3).to_string(index=False))
    print(summary(table))


if __name__ == "__main__":
    main(tyro.cli(Settings))
