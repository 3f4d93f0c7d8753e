"""The report: each table, what the paper found, and whether ours does, decided by the figures."""

import csv
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

import magicjax
from experiments.runner.provenance import device_name
from experiments.studies.specinfer.settings import Tables
from experiments.studies.specinfer.statistics import CLEAR, Estimate, name_of
from experiments.studies.specinfer.success import GREEDY, KINDS, MSS, NAIVE
from magicjax import parse_tree

REFERENCE = pathlib.Path(__file__).parents[2] / "reference"
SPECINFER = {"greedy": "greedy", "sampled": "stochastic"}  # our word for decoding -> the paper's

Rows = list[dict[str, Any]]


class Span(NamedTuple):
    """The least and the most of the paper's data sets."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    def place(self, ours: Estimate) -> str:
        """Returns where ours lies: within, above or below, `CLEAR` errors allowed for."""
        if ours.against(self.high) > 0:
            return "above"
        return "below" if ours.against(self.low) < 0 else "within"


def published(name: str, **where: str) -> Rows:
    """Returns the paper's rows of a table, numbers as numbers, where columns have these values."""
    with (REFERENCE / f"{name}.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if all(r[k] == v for k, v in where.items())]
    text = ("dataset", "decoding")
    return [{k: v if k in text else float(v) for k, v in row.items()} for row in rows]


def span(values: list[float]) -> Span:
    """Returns the range of the values."""
    return Span(min(values), max(values))


def write(tables: Tables, made: dict[int, Rows]) -> str:
    """Returns the report as Markdown."""
    sections = {1: _success, 2: _widths, 3: _verifiers, 4: _ensembles, 5: _shapes}
    parts = [_opening(tables)]
    parts += [sections[number](tables, made) for number in sorted(made)]
    return "\n\n".join(parts) + "\n"


def _opening(tables: Tables) -> str:
    drafts = ", ".join(tables.drafts)
    return (
        "# Token trees against the papers\n\n"
        f"Target {tables.target}, drafts {drafts}, {tables.dtype}, "
        f"{device_name()}, JAX {jax.__version__}. Tables 2 to 5: {tables.requests} "
        f"requests of {tables.context} held-out tokens, {tables.new_tokens} new ones each, run "
        f"alone; sampled ones at temperature {tables.temperature:g}, {tables.seeds} run(s) each, "
        "all of other seeds. "
        "Figures are means over requests (table 1: over stretches of text) ± their standard error; "
        "a gain compares two methods on the same requests, and only what differs counts in its "
        f"error. A difference is clear beyond {CLEAR:g} errors; undecided is what is not. The "
        "paper is SpecInfer (arXiv 2305.09781: LLaMA-7B, draft LLaMA-68M, five data sets of "
        "prompts) where no other is named, and its figures are the range over its data sets."
    )


def _table(columns: dict[str, str], rows: Rows) -> str:
    """Returns a Markdown table; `columns` maps headings to keys or `key ± key` pairs."""

    def cell(row: dict[str, Any], key: str) -> str:
        value = row.get(key)
        if value is None or isinstance(value, str):
            return "–" if value in (None, "") else str(value)
        if isinstance(value, int):
            return str(value)
        error = row.get(f"{key}_error")
        return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row, key) for key in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _verdict(sign: int, why: str, where: str = "within") -> str:
    """Returns the text behind its verdict.

    Args:
      sign: 1 if the paper's claim holds, -1 if its contrary does, 0 if neither is clear.
      why: the figures.
      where: our figure lies against the paper's range.
    """
    said = {1: "Follows the paper", 0: "Undecided", -1: "Does not follow the paper"}[sign]
    if where != "within":
        said = (
            "Follows the paper in direction, not in size"
            if sign > 0
            else "Does not follow the paper"
        )
    return f"**{said}**: {why}"


def _estimate(row: dict[str, Any], key: str) -> Estimate:
    return Estimate(row[key], row[f"{key}_error"])


def _of(rows: Rows, **where: Any) -> Rows:
    return [row for row in rows if all(row[k] == v for k, v in where.items())]


# ----------------------------------------------------------------------------------------- table 1


def _tries(rows: Rows) -> list[str]:
    return [key for key in rows[0] if key.startswith("top") and not key.endswith("_error")]


