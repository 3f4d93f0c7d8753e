"""Runs a cell on every request, one request per call, so that each has its own tokens per step.

Finished cells are stored under a key of their settings, prompts, weights and code, so a killed run
can be resumed.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

import magicjax
from experiments import prompts
from experiments.runner import exactness, preflight, provenance
from experiments.runner.workload import Bench
from experiments.schema import grid, store
from experiments.schema.fields import ConfigError
from experiments.schema.grid import Cell
from experiments.studies.specinfer import settings
from experiments.studies.specinfer.settings import Tables
from magicjax.drafters.spec import parse_trees


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a cell.

    Attributes:
      tau: [R], tokens per step of each request, the bonus token included.
      nodes_per_round: mean over requests, the root included.
      exact: share of requests with plain decoding's tokens; None under sampling.
      ties: requests that differ from it at a tie decided by rounding.
    """

    tau: Float[np.ndarray, "R"]
    nodes_per_round: float
    exact: float | None
    ties: int


class Requests(NamedTuple):
    """Prompts to compare methods on, and others to measure acceptance on.

    Attributes:
      prompts: int32 [R, T].
      plain: int32 [R, M], their greedy continuations by plain decoding.
      probes: int32 [P, T].
    """

    prompts: Int[np.ndarray, "R T"]
    plain: Int[np.ndarray, "R M"]
    probes: Int[np.ndarray, "P T"]


def choose(tables: Tables, bench: Bench) -> Requests:
    """Returns the requests: the parts of held-out text with the least repetitive plain output.

    Raises:
      ConfigError: the text is too short for prompts that do not overlap.
    """
    cell = settings.plain(tables, sampled=False)
    stream = prompts.stdlib_stream(bench.model(tables.target, tables.dtype).tokenizer)
    count = tables.requests + tables.probes
    tried = count * tables.candidates
    if tried * tables.context > len(stream):
        raise ConfigError(
            f"(requests + probes) * candidates = {tried} prompts of context={tables.context} "
            f"exceed the {len(stream)} held-out tokens: use fewer or shorter prompts"
        )
    outputs: dict[bytes, np.ndarray] = {}

    def continue_plainly(rows: np.ndarray) -> np.ndarray:
        tokens = np.asarray(bench.run(cell, rows).tokens)
        outputs.update((row.tobytes(), out) for row, out in zip(rows, tokens, strict=True))
        return tokens

    cut = prompts.cut(stream, tried, tables.context)
    chosen = cut[prompts.least_repetitive(cut, count, continue_plainly)]
    if not outputs:
        continue_plainly(chosen)
    # Probes are spread over the text: 4 probes of 8 prompts are every other one.
    probes = np.arange(tables.probes) * count // tables.probes
    rows = np.delete(chosen, probes, 0)
    return Requests(rows, np.stack([outputs[row.tobytes()] for row in rows]), chosen[probes])


