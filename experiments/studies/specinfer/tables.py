"""Tables 2 to 5: the compared cells and their rows.

Every function takes a runner or a dry run and returns one row per cell.
"""

import pathlib
from typing import Any

import magicjax
from experiments.schema.grid import Cell
from experiments.studies.specinfer.runs import DryRun, Result, Runner, optimal_tree, probe_cell
from experiments.studies.specinfer.settings import Tables, speculative
from experiments.studies.specinfer.statistics import mean_and_error, ratio
from magicjax import parse_tree

DECODINGS = {"greedy": False, "sampled": True}
DRAWS = ("without_replacement", "with_replacement")

Rows = list[dict[str, Any]]


def widths(tables: Tables, runner: Runner | DryRun) -> Rows:
    """Returns table 2: tokens per step by the width of one level, gain over the smallest width."""
    rows = []
    for decoding, sampled in DECODINGS.items():
        results = []
        for width in tables.widths:
            cell = speculative(tables, sampled, tables.drafts[:1], tables.tree_of_width(width))
            results.append(runner.run(cell))
            labels = {"decoding": decoding, "width": width}
            rows.append(_row(labels, cell, results[-1], results[0]))
    return rows


def verifiers(tables: Tables, runner: Runner | DryRun) -> Rows:
    """Returns table 3: naive against multi-step verification of the same draws."""
    rows = []
    tree, draft = tables.tree_of_width(tables.widths[-1]), tables.drafts[:1]
    for draw in DRAWS:
        option = "" if draw == DRAWS[0] else draw  # the default gives the cell of table 2
        naive = runner.run(speculative(tables, True, draft, tree, option, "naive"))
        cell = speculative(tables, True, draft, tree, option)
        mss = runner.run(cell)
        for verifier, result in (("naive", naive), ("mss", mss)):
            rows.append(_row({"draw": draw, "verifier": verifier}, cell, result, naive))
    return rows


def ensembles(tables: Tables, runner: Runner | DryRun) -> Rows:
    """Returns table 4: each draft alone, and all merged, with at most as many nodes."""
    rows = []
    for decoding, sampled in DECODINGS.items():
        cells = [speculative(tables, sampled, [d], tables.merging.single) for d in tables.drafts]
        cells.append(speculative(tables, sampled, tables.drafts, tables.merging.member))
        results = [runner.run(cell) for cell in cells]
        best = max(results[:-1], key=lambda result: result.tau.mean())
        for cell, result in zip(cells, results, strict=True):
            kind = "merged" if result is results[-1] else "single"
            rows.append(_row({"decoding": decoding, "kind": kind}, cell, result, best))
    return rows


def shapes(tables: Tables, runner: Runner | DryRun) -> Rows:
    """Returns table 5: expansion, optimal and dynamic trees of the same size."""
    rows = []
    for decoding, sampled in DECODINGS.items():
        acceptance = runner.probe(probe_cell(tables, sampled))
        for size in tables.sizes:
            optimal = optimal_tree(tables, acceptance, size.nodes)
            trees = {"expansion": size.expansion, "optimal": optimal}
            if not sampled:
                trees["dynamic"] = size.dynamic
            results = []
            for kind, tree in trees.items():
                cell = speculative(tables, sampled, tables.drafts[:1], tree)
                results.append(runner.run(cell))
                labels = {"decoding": decoding, "size": size.nodes, "kind": kind}
                row = _row(labels, cell, results[-1], results[0])
                rows.append(row | {"expected": _expected(tree, acceptance)})
    return rows


def _expected(tree: str, acceptance: list[list[float]]) -> float | None:
    """Returns the tokens per step predicted by the acceptance, None if it has too few ranks."""
    static = parse_tree(tree)
    if isinstance(static, magicjax.DynamicTree) or static.width > len(acceptance[0]):
        return None
    return magicjax.expected_tokens(static, acceptance)


def _row(labels: dict[str, Any], cell: Cell, result: Result, base: Result) -> dict[str, Any]:
    """Returns a row; the gain is the tokens per step relative to `base`, on the same requests."""
    tau, gain = mean_and_error(result.tau), ratio(result.tau, base.tau)
    return labels | {
        "draft": " + ".join(pathlib.PurePath(path).name for path in cell.models),
        "tree": cell.tree,
        "depth": cell.gamma,
        "nodes": cell.nodes,
        "nodes_per_round": result.nodes_per_round,
        "tau": tau.value,
        "tau_error": tau.error,
        "exact": result.exact,
        "ties": result.ties,
        "requests": len(result.tau),
        "gain": gain.value,
        "gain_error": gain.error,
    }
