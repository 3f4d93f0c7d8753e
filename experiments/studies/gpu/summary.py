"""Summarizes the results of `experiments.studies.gpu` as Markdown tables, with targets."""

import operator
from typing import Any, NamedTuple

from magicjax.benchmarks.tables import markdown_table
from pallas_kernels.benchmarks.shapes import FULL_NODES, FULL_SIZES

# Title, kind of part, a column that every row has unless it was skipped, and the columns.
SECTIONS = (
    (
        "Attention alone",
        "attention",
        "GB/s",
        ("batch", "context", "nodes", "backend", "us/layer", "GB/s", "% of copy", "skipped"),
    ),
    (
        "Parts of a round",
        "decoding",
        "ms",
        ("batch", "context", "part", "ms", "floor / time", "time / T_target", "skipped"),
    ),
    (
        "Seconds of the loop",
        "profile",
        "wall",
        ("loop", "rounds", "wall", "attention", "matrix products", "other", "idle", "longest gap")
        + ("skipped",),
    ),
    (
        "Synthetic acceptance",
        "grid",
        "synthetic acceptance",
        ("batch", "context", "part", "gamma", "synthetic acceptance", "tau", "speedup")
        + ("speedup per round", "predicted speedup"),
    ),
)


class Target(NamedTuple):
    """A target that was set in advance.

    Attributes:
      name: of the figure.
      limit: "≥ 0.8".
      measured: the figure, or None.
      skipped: why it was not measured.
    """

    name: str
    limit: str
    measured: float | None
    skipped: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the figure meets the limit; None if it was not measured."""
        sign, limit = self.limit.split()
        compare = {"≥": operator.ge, "≤": operator.le, ">": operator.gt}[sign]
        return None if self.measured is None else compare(self.measured, float(limit))


def summary(results: dict[str, Any]) -> str:
    """Returns the content of `measurements.json` as Markdown."""
    about, parts = results["about"], results["parts"]
    jax = next((p["result"]["jax"] for p in parts.values() if "jax" in p.get("result", {})), "?")
    sections = [f"# {about['device']}", f"jax {jax}, Python {about['python']}"]
    if about["smoke"]:
        sections.append("A trial of the commands on tiny sizes: the figures have no meaning.")
    rows = [
        (
            t.name,
            t.limit,
            (t.skipped or "not measured") if t.measured is None else f"{t.measured:.3f}",
            "–" if t.met is None else "yes" if t.met else "**no**",
        )
        for t in targets(parts)
    ]
    sections.append(markdown_table(("target", "limit", "measured", "met"), rows))
    for title, kind, key, columns in SECTIONS:
        records = [r | r.get("seconds", {}) for r in _rows(parts, kind)]
        records = [r for r in records if key in r or "skipped" in r]
        if records:
            lines = ([r.get(name) for name in columns] for r in records)
            sections += [f"## {title}", markdown_table(columns, lines)]
    rows = [
        (name, f"{p['seconds']:.0f}", f"**{p['failed']}**" if "failed" in p else "done")
        + (f"`{p['command']}`",)
        for name, p in parts.items()
    ]
    sections += ["## Parts", markdown_table(("part", "seconds", "status", "command"), rows)]
    return "\n\n".join(sections) + "\n"


def targets(parts: dict[str, Any]) -> list[Target]:
    """Returns every target with the measured figure."""
    found = []
    for (batch, slots), least in zip(FULL_SIZES, (85, 75, 75), strict=True):
        for nodes in FULL_NODES:
            shape = {"batch": batch, "context": slots, "nodes": nodes}
            share = _row(parts, "attention", **shape, backend="mosaic").get("% of copy")
            name = f"attention, % of copy, B={batch} S={slots} N={nodes}"
            found.append(Target(name, f"≥ {least}", share))
    for batch, slots in FULL_SIZES:
        name = f"attention, fastest baseline / mosaic, B={batch} S={slots} N=16"
        found.append(Target(name, "> 1", _baseline_ratio(parts, batch, slots)))

    def part(kind: str, name: str, **columns: Any) -> dict[str, Any]:
        return _row(parts, kind, batch=16, context=32768, part=name, **columns)

    def ratio(name: str) -> float | None:
        return part("decoding", name).get("time / T_target")

    floor, baseline = part("decoding", "target").get("floor / time"), "hugging face"
    skipped = part("decoding", baseline).get("skipped", "")
    loop = part("grid", "loop 512", gamma=4, **{"synthetic acceptance": 0.8})
    found += [
        Target("plain decoding, floor / time, B=16 S=32768", "≥ 0.8", floor),
        Target("T_verify(5) / T_target", "≤ 1.1", ratio("verify 5")),
        Target("T_draft(512) / T_target", "≤ 0.35", ratio("draft 512")),
        Target("Hugging Face static cache / T_target", "≥ 1.0", ratio(baseline), skipped),
    ]
    for name in ("speedup", "speedup per round"):
        share = loop[name] / loop["predicted speedup"] if name in loop else None
        found.append(Target(f"synthetic 0.8, gamma 4: {name} / predicted", "≥ 0.9", share))
    return found


def _baseline_ratio(parts: dict[str, Any], batch: int, slots: int) -> float | None:
    """Returns the time of the fastest baseline over that of `mosaic` at N = 16."""
    rows = _rows(parts, "attention", batch=batch, context=slots, nodes=16)
    times = {row["backend"]: row["us/layer"] for row in rows if "us/layer" in row}
    baselines = [x for name, x in times.items() if name not in ("mosaic", "xla", "reference")]
    return min(baselines) / times["mosaic"] if baselines and "mosaic" in times else None


def _rows(parts: dict[str, Any], kind: str, **columns: Any) -> list[dict[str, Any]]:
    """Returns the rows of all parts of a kind with these values."""
    matching = [p for n, p in parts.items() if n.startswith(f"{kind}-") and "result" in p]
    rows = [row for part in matching for row in part["result"]["rows"]]
    return [r for r in rows if all(r.get(key) == value for key, value in columns.items())]


def _row(parts: dict[str, Any], kind: str, **columns: Any) -> dict[str, Any]:
    """Returns the first such row, or {}."""
    return next(iter(_rows(parts, kind, **columns)), {})