def _success(tables: Tables, made: dict[int, Rows]) -> str:
    rows = made[1]
    columns = {"draft": "draft", "success": "decoding"} | {key: key for key in _tries(rows)}
    parts = [
        "## Table 1: success rate of the draft's first k tries",
        _table(columns, rows),
        "\n".join(f"- {kind}: {meaning}." for kind, meaning in KINDS.items()),
    ]
    for kind, theirs in ((GREEDY, "greedy"), (MSS, "stochastic")):
        paper = published("specinfer_table1_success_rate", decoding=theirs)
        parts.append("\n".join(_compared_success(tables, rows, kind, paper)))
    return "\n\n".join(parts)


def _compared_success(tables: Tables, rows: Rows, kind: str, paper: Rows) -> list[str]:
    last = f"top{min(tables.widths[-1], 5)}"
    first_span, last_span = (span([row[key] for row in paper]) for key in ("top1", last))
    rise = span([row[last] - row["top1"] for row in paper])
    lines = []
    for directory in tables.drafts:
        (row,) = _of(rows, draft=name_of(directory), decoding=kind)
        first, most = _estimate(row, "top1"), _estimate(row, last)
        ours = Estimate(most.value - first.value, float(np.hypot(most.error, first.error)))
        where = rise.place(ours)
        line = (
            f"{name_of(directory)}, {kind}: from {first} with one try to {most} with {last[3:]}, "
            f"a rise of {ours.value:.2f}; the paper's data sets have {first_span} and {last_span}, "
            f"a rise of {rise}."
        )
        begins = first_span.place(first)
        outside = begins if where == "within" else where
        if where != "within":
            line += f" The rise lies {where} theirs."
        line = _verdict(ours.against(0.0), line, outside)
        if begins != "within":
            line += (
                f" One try alone lies {begins} the paper's range: this draft is "
                f"{'nearer to' if first.value > first_span.high else 'further from'} its target "
                "than LLaMA-68M is to LLaMA-7B, and all that follows inherits it."
            )
        lines.append(f"- {line}")
    return lines


def _foretold(tree: str, success: dict[str, Any], ranks: int) -> float:
    """Returns the tokens per step if every level succeeded as often as Table 1 says."""
    cumulated = [0.0, *(success[f"top{k}"] for k in range(1, ranks + 1))]
    return magicjax.expected_tokens(parse_tree(tree), np.maximum(np.diff(cumulated), 0))


# ----------------------------------------------------------------------------------------- table 2


def _widths(tables: Tables, made: dict[int, Rows]) -> str:
    rows = made[2]
    columns = {"decoding": "decoding", "k": "width", "nodes": "nodes", "tokens per step": "tau"}
    columns |= {f"over k = {tables.widths[0]}": "gain", "equal to plain": "exact"}
    parts = [
        f"## Table 2: tokens per step by the width k of {tables.width_tree}",
        _table(columns, rows),
    ]
    for decoding in SPECINFER:
        parts.append("- " + _compared_widths(tables, made, decoding))
    return "\n\n".join(parts)


def _compared_widths(tables: Tables, made: dict[int, Rows], decoding: str) -> str:
    mine = _of(made[2], decoding=decoding)
    first, last = mine[0], mine[-1]
    low, high = first["width"], min(last["width"], 5)
    paper = published("specinfer_table2_tokens_per_step", decoding=SPECINFER[decoding])
    theirs = span([row[f"width{high}"] / row[f"width{low}"] for row in paper])
    levels = [span([row[f"width{w}"] for row in paper]) for w in (low, high)]
    gain = _estimate(last, "gain")
    where = theirs.place(gain)
    falls = [
        f"{a['width']} to {b['width']}"
        for a, b in zip(mine, mine[1:])
        if b["tau"] < a["tau"] - CLEAR * np.hypot(a["tau_error"], b["tau_error"])
    ]
    text = (
        f"{decoding}: {_estimate(first, 'tau')} at width {low} and {_estimate(last, 'tau')} at "
        f"{last['width']}, {gain} times as many; the paper {levels[0]} and {levels[1]}, "
        f"{theirs} times as many."
    )
    sign = gain.against(1.0)
    if falls:
        text += f" From width {', '.join(falls)} tokens per step fall."
    if where != "within":
        text += f" How much it rises lies {where} the paper's range."
    elif sign == 0:
        text += " No clear rise: more requests would tell."
    text = _verdict(-1 if falls else sign, text, where)
    return text + _explained_widths(tables, made, decoding, where)


