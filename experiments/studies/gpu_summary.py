"""Makes a short Markdown table of what `measure_gpu` found, targets beside it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.benchmarks.shapes import FULL_NODES, FULL_SIZES
from pallas_kernels.mosaic_gpu.tuned import slug

__all__ = ["slug", "summary"]


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure that was set beforehand.

    Attributes:
      what: in words.
      wanted: in words.
      reached: the figure, or None where it was not measured.
      met: whether it is good enough; None where it was not measured.
      why: why it was not measured.
    """

    what: str
    wanted: str
    reached: float | None
    met: bool | None
    why: str = ""


def summary(found: dict[str, Any]) -> str:
    """Returns the summary as Markdown.

    Args:
      found: content of `measurements.json`.
    """
    about, parts = found["about"], found["parts"]
    jax = next((r["jax"] for r in _results(parts) if "jax" in r), "?")
    lines = [f"# {about['device']}", "", f"jax {jax}, Python {about['python']}"]
    if about["smoke"]:
        lines += ["", "A trial of the commands on tiny sizes: its figures mean nothing."]
    lines += ["", "| target | wanted | reached | met |", "|---|---|---|---|"]
    for t in targets(parts):
        reached = t.why or "not measured" if t.reached is None else f"{t.reached:.3f}"
        met = "–" if t.met is None else "yes" if t.met else "**no**"
        lines.append(f"| {t.what} | {t.wanted} | {reached} | {met} |")
    lines += [*_attention(parts), *_decoding(parts), *_profile(parts), *_grid(parts)]
    lines += ["", "## Parts", "", "| part | seconds | | command |", "|---|---|---|---|"]
    for name, part in parts.items():
        state = f"**{part['failed']}**" if "failed" in part else "done"
        lines.append(f"| {name} | {part['seconds']:.0f} | {state} | `{part['command']}` |")
    return "\n".join(lines) + "\n"


def targets(parts: dict[str, Any]) -> list[Target]:
    """Returns every target with what was reached."""
    found = []
    for (batch, slots), least in zip(FULL_SIZES, (0.85, 0.75, 0.75), strict=True):
        for nodes in FULL_NODES:
            row = _row(
                parts, "attention", batch=batch, context=slots, nodes=nodes, backend="mosaic"
            )
            what = f"attention, % of copy, B={batch} S={slots} N={nodes}"
            found.append(_at_least(what, least, row.get("share_of_copy_bandwidth")))
    for batch, slots in FULL_SIZES:
        found.append(_ahead(parts, batch, slots))
    at = {"batch": 16, "context": 32768}
    floor = _row(parts, "decoding", **at, part="target").get("of floor")
    found.append(_at_least("plain decoding, share of its floor, B=16 S=32768", 0.8, floor))
    verify = _row(parts, "decoding", **at, part="verify 5").get("of target")
    found.append(_at_most("T_verify(5) / T_target", 1.10, verify))
    draft = _row(parts, "decoding", **at, part="draft 512").get("of target")
    found.append(_at_most("T_draft(512) / T_target", 0.35, draft))
    hugging_face = _row(parts, "decoding", **at, part="hugging face")
    ahead = _at_least("Hugging Face static cache / T_target", 1.0, hugging_face.get("of target"))
    found.append(dataclasses.replace(ahead, why=hugging_face.get("why", "")))
    plain = _row(parts, "grid", **at, part="plain loop").get("overhead")
    found.append(_at_most("loop overhead, plain", 0.03, plain))
    loop = _row(parts, "grid", **at, part="loop 512", gamma=4, **{"synthetic acceptance": 0.8})
    found.append(_at_most("loop overhead, gamma 4", 0.03, loop.get("overhead")))
    for name in ("speed-up", "of a round"):
        ratio = loop[name] / loop["by its parts"] if loop else None
        what = f"synthetic 0.8, gamma 4: {name} over Omega T_T / (gamma T_D + T_V)"
        found.append(_at_least(what, 0.9, ratio))
    for r in _rows(parts, "offload", table="link"):
        what = f"link to the host, share of a plain copy, {r['target']}, B={r['batch']}"
        found.append(_at_least(what, 0.8, r["share"]))
    for r in _rows(parts, "offload", table="speed-up", width=3):
        what = f"synthetic acceptance: speed-up, target offloaded, {r['target']}, B={r['batch']}"
        found.append(_at_least(what, 2.6, r["speed-up"]))
    return found


def _at_least(what: str, least: float, reached: float | None) -> Target:
    return Target(what, f"≥ {least}", reached, None if reached is None else reached >= least)


def _at_most(what: str, most: float, reached: float | None) -> Target:
    return Target(what, f"≤ {most}", reached, None if reached is None else reached <= most)


