"""Is the plan right? What `drafter="auto"` chooses, against a grid in which everything is measured.

`python -m experiments.studies.plan_check` goes through batches and contexts. In each it lets the
planner
choose: what it foretells from the profile and its trials is one column, what it expects after its
run-off another. Then it measures every drafter with every depth on the same prompts: the rounds of
a whole run, which are the same on any machine, and the time of a round, in turns with plain
decoding. The fastest three and the plan's own pick are timed again, with more turns, so that noise
picks no winner. The last columns are `auto` itself, its depth planned anew as it goes, against
plain decoding. Every cell is written when it is done; a run that was stopped goes on, if settings,
profile and code are the same.
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
from jaxtyping import Int

import magicjax
from experiments import prompts
from experiments.runner import provenance
from experiments.schema import store
from magicjax import cost_model
from magicjax.autotune.auto import run_choice
from magicjax.autotune.trial import behind_prompts
from magicjax.decoding import runner
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.paired_timing import take_turns, variants_of
from magicjax.decoding.request import Request, prepare
from magicjax.drafters.spec import make_drafter
from magicjax.planner.candidates import name_of
from magicjax.trees.token_tree import ROOT_ONLY, chain

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
      turns: in which the fastest are timed again; all of the grid in a quarter of them, and auto
        and plain decoding in a third, whole runs each.
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
    turns: int = 60


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

    def steps(self, way: Way) -> int:
        """Returns the rounds of the loop, from the prompts to the last token of the last row.

        Raises RuntimeError if the text is not that of plain decoding.
        """
        state, _ = self._run(way)
        return int(np.asarray(state.histogram).sum(1).max())

    def ratios(self, ways: Sequence[Way], turns: int) -> dict[Way, float]:
        """Returns how long a round takes, over a round of plain decoding: a median over turns.

        What a turn calls takes a fraction of a second: a machine that is slow for seconds at a
        time, because others use it too, is so for all of a turn.
        """
        deep = [(self.requests[name], chain(depth)) for name, depth in ways]
        plain_too = dataclasses.replace(deep[0][0], drafter=None)  # one state for all
        variants, state, _ = variants_of(self.behind, [(plain_too, ROOT_ONLY), *deep])
        state = take_turns(variants, state, turns)
        self.behind.take_back(state, self.requests[PLAIN])
        plain, *rest = (variant.seconds for variant in variants)
        return {
            way: statistics.median(np.divide(seconds, plain))
            for way, seconds in zip(ways, rest, strict=True)
        }

    def auto_speed_up(self, choice: magicjax.Choice, turns: int) -> float:
        """Returns the speed-up of what `drafter="auto"` runs: a median over pairs of whole runs.

        Where it is off, it runs the very program of plain decoding, and has none.
        """
        if choice.drafter is None:
            return 1.0
        found = []
        for turn in range(turns + 1):
            pair = {}
            for auto in (True, False) if turn % 2 else (False, True):
                pair[auto] = self._auto(choice) if auto else self._run((PLAIN, 0))[1]
            found.append(pair[False] / pair[True])
        return statistics.median(found[1:])

    def _run(self, way: Way) -> tuple[DecodeState, float]:
        request = self._request(way)
        state, _ = self.behind.state(request)
        state, seconds, _ = runner.run(request, request.settings, state)
        self._ended(request, state, way)
        return state, seconds

    def _auto(self, choice: magicjax.Choice) -> float:
        """Returns the seconds of the loop that `drafter="auto"` runs."""
        request = self._request((choice.name, 0))
        state, _ = self.behind.state(request)
        state, _, seconds, _ = run_choice(request, choice, state, tried=True)
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
    auto = magicjax.Auto(drafters, profile=settings.profile, tree=chain(max(settings.depths)))
    cell = Cell(settings, target, drafters, rows)
    choice = magicjax.choose_drafter(target, rows, auto, **cell.options)
    steps = {(PLAIN, 0): cell.steps((PLAIN, 0))}

    def speed_ups(ways: Sequence[Way], turns: int) -> dict[Way, float]:
        steps.update((way, cell.steps(way)) for way in ways if way not in steps)
        ratios = cell.ratios(ways, turns)
        return {way: steps[PLAIN, 0] / (steps[way] * ratios[way]) for way in ways}

    grid: dict[Way, float] = {}
    for name in cell.drafters:
        grid |= speed_ups([(name, depth) for depth in settings.depths], settings.turns // 4)
    fastest = sorted(grid, key=lambda way: -grid[way])[:3]
    planned = _planned(choice)
    ways = list(dict.fromkeys([*([planned] if planned else []), *fastest]))
    again = speed_ups(ways, settings.turns)
    best = max(fastest, key=lambda way: again[way])
    on = planned is not None and choice.drafter is not None
    return {
        "chosen": _words(planned) if planned and on else "off",
        "planned": _words(planned) if planned else None,
        "foretold": choice.foretold[planned[0]] if planned else None,
        "expected": choice.plan.best.speed_up if choice.plan else None,
        "measured": again[planned] if planned else None,
        "best": _words(best),
        "best_speed_up": again[best],
        "chosen_speed_up": again[planned] if planned and on else 1.0,
        "auto_speed_up": cell.auto_speed_up(choice, settings.turns // 3),
        "again": {_words(way): speed for way, speed in again.items()},
        "steps": {_words(way): count for way, count in steps.items()},
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


def made_by(settings: Settings) -> dict[str, Any]:
    """Returns what cells of one folder have in common."""
    profile = _profile_of(settings)
    common = dataclasses.asdict(settings)
    for name in ("profile", "results", "batch", "context"):
        del common[name]
    return json.loads(json.dumps(common)) | {
        "profile": store.digest(profile.read_text()),
        "device": cost_model.device_kind(),
        "jax": jax.__version__,
        "code": provenance.code(),
    }


def _profile_of(settings: Settings) -> pathlib.Path:
    return pathlib.Path(settings.profile or cost_model.default_profile())


def check_folder(folder: pathlib.Path, made: dict[str, Any]) -> None:
    """Writes what makes a folder's cells; raises ValueError if something else made those there."""
    known = store.read_json(folder / "made_by.json") or {}
    if any((folder / "cells").glob("*.json")) and known != made:
        other = [name for name in made if known.get(name) != made[name]]
        raise ValueError(
            f"{folder} has cells that were made with another {', '.join(other)}: give another "
            "--results, or remove them"
        )
    store.write_json(folder / "made_by.json", made)