def _explained_widths(tables: Tables, made: dict[int, Rows], decoding: str, where: str) -> str:
    """Returns what the success rates of table 1 foretell, for ours and for the paper's models."""
    if 1 not in made:
        return ""
    draft, kind = name_of(tables.drafts[0]), GREEDY if decoding == "greedy" else MSS
    (success,) = _of(made[1], draft=draft, decoding=kind)
    low, high = tables.widths[0], min(tables.widths[-1], 5)
    specs = tables.tree_of_width(low), tables.tree_of_width(high)
    ours = [_foretold(spec, success, high) for spec in specs]
    of_paper = [
        [_foretold(spec, row, high) for spec in specs]
        for row in published("specinfer_table1_success_rate", decoding=SPECINFER[decoding])
    ]
    theirs = span([b / a for a, b in of_paper])
    text = (
        f" The success rates of table 1 alone, every level alike, foretell {ours[0]:.2f} and "
        f"{ours[1]:.2f} for ours, {ours[1] / ours[0]:.2f} times as many, and {theirs} times for "
        "the paper's models."
    )
    return text + _accounted(theirs, where, ours[1] / ours[0])


# ----------------------------------------------------------------------------------------- table 3


def _verifiers(tables: Tables, made: dict[int, Rows]) -> str:
    rows = made[3]
    columns = {"children drawn": "draw", "verifier": "verifier", "nodes": "nodes"}
    columns |= {"tokens per step": "tau", "over naive": "gain"}
    tree = tables.tree_of_width(tables.widths[-1])
    parts = [
        f"## Table 3: naive against multi-step speculative sampling, {tree}",
        _table(columns, rows),
    ]
    paper = published("specinfer_table3_naive_vs_mss")
    theirs = span([row["mss"] / row["naive"] for row in paper])
    for row in _of(rows, verifier="mss"):
        gain = _estimate(row, "gain")
        where, sign = theirs.place(gain), gain.against(1.0)
        text = (
            f"{row['draw'].replace('_', ' ')}: {gain} times the tokens per step of naive "
            f"verification; the paper has {theirs}."
        )
        if where != "within":
            text += f" That lies {where} its range."
        elif sign == 0:
            text += " No clear difference: more requests would tell."
        parts.append("- " + _verdict(sign, text, where))
        parts[-1] += _explained_verifiers(tables, made, tree, theirs, where)
    return "\n\n".join(parts)


def _explained_verifiers(
    tables: Tables, made: dict[int, Rows], tree: str, theirs: Span, where: str
) -> str:
    """Returns the factor that table 1's success rates foretell."""
    if 1 not in made:
        return ""
    draft = name_of(tables.drafts[0])
    naive, mss = (
        _foretold(tree, _of(made[1], draft=draft, decoding=kind)[0], tables.widths[-1])
        for kind in (NAIVE, MSS)
    )
    text = (
        f" The success rates of table 1 (draws without replacement) foretell {naive:.2f} and "
        f"{mss:.2f} tokens per step, a factor of {mss / naive:.2f}."
    )
    return text + _accounted(theirs, where, mss / naive)


def _accounted(theirs: Span, where: str, foretold: float) -> str:
    """Returns whether what the success rates foretell lies where the figure does."""
    if where == "within":
        return ""
    lies = theirs.place(Estimate(foretold, 0.0))
    told = lies == where
    return (
        f" So the success rates {'account' if told else 'do not account'} for the deviation: by "
        f"them ours should lie {lies} the paper's."
    )


# ----------------------------------------------------------------------------------------- table 4


def _ensembles(tables: Tables, made: dict[int, Rows]) -> str:
    rows = made[4]
    columns = {"decoding": "decoding", "draft": "draft", "each tree": "tree", "nodes": "nodes"}
    columns |= {"nodes a round": "nodes_per_round", "tokens per step": "tau"}
    columns |= {"over the best single draft": "gain", "equal to plain": "exact"}
    parts = [
        "## Table 4: single drafts against their merged trees",
        _table(columns, rows),
        "`nodes` is the bound, the root included; what both drafts propose is one node, so a "
        "merged tree has fewer. The paper gives no figure for equal sizes; its claim is that "
        "merged drafts cover more of the target's choices.",
    ]
    for decoding in SPECINFER:
        mine = _of(rows, decoding=decoding)
        (merged,) = _of(mine, kind="merged")
        best = max(_of(mine, kind="single"), key=lambda row: row["tau"])
        sign = _estimate(merged, "gain").against(1.0)
        text = (
            f"{decoding}: merged {_estimate(merged, 'tau')} in {merged['nodes_per_round']:.1f} "
            f"nodes a round, the best single draft ({best['draft']}) {_estimate(best, 'tau')} in "
            f"{best['nodes_per_round']:.1f}: {_estimate(merged, 'gain')} times as many, "
            f"{('no clear difference', 'clearly more', 'clearly fewer')[sign]}."
        )
        parts.append("- " + _verdict(sign, text) + _covered(tables, made))
    return "\n\n".join(parts)


