"""Is the plan right? What `drafter="auto"` chooses, against a grid in which everything is measured.

`python -m experiments.plan_check` goes through batches and contexts. In each it lets the planner
choose: what it foretells from the profile and its trials is one column, what it expects after its
run-off another. Then it measures every drafter with every depth on the same prompts, and
times the fastest three, the plan's own pick and plain decoding again, taking turns, so that noise
picks no winner. The last columns are `auto` itself, its depth planned anew as it goes, against
plain decoding. Every cell is written when it is done; a run that was stopped goes on.
"""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import numpy as np
import pandas as pd
import tyro
from jaxtyping import Int

import magicjax
from experiments import prompts, store
from magicjax import execution
from magicjax.auto import run_choice
from magicjax.candidates import name_of
from magicjax.decode import DecodeState
from magicjax.drafters.written import make_drafter
from magicjax.request import Request, prepare
from magicjax.tree import ROOT_ONLY, chain
from magicjax.trial import behind_prompts

PLAIN = "plain"
Way = tuple[str, int]  # a drafter's name and a depth
AUTO: Way = ("auto", 0)


@dataclasses.dataclass
class Settings:
    """The planner's choices against everything measured.

    Attributes:
      target: directory of the target.
      profile: of this device, which has timed the target; None: where `magicjax calibrate` writes.
      results: folder for cells and tables.
      drafters: what is tried, as commands write it; budgets beyond a context are left out.
      depths: of chains.
      batch: rows.
      context: tokens of each prompt.
      new_tokens: of each row.
      turns: in which the fastest are timed again.
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
        "look-up:4",
    )
    depths: tuple[int, ...] = (1, 2, 4, 6)
    batch: tuple[int, ...] = (1, 4, 8, 16)
    context: tuple[int, ...] = (1024, 4096, 8192)
    new_tokens: int = 96
    turns: int = 7


class Cell:
    """One batch and context: the prompts, read once, and whatever runs behind them."""

    def __init__(self, settings: Settings, target: magicjax.Model, drafters: list, rows: list):
        self.target, self.rows = target, rows
        self.options: dict[str, Any] = {"max_new_tokens": settings.new_tokens, "eos_token_id": []}
        self.drafters = {name_of(drafter): drafter for drafter in drafters}
        self.deepest = chain(max(settings.depths))
        self.requests = {
            name: prepare(target, rows, drafter=drafter, tree=self.deepest, **self.options)
            for name, drafter in self.drafters.items()
        }
        first = next(iter(self.requests.values()))
        plain = dataclasses.replace(
            first, drafter=None, settings=first.settings.with_tree(ROOT_ONLY)
        )
        self.requests[PLAIN] = plain
        self.behind, _, _ = behind_prompts(first, drafters)
        self.text: Int[np.ndarray, "B M"] | None = None

    def seconds(self, way: Way) -> float:
        """Returns the seconds of the loop, from the prompts to the last token.

        Raises RuntimeError if the text is not that of plain decoding.
        """
        request = self._request(way)
        state, _ = self.behind.state(request)
        state, seconds, _ = execution.run(request, request.settings, state)
        self._ended(request, state, way)
        return seconds

    def auto_seconds(self, choice: magicjax.Choice) -> float:
        """Returns the seconds of the loop that `drafter="auto"` runs."""
        request = self._request((PLAIN, 0) if choice.drafter is None else (choice.name, 0))
        state, _ = self.behind.state(request)
        state, _, seconds, _ = run_choice(request, choice, state)
        self._ended(request, state, AUTO)
        return seconds

    def _ended(self, request: Request, state: DecodeState, way: Way) -> None:
        text = np.asarray(state.output)[:, : request.settings.max_new_tokens]
        self.behind.take_back(state, request)
        self.text = text if self.text is None else self.text
        if (text != self.text).any():
            raise RuntimeError(f"{_words(way)} gives another text than plain decoding")

    def _request(self, way: Way) -> Request:
        name, depth = way
        request = self.requests[name]
        if not depth:
            return request
        return dataclasses.replace(request, settings=request.settings.with_tree(chain(depth)))


def measure(settings: Settings, target: magicjax.Model, drafters: list, rows: list) -> dict:
    """Returns what was chosen and measured in a cell."""
    auto = magicjax.Auto(drafters, device=settings.profile, tree=chain(max(settings.depths)))
    cell = Cell(settings, target, drafters, rows)
    choice = magicjax.choose_drafter(target, rows, auto, **cell.options)
    plain = min(cell.seconds((PLAIN, 0)) for _ in range(3))
    grid = {
        (name, depth): plain / cell.seconds((name, depth))
        for name in cell.drafters
        for depth in settings.depths
    }
    fastest = sorted(grid, key=lambda way: -grid[way])[:3]
    planned = _planned(choice)
    ways = dict.fromkeys([(PLAIN, 0), *([planned] if planned else []), *fastest])
    times: dict[Way, list[float]] = {way: [] for way in (*ways, AUTO)}
    order = np.random.default_rng(0)
    for _ in range(settings.turns + 1):
        for i in order.permutation(len(times)):  # what runs before has a share in a time
            way = list(times)[i]
            seconds = cell.auto_seconds(choice) if way == AUTO else cell.seconds(way)
            times[way].append(seconds)
    speed_ups = {
        way: statistics.median(np.divide(times[PLAIN, 0][1:], found[1:]))
        for way, found in times.items()
    }
    best = max(fastest, key=lambda way: speed_ups[way])
    on = planned is not None and choice.drafter is not None
    return {
        "chosen": _words(planned) if planned and on else "off",
        "planned": _words(planned) if planned else None,
        "foretold": choice.foretold[planned[0]] if planned else None,
        "expected": choice.plan.best.speed_up if choice.plan else None,
        "measured": speed_ups[planned] if planned else None,
        "best": _words(best),
        "best_speed_up": speed_ups[best],
        "chosen_speed_up": speed_ups[planned] if planned and on else 1.0,
        "auto_speed_up": speed_ups[AUTO],
        "again": {_words(way): speed for way, speed in speed_ups.items()},
        "grid": {_words(way): speed for way, speed in grid.items()},
        "trials": [dataclasses.asdict(trial) for trial in choice.trials],
        "skipped": choice.skipped,
    }


def _planned(choice: magicjax.Choice) -> Way | None:
    """Returns the plan's best way, also where it was not chosen because it does not pay."""
    if choice.plan is None:
        return None
    return choice.plan.best.drafter, choice.plan.best.tree.depth


