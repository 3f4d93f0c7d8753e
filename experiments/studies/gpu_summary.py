"""Summarizes the results of `measure_gpu` as Markdown tables, with targets."""

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
        + ("speedup per round", "predicted speedup", "overhead"),
    ),
)


class Target(NamedTuple):
    """A target that was set in advance.

    Attributes:
      name: of the figure.
      limit: "≥ 0.8".
      measured: the figure, or None.
      met: whether it meets the limit; None if it was not measured.
      skipped: why it was not measured.
    """

    name: str
    limit: str
    measured: float | None
    met: bool | None
    skipped: str = ""


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
            at = {"batch": batch, "context": slots, "nodes": nodes}
            share = _row(parts, "attention", **at, backend="mosaic").get("% of copy")
            name = f"attention, % of copy, B={batch} S={slots} N={nodes}"
            found.append(_at_least(name, least, share))
    found += [_baseline_ratio(parts, batch, slots) for batch, slots in FULL_SIZES]
    at = {"batch": 16, "context": 32768}

    def part(kind: str, name: str, **columns: Any) -> dict[str, Any]:
        return _row(parts, kind, **at, part=name, **columns)

    baseline, ratio = part("decoding", "hugging face"), "time / T_target"
    loop = part("grid", "loop 512", gamma=4, **{"synthetic acceptance": 0.8})
    found += [
        _at_least(
            "plain decoding, floor / time, B=16 S=32768",
            0.8,
            part("decoding", "target").get("floor / time"),
        ),
        _at_most("T_verify(5) / T_target", 1.10, part("decoding", "verify 5").get(ratio)),
        _at_most("T_draft(512) / T_target", 0.35, part("decoding", "draft 512").get(ratio)),
        _at_least("Hugging Face static cache / T_target", 1.0, baseline.get(ratio))._replace(
            skipped=baseline.get("skipped", "")
        ),
        _at_most("loop overhead, plain", 0.03, part("grid", "plain loop").get("overhead")),
        _at_most("loop overhead, gamma 4", 0.03, loop.get("overhead")),
    ]
    for name in ("speedup", "speedup per round"):
        measured = loop[name] / loop["predicted speedup"] if name in loop else None
        found.append(_at_least(f"synthetic 0.8, gamma 4: {name} / predicted", 0.9, measured))
    for r in _rows(parts, "offload", table="link"):
        name = f"host link, share of a plain copy, {r['target']}, B={r['batch']}"
        found.append(_at_least(name, 0.8, r["share"]))
    for r in _rows(parts, "offload", table="speedup", width=3):
        name = f"synthetic acceptance: speedup, offloaded target, {r['target']}, B={r['batch']}"
        found.append(_at_least(name, 2.6, r["speedup"]))
    return found


def _at_least(name: str, least: float, measured: float | None) -> Target:
    return Target(name, f"≥ {least}", measured, None if measured is None else measured >= least)


def _at_most(name: str, most: float, measured: float | None) -> Target:
    return Target(name, f"≤ {most}", measured, None if measured is None else measured <= most)


def _baseline_ratio(parts: dict[str, Any], batch: int, slots: int) -> Target:
    """Returns the time of the fastest baseline over that of `mosaic` at N = 16."""
    rows = _rows(parts, "attention", batch=batch, context=slots, nodes=16)
    times = {row["backend"]: row["us/layer"] for row in rows if "us/layer" in row}
    baselines = [x for name, x in times.items() if name not in ("mosaic", "xla", "reference")]
    ratio = min(baselines) / times["mosaic"] if baselines and "mosaic" in times else None
    name = f"attention, fastest baseline / mosaic, B={batch} S={slots} N=16"
    return Target(name, "> 1", ratio, None if ratio is None else ratio > 1)


def _rows(parts: dict[str, Any], kind: str, **columns: Any) -> list[dict[str, Any]]:
    """Returns the rows of all parts of a kind with these values."""
    matching = [p for n, p in parts.items() if n.startswith(f"{kind}-") and "result" in p]
    rows = [row for part in matching for row in part["result"]["rows"]]
    return [r for r in rows if all(r.get(key) == value for key, value in columns.items())]


def _row(parts: dict[str, Any], kind: str, **columns: Any) -> dict[str, Any]:
    """Returns the first such row, or {}."""
    return next(iter(_rows(parts, kind, **columns)), {})