def _covered(tables: Tables, made: dict[int, Rows]) -> str:
    """Returns how much of the target's choices as many tries of one draft and of all cover."""
    together = " + ".join(map(name_of, tables.drafts))
    if 1 not in made or not (found := _of(made[1], draft=together, decoding=GREEDY)):
        return ""
    known = [key for key in _tries(made[1]) if found[0][key] is not None]
    if not known:
        return ""
    key = known[-1]
    alone = max(_of(made[1], decoding=GREEDY), key=lambda r: r[key] if r is not found[0] else -1)
    more = found[0][key] - alone[key]
    return (
        f" On held-out text {key[3:]} tries of the drafts together hold the target's greedy token "
        f"in {found[0][key]:.3f} of positions, {key[3:]} of {alone['draft']} alone in "
        f"{alone[key]:.3f}: a second draft {'adds' if more > 0 else 'takes away'} "
        f"{abs(more):.3f} against more tries of the first."
    )


# ----------------------------------------------------------------------------------------- table 5


def _shapes(tables: Tables, made: dict[int, Rows]) -> str:
    rows = made[5]
    columns = {"decoding": "decoding", "size": "size", "tree": "kind", "nodes": "nodes"}
    columns |= {"depth": "depth", "tokens per step": "tau", "foretold": "expected"}
    columns |= {"over the expansion": "gain", "equal to plain": "exact"}
    expansions = ", ".join(f"{size.expansion} ({size.nodes})" for size in tables.sizes)
    parts = [
        "## Table 5: expansion, optimal and growing trees of the same size",
        _table(columns, rows),
        f"Expansions: {expansions}. The optimal tree follows from the acceptance by rank that "
        f"{tables.probe_tree} had on {tables.probes} other requests, which also foretells the "
        "static trees' tokens per step. Claims: an optimal tree emits more than a fixed one, the "
        "more so the larger it is (Sequoia, arXiv 2402.12374); one that grows by the draft's "
        "confidence more than a static one (EAGLE-2, arXiv 2406.16858).",
    ]
    for decoding in SPECINFER:
        for kind in ("optimal", "dynamic"):
            mine = _of(rows, decoding=decoding, kind=kind)
            if mine:
                parts.append("- " + _compared_shapes(mine, _of(rows, decoding=decoding), kind))
    return "\n\n".join(parts)


def _compared_shapes(mine: Rows, rows: Rows, kind: str) -> str:
    signs = [_estimate(row, "gain").against(1.0) for row in mine]
    each = ", ".join(f"{_estimate(row, 'gain')} at {row['size']} nodes" for row in mine)
    text = f"{mine[0]['decoding']}, {kind} over expansion: {each}."
    sign = min(signs) if min(signs) < 0 else max(signs)
    clear = ", ".join(str(row["size"]) for row, of in zip(mine, signs) if of == sign)
    how = {1: f"Clearly more at {clear}.", 0: "No clear difference.", -1: f"Fewer at {clear}."}
    text += f" {how[sign]}"
    if kind == "optimal" and len(mine) > 1:
        grows = mine[-1]["gain"] - mine[0]["gain"]
        error = float(np.hypot(mine[-1]["gain_error"], mine[0]["gain_error"]))
        trend = {1: "grows", 0: "neither clearly grows nor shrinks", -1: "shrinks"}
        text += f" With size the gain {trend[Estimate(grows, error).against(0.0)]}."
    missing = [
        (row, base)
        for row in mine
        for base in _of(rows, size=row["size"], kind="expansion")
        if row["expected"] is not None and base["expected"] is not None
    ]
    if missing:
        told = ", ".join(f"{row['expected'] / base['expected']:.2f}" for row, base in missing)
        text += f" The measured acceptance foretold {told}."
    return _verdict(sign, text)