class Runner:
    """Runs cells, or reads their stored results, and counts the runs in a progress bar."""

    def __init__(self, tables: Tables, bench: Bench, bar: tqdm):
        self.tables, self.bench, self.bar = tables, bench, bar
        self.directory = pathlib.Path(tables.results) / tables.name
        self.requests = choose(tables, bench)
        self._done: dict[str, dict[str, Any]] = {}

    def run(self, cell: Cell) -> Result:
        """Returns the cell's result on every request."""
        runs = len(self.requests.prompts) * runs_of(self.tables, cell)
        raw = self._once(cell, self.requests.prompts, self._measure, runs)
        return Result(np.array(raw["tau"]), raw["nodes_per_round"], raw["exact"], raw["ties"])

    def probe(self, cell: Cell) -> list[list[float]]:
        """Returns the acceptance by depth and rank on the probes, in one batch."""
        rows = self.requests.probes
        return self._once(cell, rows, self._acceptance, len(rows))["acceptance"]

    def _once(
        self, cell: Cell, rows: np.ndarray, make: Callable[[Cell], dict], runs: int
    ) -> dict[str, Any]:
        """Returns the stored result of `make` for these prompts and runs, or makes it."""
        inputs = {"prompts": hashlib.sha256(rows.tobytes()).hexdigest()[:16], "runs": str(runs)}
        key = grid.key(cell, provenance.of(cell) | {"device": provenance.device_name()} | inputs)
        if key in self._done:
            return self._done[key]
        self.bar.set_description(cell.method[:48])
        record = None if self.tables.fresh else store.read_record(self.directory, key)
        if record is None:
            row = {"status": "ok", "method": cell.method}
            record = {"row": row, "cell": dataclasses.asdict(cell), "made": make(cell)}
            store.write_record(self.directory, key, record)
        else:
            self.bar.update(runs)
        self._done[key] = record["made"]
        return record["made"]

    def _measure(self, cell: Cell) -> dict[str, Any]:
        rows, outputs = self.requests.prompts, []
        for i in range(len(rows) * runs_of(self.tables, cell)):
            seeded = dataclasses.replace(cell, seed=cell.seed + i) if cell.temperature else cell
            outputs.append(self.bench.run(seeded, rows[i % len(rows), None]))
            self.bar.update()
        exact, ties = None, 0
        if not cell.temperature:
            target = self.bench.model(cell.target, cell.dtype, cell.devices)
            tokens = np.concatenate([out.tokens for out in outputs])
            match = exactness.compare(target, rows, self.requests.plain, tokens)
            exact, ties = match.exact, match.ties
        taus = np.array([out.stats.tau_by_request for out in outputs])
        return {
            "tau": taus.reshape(-1, len(rows)).mean(0).tolist(),
            "nodes_per_round": float(np.mean([out.stats.nodes_per_round for out in outputs])),
            "exact": exact,
            "ties": ties,
            "decode_s": sum(out.stats.decode_s for out in outputs),
            "compile_s": sum(out.stats.compile_s for out in outputs),
        }

    def _acceptance(self, cell: Cell) -> dict[str, Any]:
        stats = self.bench.run(cell, self.requests.probes).stats
        self.bar.update(len(self.requests.probes))
        return {"acceptance": [list(ranks) for ranks in stats.acceptance_by_rank]}


class DryRun:
    """Replaces a runner: lists the cells and checks them without running them.

    Attributes:
      work: the number of runs of each cell.
    """

    def __init__(self, tables: Tables):
        self.tables = tables
        self.work: dict[Cell, int] = {}

    def run(self, cell: Cell) -> Result:
        self._note(cell, self.tables.requests * runs_of(self.tables, cell))
        return Result(np.arange(1.0, self.tables.requests + 1), 1.0, None, 0)

    def probe(self, cell: Cell) -> list[list[float]]:
        self._note(cell, self.tables.probes)
        width = parse_trees(cell.tree)[0].shape.width
        return [[0.5**rank for rank in range(1, width + 1)]]

    def _note(self, cell: Cell, runs: int) -> None:
        """Counts a cell; raises ConfigError if it cannot run."""
        self.work[cell] = runs
        try:
            preflight.check_cell(cell)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{cell.method}: {error}") from error


def runs_of(tables: Tables, cell: Cell) -> int:
    """Returns the runs per request; greedy text is deterministic and needs one."""
    return tables.seeds if cell.temperature else 1


def probe_cell(tables: Tables, sampled: bool) -> Cell:
    """Returns the cell of the first draft with the wide tree, all probes in one batch."""
    cell = settings.speculative(tables, sampled, tables.drafts[:1], tables.probe_tree)
    return dataclasses.replace(cell, batch=tables.probes)


def optimal_tree(tables: Tables, acceptance: list[list[float]], nodes: int) -> str:
    """Returns the optimal tree with `nodes` nodes in the syntax of configs."""
    tree = magicjax.optimal(acceptance, nodes, tables.optimal_depth)
    return "parents:" + ",".join(map(str, tree.parents))