def main(settings: Settings) -> None:
    """Measures the cells that are not there yet, prints the table and writes it.

    A profile, folder, target or drafter that will not do ends it with one line; the first two
    before anything is loaded.
    """

    def load(path: str) -> magicjax.Model:
        return magicjax.load(path, dtype="float32")

    folder, rows = pathlib.Path(settings.results), []
    try:
        cost_model.load_profile(_profile_of(settings))
        check_folder(folder, made_by(settings))
        target = load(settings.target)
        drafters = [make_drafter(text, load) for text in settings.drafters]
    except (ValueError, OSError) as error:
        sys.exit(f"plan_check: {error}")
    for context in settings.context:
        for batch in settings.batch:
            path = folder / "cells" / f"{batch}-{context}.json"
            if not path.exists():
                fit = [d for d in drafters if (getattr(d, "budget", None) or 0) < context]
                made = prompts.make(prompts.STDLIB, target.tokenizer, "", batch, context)
                found = measure(settings, target, fit, [prompt.tokens for prompt in made])
                store.write_text(path, json.dumps(found, indent=1) + "\n")
            rows.append(row_of(batch, context, json.loads(path.read_text())))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
    table = pd.DataFrame(rows)
    store.write_text(folder / "plan_check.csv", table.round(4).to_csv(index=False))
    print(table.round(3).to_string(index=False))
    print(summary(table))


if __name__ == "__main__":
    main(tyro.cli(Settings))
