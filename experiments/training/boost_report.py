"""What boost-tuning brought, on held-out text: how much of the target's choices the drafts cover.

Two drafts' first choices are two nodes below every node of a token tree, and so are one draft's two
likeliest tokens, for one small model less to run. So the drafts together are set beside the best
single one with as many tokens, and beside drafts of which each was tuned on everything.
"""

import json
import pathlib
from typing import Any

import flax.linen as nn
import numpy as np
from jaxtyping import Bool, Int

from experiments.runner.provenance import device_name
from experiments.schema import store
from experiments.training import distill

Model = tuple[nn.Module, Any]  # (module, parameters)


def covered(
    labels: Int[np.ndarray, "M"], proposed: Int[np.ndarray, "M N"]
) -> Bool[np.ndarray, "M"]:
    """Returns where the label is among the N proposed tokens."""
    return (proposed == labels[:, None]).any(1)


def difference(a: Bool[np.ndarray, "M"], b: Bool[np.ndarray, "M"], window: int) -> dict[str, float]:
    """Returns the mean of a - b and its standard error over windows of text (0 for one window)."""
    by_window = (a.astype(float) - b).reshape(-1, window).mean(1)
    count = len(by_window)
    error = by_window.std(ddof=1) / np.sqrt(count) if count > 1 else 0.0
    return {"mean": float(by_window.mean()), "standard_error": float(error)}


def measure(
    target: Model,
    starts: list[Model],
    drafts: list[Model],
    plain: list[Model],
    tokens: Int[np.ndarray, "T"],
) -> dict[str, Any]:
    """Returns shares of held-out positions at which the target's greedy token is proposed.

    Args:
      target: whose tokens count.
      starts: what each draft was before tuning.
      drafts: boost-tuned, in their order; N of them.
      plain: the second and later ones tuned on all samples instead; empty: not compared.
      tokens: held-out text, read in windows of `distill.CONTEXT`.
    """
    labels = distill.choices(*target, tokens)
    before = {  # drafts may share one beginning
        id(start[1]): float((distill.choices(*start, tokens) == labels).mean())
        for start in {id(s[1]): s for s in starts}.values()
    }

    def rows(kind: str, ranks: list[np.ndarray], first: int) -> list[dict[str, Any]]:
        return [
            {
                "name": f"{kind}-{number}",
                "match_before": before[id(starts[number - 1][1])],
                "match": float((best[:, 0] == labels).mean()),
                "top_n": float(covered(labels, best).mean()),
            }
            for number, best in enumerate(ranks, first)
        ]

    ranked = [distill.ranked(*model, tokens, len(drafts)) for model in drafts]
    ranked_plain = [distill.ranked(*model, tokens, len(drafts)) for model in plain]
    tuned, others = rows("draft", ranked, 1), rows("plain", ranked_plain, 2)
    firsts = np.stack([r[:, 0] for r in ranked], 1)
    boosted = covered(labels, firsts)
    singles = [
        (covered(labels, best), row["name"])
        for best, row in zip(ranked + ranked_plain, tuned + others)
    ]
    single, name = max(singles, key=lambda pair: pair[0].mean())
    figures: dict[str, Any] = {
        "device": device_name(),
        "held_out_tokens": len(labels),
        "drafts": tuned,
        "plain": others,
        "coverage": {
            "boosted": float(boosted.mean()),
            "best_single": {"name": name, "share": float(single.mean())},
        },
        "boosted_less_single": difference(boosted, single, distill.CONTEXT),
    }
    if plain:
        unboosted = covered(labels, np.stack([firsts[:, 0], *(r[:, 0] for r in ranked_plain)], 1))
        figures["coverage"]["unboosted"] = float(unboosted.mean())
        figures["boosted_less_unboosted"] = difference(boosted, unboosted, distill.CONTEXT)
    return figures


def table(figures: dict[str, Any]) -> str:
    """Returns the figures as two Markdown tables: each draft's matches, and what they cover."""
    count = len(figures["drafts"])
    lines = [
        f"Share of {figures['held_out_tokens']:,} held-out positions at which the target's greedy "
        "token is proposed:",
        "",
        f"| draft | samples | first choice, before | after | top {count} |",
        "|---|---|---|---|---|",
    ]
    for draft in figures["drafts"] + figures["plain"]:
        lines.append(
            f"| {draft['name']} | {draft.get('samples', 1.0):.1%} | {draft['match_before']:.1%} | "
            f"{draft['match']:.1%} | {draft['top_n']:.1%} |"
        )
    coverage = figures["coverage"]
    single = coverage["best_single"]
    lines += [
        "",
        f"| {count} tokens at each position | covered | boosted less this |",
        "|---|---|---|",
        f"| first choices of {count} boost-tuned drafts | {coverage['boosted']:.1%} | |",
        f"| the {count} likeliest of {single['name']}, the best single one | "
        f"{single['share']:.1%} | {_signed(figures['boosted_less_single'])} |",
    ]
    if "unboosted" in coverage:
        lines.append(
            f"| first choices of {count} drafts, each tuned on all samples | "
            f"{coverage['unboosted']:.1%} | {_signed(figures['boosted_less_unboosted'])} |"
        )
    return "\n".join(lines) + "\n"


def _signed(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:+.1f} ± {100 * value['standard_error']:.1f} points"


def note(figures: dict[str, Any], number: int) -> str:
    """Returns what the card of draft `number` says of its tuning, in Markdown."""
    which = "all samples" if number == 1 else "the samples that the drafts before it do not match"
    plain = "`plain` drafts are tuned on all samples, for comparison. " if figures["plain"] else ""
    return f"Boost-tuned (SpecInfer, section 3) on {which}. {plain}{table(figures)}"


def write(path: pathlib.Path, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, whole or not at all."""
    store.write_text(path, json.dumps(figures, indent=1) + "\n")