def _ahead(parts: dict[str, Any], batch: int, slots: int) -> Target:
    """Returns how many times as long as ours the fastest peer takes at N = 16."""
    at = {"batch": batch, "context": slots, "nodes": 16}
    ours = _row(parts, "attention", **at, backend="mosaic").get("seconds")
    theirs = [
        row["seconds"]
        for row in _rows(parts, "attention", **at)
        if "seconds" in row and row["backend"] not in ("mosaic", "xla", "reference")
    ]
    ratio = min(theirs) / ours if ours and theirs else None
    what = f"attention, fastest peer / ours, B={batch} S={slots} N=16"
    return Target(what, "> 1", ratio, None if ratio is None else ratio > 1)


def _results(parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (part["result"] for part in parts.values() if "result" in part)


def _rows(parts: dict[str, Any], kind: str, **wanted: Any) -> list[dict[str, Any]]:
    """Returns the rows of all parts of a kind that have these values."""
    rows = [
        row
        for name, part in parts.items()
        if name.startswith(f"{kind}-") and "result" in part
        for row in part["result"]["rows"]
    ]
    return [r for r in rows if all(r.get(key) == value for key, value in wanted.items())]


def _row(parts: dict[str, Any], kind: str, **wanted: Any) -> dict[str, Any]:
    """Returns the first such row, or {}."""
    return next(iter(_rows(parts, kind, **wanted)), {})


def _attention(parts: dict[str, Any]) -> Iterator[str]:
    rows = _rows(parts, "attention")
    if not rows:
        return
    yield from ("", "## Attention alone", "")
    bandwidths = [
        max(part["result"]["copy_bandwidth"].values())
        for name, part in parts.items()
        if name.startswith("attention-") and "result" in part
    ]
    copies = ", ".join(f"{x / 1e9:.0f}" for x in bandwidths)
    yield f"Copy bandwidth, read and written, in each part: {copies} GB/s."
    yield from (
        "",
        "| B | S | N | | µs a layer | GB/s | % of copy |",
        "|---|---|---|---|---|---|---|",
    )
    for r in rows:
        head = f"| {r['batch']} | {r['context']} | {r['nodes']} | {r['backend']} |"
        if "why" in r:
            yield f"{head} {r['why']} | | |"
            continue
        share = 100 * r["share_of_copy_bandwidth"]
        rate = r["bytes_per_second"] / 1e9
        yield f"{head} {1e6 * r['seconds']:.1f} | {rate:.0f} | {share:.1f} |"


def _decoding(parts: dict[str, Any]) -> Iterator[str]:
    rows = _rows(parts, "decoding")
    if not rows:
        return
    yield from ("", "## Parts of a round", "")
    yield from ("| B | S | | ms | of its floor | of T_target |", "|---|---|---|---|---|---|")
    for r in rows:
        ms = r["why"] if "why" in r else f"{r['ms']:.3f}"
        floor = f"{r['floor ms'] / r['ms']:.2f}" if "floor ms" in r else ""
        of_target = f"{r['of target']:.3f}" if "of target" in r else ""
        head = f"| {r['batch']} | {r['context']} | {r['part']} |"
        yield f"{head} {ms} | {floor} | {of_target} |"


def _profile(parts: dict[str, Any]) -> Iterator[str]:
    rows = _rows(parts, "profile")
    if not rows:
        return
    names = ("attention", "matrix products", "rest", "idle")
    yield from ("", "## Where the loop's time goes", "")
    yield f"| loop | rounds | ms a round | {' | '.join(names)} | longest gap, µs |"
    yield "|---" * (len(names) + 4) + "|"
    for r in rows:
        if "why" in r:
            yield f"| {r['loop']} | {r['why']} |" + " |" * (len(names) + 2)
            continue
        seconds, rounds = r["seconds"], r["rounds"]
        shares = " | ".join(f"{seconds[name] / seconds['whole']:.1%}" for name in names)
        a_round, gap = 1e3 * seconds["whole"] / rounds, 1e6 * seconds["longest gap"]
        yield f"| {r['loop']} | {rounds} | {a_round:.3f} | {shares} | {gap:.0f} |"


def _grid(parts: dict[str, Any]) -> Iterator[str]:
    rows = [r for r in _rows(parts, "grid") if "synthetic acceptance" in r]
    if not rows:
        return
    yield from ("", "## Synthetic acceptance", "")
    figures = ("tau", "speed-up", "of a round", "by its parts", "overhead")
    yield f"| B | S | budget | γ | acceptance | {' | '.join(figures)} |"
    yield "|---" * (5 + len(figures)) + "|"
    for r in rows:
        budget = r["part"].removeprefix("loop ")
        head = f"| {r['batch']} | {r['context']} | {budget} | {r['gamma']} "
        tail = " | ".join(f"{r[name]:.3f}" for name in figures)
        yield f"{head}| {r['synthetic acceptance']} | {tail} |"
