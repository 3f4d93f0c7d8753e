"""Summarizes the results of `experiments.studies.accelerator` as Markdown tables."""

from typing import Any

from magicjax.benchmarks.tables import markdown_table

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
        ("batch", "context", "part", "ms", "floor / time", "time / T_target"),
    ),
    (
        "Synthetic acceptance",
        "grid",
        "synthetic acceptance",
        ("batch", "context", "part", "gamma", "synthetic acceptance", "tau", "speedup")
        + ("speedup per round", "predicted speedup"),
    ),
)


def summary(results: dict[str, Any]) -> str:
    """Returns the content of `measurements.json` as Markdown."""
    about, parts = results["about"], results["parts"]
    jax = next((p["result"]["jax"] for p in parts.values() if "jax" in p.get("result", {})), "?")
    sections = [f"# {about['device']}", f"jax {jax}, Python {about['python']}"]
    if about["smoke"]:
        sections.append("A trial of the commands on tiny sizes: the figures have no meaning.")
    for title, kind, key, columns in SECTIONS:
        records = [r for r in _rows(parts, kind) if key in r or "skipped" in r]
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


def _rows(parts: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Returns the rows of all parts of a kind."""
    matching = [p for n, p in parts.items() if n.startswith(f"{kind}-") and "result" in p]
    return [row for part in matching for row in part["result"]["rows"]]
