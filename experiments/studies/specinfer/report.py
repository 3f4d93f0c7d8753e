"""The report: each table, the paper's figures, and a verdict for each of the paper's claims."""

from typing import Any, NamedTuple

import jax
import numpy as np

import magicjax
from experiments.runner.provenance import device_name
from experiments.studies.cost_tables import published
from experiments.studies.specinfer.settings import Tables
from experiments.studies.specinfer.statistics import CLEAR, Estimate, name_of
from experiments.studies.specinfer.success import GREEDY, KINDS, MSS, NAIVE
from magicjax import parse_tree
from magicjax.benchmarks.tables import markdown_table, record_table

SPECINFER = {"greedy": "greedy", "sampled": "stochastic"}  # our word for decoding -> the paper's
VERDICTS = {1: "follows", 0: "undecided", -1: "does not follow"}
IN_DIRECTION = "follows in direction, not in size"

Rows = list[dict[str, Any]]


class Range(NamedTuple):
    """The lowest and highest value over the paper's data sets."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    def position(self, estimate: Estimate) -> str:
        """Returns whether an estimate is clearly "above" or "below" the range, else "within"."""
        if estimate.side_of(self.high) > 0:
            return "above"
        return "below" if estimate.side_of(self.low) < 0 else "within"


def range_of(values: list[float]) -> Range:
    """Returns the range of the values."""
    return Range(min(values), max(values))


def verdict(sign: int, position: str = "within") -> str:
    """Returns whether a claim of the paper holds.

    Args:
      sign: 1 if our figure clearly has the claimed direction, -1 if the opposite, 0 if neither.
      position: of our figure relative to the paper's range.
    """
    if position == "within":
        return VERDICTS[sign]
    return IN_DIRECTION if sign > 0 else VERDICTS[-1]


def write(tables: Tables, made: dict[int, Rows]) -> str:
    """Returns the report as Markdown."""
    sections = {1: _success, 2: _widths, 3: _verifiers, 4: _ensembles, 5: _shapes}
    parts = [_opening(tables)]
    for number in sorted(made):
        parts += sections[number](tables, made)
    return "\n\n".join(parts) + "\n"


def _opening(tables: Tables) -> str:
    return (
        "# Token trees compared with the papers\n\n"
        f"Target {tables.target}, drafts {', '.join(tables.drafts)}, {tables.dtype}, "
        f"{device_name()}, JAX {jax.__version__}. Tables 2 to 5: {tables.requests} requests of "
        f"{tables.context} held-out tokens with {tables.new_tokens} new tokens each, one request "
        f"per call; sampled requests at temperature {tables.temperature:g}, {tables.seeds} run(s) "
        "each, all with different seeds. Figures are means over requests (table 1: over windows of "
        "text) ± standard error. A gain compares two methods on the same requests; its error is "
        f"that of the paired difference. A difference beyond {CLEAR:g} errors is clear, any other "
        "is undecided. Unless another paper is named, the paper is SpecInfer (arXiv 2305.09781: "
        "LLaMA-7B, draft LLaMA-68M, five data sets of prompts), and its figures are the range over "
        "its data sets. `predicted` follows from the success rates of table 1, the same at every "
        "level: ours (the paper's)."
    )


def _compared(gain: Estimate, paper: Range, sign: int, **extra: Any) -> dict[str, Any]:
    """Returns the columns of a claim about a gain over 1; `sign` is as in `verdict`."""
    position = paper.position(gain)
    columns = {"gain": gain, "paper": paper, "position": position}
    return columns | extra | {"verdict": verdict(sign, position)}


def _figures(columns: dict[str, str], rows: Rows) -> str:
    """Returns a table of figures; `columns` maps headings to keys."""

    def cell(row: dict[str, Any], key: str) -> Any:
        value, error = row.get(key), row.get(f"{key}_error")
        if not isinstance(value, float):
            return value or None
        return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"

    return markdown_table([*columns], ([cell(row, k) for k in columns.values()] for row in rows))


def _estimate(row: dict[str, Any], key: str) -> Estimate:
    return Estimate(row[key], row[f"{key}_error"])


def _select(rows: Rows, **where: Any) -> Rows:
    return [row for row in rows if all(row[k] == v for k, v in where.items())]


def _predicted(tree: str, success: dict[str, Any], ranks: int) -> float:
    """Returns the tokens per step if every level succeeds as often as in table 1."""
    cumulated = [0.0, *(success[f"top{k}"] for k in range(1, ranks + 1))]
    return magicjax.expected_tokens(parse_tree(tree), np.maximum(np.diff(cumulated), 0))


def _success(tables: Tables, made: dict[int, Rows]) -> list[str]:
    rows = made[1]
    tries = [key for key in rows[0] if key.startswith("top") and not key.endswith("_error")]
    columns = {"draft": "draft", "success": "decoding"} | {key: key for key in tries}
    last = f"top{min(tables.widths[-1], 5)}"
    claims = []
    for kind, decoding in ((GREEDY, "greedy"), (MSS, "stochastic")):
        paper = published("specinfer_table1_success_rate", decoding=decoding)
        paper_first = range_of([row["top1"] for row in paper])
        paper_rise = range_of([row[last] - row["top1"] for row in paper])
        for name in map(name_of, tables.drafts):
            (row,) = _select(rows, draft=name, decoding=kind)
            first, most = _estimate(row, "top1"), _estimate(row, last)
            error = float(np.hypot(most.error, first.error))
            rise = Estimate(most.value - first.value, error)
            begins, grows = paper_first.position(first), paper_rise.position(rise)
            claims.append(
                {
                    "draft, success": f"{name}, {kind}",
                    "top1": first,
                    "paper's top1": paper_first,
                    "position of top1": begins,
                    f"rise to {last}": rise,
                    "paper's rise": paper_rise,
                    "position": grows,
                    "verdict": verdict(rise.side_of(0.0), begins if grows == "within" else grows),
                }
            )
    return [
        "## Table 1: success rate of the draft's first k tries",
        _figures(columns, rows),
        "\n".join(f"- {kind}: {meaning}." for kind, meaning in KINDS.items()),
        record_table(claims),
    ]


def _widths(tables: Tables, made: dict[int, Rows]) -> list[str]:
    columns = {"decoding": "decoding", "k": "width", "nodes": "nodes", "tokens per step": "tau"}
    columns |= {f"over k = {tables.widths[0]}": "gain", "equal to plain": "exact"}
    return [
        f"## Table 2: tokens per step by the width k of {tables.width_tree}",
        _figures(columns, made[2]),
        record_table([_width_claim(tables, made, decoding) for decoding in SPECINFER]),
    ]


def _width_claim(tables: Tables, made: dict[int, Rows], decoding: str) -> dict[str, Any]:
    rows = _select(made[2], decoding=decoding)
    low, high = rows[0]["width"], min(rows[-1]["width"], 5)
    paper = published("specinfer_table2_tokens_per_step", decoding=SPECINFER[decoding])
    paper_gain = range_of([row[f"width{high}"] / row[f"width{low}"] for row in paper])
    gain = _estimate(rows[-1], "gain")
    falls = [
        f"{a['width']} to {b['width']}"
        for a, b in zip(rows, rows[1:])
        if b["tau"] < a["tau"] - CLEAR * np.hypot(a["tau_error"], b["tau_error"])
    ]
    predicted = None
    if 1 in made:
        kind = GREEDY if decoding == "greedy" else MSS
        success = _select(made[1], draft=name_of(tables.drafts[0]), decoding=kind)
        rates = published("specinfer_table1_success_rate", decoding=SPECINFER[decoding])
        trees = tables.tree_of_width(high), tables.tree_of_width(low)
        ours, *theirs = (
            _predicted(trees[0], row, high) / _predicted(trees[1], row, high)
            for row in (*success, *rates)
        )
        predicted = f"{ours:.2f} ({range_of(theirs)})"
    sign = -1 if falls else gain.side_of(1.0)
    extra = {"predicted": predicted, "fewer tokens at a larger width": ", ".join(falls) or "none"}
    return {"decoding": decoding} | _compared(gain, paper_gain, sign, **extra)


def _verifiers(tables: Tables, made: dict[int, Rows]) -> list[str]:
    columns = {"children drawn": "draw", "verifier": "verifier", "nodes": "nodes"}
    columns |= {"tokens per step": "tau", "over naive": "gain"}
    tree = tables.tree_of_width(tables.widths[-1])
    paper = published("specinfer_table3_naive_vs_mss")
    paper_gain = range_of([row["mss"] / row["naive"] for row in paper])
    predicted = None
    if 1 in made:
        success = _select(made[1], draft=name_of(tables.drafts[0]))
        naive, mss = (
            _predicted(tree, _select(success, decoding=kind)[0], tables.widths[-1])
            for kind in (NAIVE, MSS)
        )
        predicted = f"{mss / naive:.2f} (without replacement)"
    claims = []
    for row in _select(made[3], verifier="mss"):
        gain = _estimate(row, "gain")
        compared = _compared(gain, paper_gain, gain.side_of(1.0), predicted=predicted)
        claims.append({"children drawn": row["draw"].replace("_", " ")} | compared)
    return [
        f"## Table 3: naive and multi-step speculative sampling, {tree}",
        _figures(columns, made[3]),
        record_table(claims),
    ]


def _ensembles(tables: Tables, made: dict[int, Rows]) -> list[str]:
    columns = {"decoding": "decoding", "draft": "draft", "each tree": "tree", "nodes": "nodes"}
    columns |= {"nodes a round": "nodes_per_round", "tokens per step": "tau"}
    columns |= {"over the best single draft": "gain", "equal to plain": "exact"}
    claims = []
    for decoding in SPECINFER:
        rows = _select(made[4], decoding=decoding)
        (merged,) = _select(rows, kind="merged")
        best = max(_select(rows, kind="single"), key=lambda row: row["tau"])
        gain = _estimate(merged, "gain")
        claims.append(
            {
                "decoding": decoding,
                "merged": _estimate(merged, "tau"),
                "best single draft": f"{best['draft']}, {_estimate(best, 'tau')}",
                "gain of merging": gain,
                "verdict": verdict(gain.side_of(1.0)),
            }
        )
    return [
        "## Table 4: single drafts and their merged trees",
        _figures(columns, made[4]),
        "`nodes` is the maximum, the root included. A token that several drafts propose is one "
        "node, so a merged tree has fewer. The paper claims that merged drafts cover more of the "
        "target's choices; it has no figure for trees of equal size.",
        record_table(claims),
        *_coverage(made),
    ]


def _coverage(made: dict[int, Rows]) -> list[str]:
    """Returns how many of the target's choices all drafts cover, and one with as many tries."""
    *single, joint = _select(made.get(1, []), decoding=GREEDY) or [{}]
    tries = [k for k, v in joint.items() if k.startswith("top") and "_" not in k and v]
    if not single or not tries:
        return []
    best = max(single, key=lambda row: row[tries[-1]])
    return [
        f"On held-out text, {tries[-1][3:]} tries contain the target's greedy token in "
        f"{joint[tries[-1]]:.3f} of positions for {joint['draft']}, and in {best[tries[-1]]:.3f} "
        f"for {best['draft']} alone."
    ]