def _words(way: Way) -> str:
    name, depth = way
    return f"{name}, chain:{depth}" if depth else name


def row_of(batch: int, context: int, found: dict[str, Any]) -> dict[str, Any]:
    """Returns a cell's line of the table."""
    best = max(1.0, found["best_speed_up"])
    foretold, measured = found["foretold"], found["measured"]
    return {
        "batch": batch,
        "context": context,
        "chosen": found["chosen"],
        "best of the grid": found["best"],
        "its speed-up": found["best_speed_up"],
        "of the choice": found["chosen_speed_up"],
        "choice / best": found["chosen_speed_up"] / best,
        "foretold": foretold,
        "expected": found["expected"],
        "measured": measured,
        "error": None if foretold is None else foretold / measured - 1,
        "error of expected": None if foretold is None else found["expected"] / measured - 1,
        "auto / plain": found["auto_speed_up"],
    }


def summary(table: pd.DataFrame) -> str:
    """Returns the sentences that the table is measured by."""
    errors = {
        name: table[column].dropna().abs()
        for name, column in (("foretold", "error"), ("expected", "error of expected"))
    }
    said = (
        f"{name} against measured speed-up: mean error {found.mean():.1%}, largest "
        f"{found.max():.1%} ({len(found)} cells)"
        for name, found in errors.items()
    )
    return "; ".join(
        [
            f"choice / best: at least {table['choice / best'].min():.3f}",
            *said,
            f"auto / plain: at least {table['auto / plain'].min():.3f}",
        ]
    )


def main(settings: Settings) -> None:
    """Measures the cells that are not there yet, prints the table and writes it."""
    target = magicjax.load(settings.target, dtype="float32")
    stream = prompts.held_out_stream(target.tokenizer)
    folder, rows = pathlib.Path(settings.results), []

    def load(path: str) -> magicjax.Model:
        return magicjax.load(path, dtype="float32")

    drafters = [make_drafter(text, load) for text in settings.drafters]
    for context in settings.context:
        for batch in settings.batch:
            path = folder / "cells" / f"{batch}-{context}.json"
            if not path.exists():
                fit = [d for d in drafters if (getattr(d, "budget", None) or 0) < context]
                text = list(prompts.cut(stream, batch, context))
                found = measure(settings, target, fit, text)
                store.write_text(path, json.dumps(found, indent=1) + "\n")
            rows.append(row_of(batch, context, json.loads(path.read_text())))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
    table = pd.DataFrame(rows)
    store.write_text(folder / "plan_check.csv", table.round(4).to_csv(index=False))
    print(table.round(3).to_string(index=False))
    print(summary(table))


if __name__ == "__main__":
    main(tyro.cli(Settings))