def _shapes(tables: Tables, made: dict[int, Rows]) -> list[str]:
    columns = {"decoding": "decoding", "size": "size", "tree": "kind", "nodes": "nodes"}
    columns |= {"depth": "depth", "tokens per step": "tau", "predicted": "expected"}
    columns |= {"over the expansion": "gain", "equal to plain": "exact"}
    expansions = ", ".join(f"{size.expansion} ({size.nodes})" for size in tables.sizes)
    claims = [
        _shape_claim(rows, _select(made[5], decoding=decoding, kind="expansion"))
        for decoding in SPECINFER
        for kind in ("optimal", "dynamic")
        if (rows := _select(made[5], decoding=decoding, kind=kind))
    ]
    return [
        "## Table 5: expansion, optimal and dynamic trees of the same size",
        _figures(columns, made[5]),
        f"Expansions: {expansions}. The optimal trees, and `predicted` in this table, follow from "
        f"the acceptance by rank of {tables.probe_tree} on {tables.probes} other requests. Claims: "
        "an optimal tree emits more tokens than an expansion, and the gain grows with the size "
        "(Sequoia, arXiv 2402.12374); a dynamic tree emits more than a static one (EAGLE-2, arXiv "
        "2406.16858).",
        record_table(claims),
    ]


def _shape_claim(rows: Rows, expansions: Rows) -> dict[str, Any]:
    gains = [_estimate(row, "gain") for row in rows]
    signs = [gain.side_of(1.0) for gain in gains]
    growth = Estimate(
        gains[-1].value - gains[0].value, float(np.hypot(gains[-1].error, gains[0].error))
    )
    predicted = [
        f"{row['expected'] / base['expected']:.2f}"
        for row in rows
        for base in _select(expansions, size=row["size"])
        if row["expected"] is not None and base["expected"] is not None
    ]
    return {
        "decoding, tree": f"{rows[0]['decoding']}, {rows[0]['kind']}",
        "gain by size": ", ".join(f"{row['size']}: {g}" for row, g in zip(rows, gains)),
        "predicted": ", ".join(predicted) or None,
        "with size": {1: "grows", 0: "no clear trend", -1: "shrinks"}[growth.side_of(0.0)],
        "verdict": verdict(min(signs) if min(signs) < 0 else max(signs)),
    }
