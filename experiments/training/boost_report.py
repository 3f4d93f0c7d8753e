"""Results of boost-tuning: the share of the target's tokens that the drafts propose.

The top-1 tokens of N drafts add N children to a node of a token tree, and so do the top-N tokens of
one draft, with N - 1 fewer models to run. The report therefore compares the boost-tuned drafts with
the top N of the best single draft, and with N drafts that are each tuned on all samples.
"""

from typing import Any

import flax.linen as nn
import numpy as np
from jaxtyping import Bool, Int

from experiments.runner.provenance import device_name
from experiments.training import distill
from magicjax.benchmarks.tables import markdown_table

Model = tuple[nn.Module, Any]  # (module, parameters)


def covered(
    labels: Int[np.ndarray, "M"], proposed: Int[np.ndarray, "M N"]
) -> Bool[np.ndarray, "M"]:
    """Returns whether each label is among the N proposed tokens."""
    return (proposed == labels[:, None]).any(1)


def difference(a: Bool[np.ndarray, "M"], b: Bool[np.ndarray, "M"], window: int) -> dict[str, float]:
    """Returns the mean of a - b and its standard error over windows (0 for a single window)."""
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
    """Returns the shares of held-out positions at which the target's greedy token is proposed.

    Args:
      target: the model whose tokens are the labels.
      starts: each draft before tuning.
      drafts: the N boost-tuned drafts in order.
      plain: drafts 2, 3, ... tuned on all samples instead; may be empty.
      tokens: held-out text, read in windows of `distill.CONTEXT`.
    """
    labels = distill.choices(*target, tokens)
    before = {  # drafts may share their initial parameters
        id(start[1]): float((distill.choices(*start, tokens) == labels).mean())
        for start in {id(s[1]): s for s in starts}.values()
    }

    def row(name: str, number: int, best: np.ndarray) -> dict[str, Any]:
        match, top_n = (best[:, 0] == labels).mean(), covered(labels, best).mean()
        shared = {"name": f"{name}-{number}", "match_before": before[id(starts[number - 1][1])]}
        return shared | {"match": float(match), "top_n": float(top_n)}

    ranked = [distill.ranked(*model, tokens, len(drafts)) for model in drafts]
    ranked_plain = [distill.ranked(*model, tokens, len(drafts)) for model in plain]
    tuned = [row("draft", number, best) for number, best in enumerate(ranked, 1)]
    others = [row("plain", number, best) for number, best in enumerate(ranked_plain, 2)]
    firsts = np.stack([r[:, 0] for r in ranked], 1)
    boosted = covered(labels, firsts)
    best_row, best = max(zip(tuned + others, ranked + ranked_plain), key=lambda x: x[0]["top_n"])
    single = covered(labels, best)
    figures: dict[str, Any] = {
        "device": device_name(),
        "held_out_tokens": len(labels),
        "drafts": tuned,
        "plain": others,
        "coverage": {
            "boosted": float(boosted.mean()),
            "best_single": {"name": best_row["name"], "share": best_row["top_n"]},
        },
        "boosted_less_single": difference(boosted, single, distill.CONTEXT),
    }
    if plain:
        unboosted = covered(labels, np.stack([firsts[:, 0], *(r[:, 0] for r in ranked_plain)], 1))
        figures["coverage"]["unboosted"] = float(unboosted.mean())
        figures["boosted_less_unboosted"] = difference(boosted, unboosted, distill.CONTEXT)
    return figures


def table(figures: dict[str, Any]) -> str:
    """Returns two Markdown tables: the matches of each draft, and the coverage of all."""
    count = len(figures["drafts"])
    matches = [
        (draft["name"], f"{draft.get('samples', 1.0):.1%}")
        + tuple(f"{draft[name]:.1%}" for name in ("match_before", "match", "top_n"))
        for draft in figures["drafts"] + figures["plain"]
    ]
    coverage = figures["coverage"]
    single, less = coverage["best_single"], _signed(figures["boosted_less_single"])
    name = f"top {count} of {single['name']}, the best single draft"
    covers = [
        (f"top 1 of {count} boost-tuned drafts", f"{coverage['boosted']:.1%}", ""),
        (name, f"{single['share']:.1%}", less),
    ]
    if "unboosted" in coverage:
        name = f"top 1 of {count} drafts, each tuned on all samples"
        less = _signed(figures["boosted_less_unboosted"])
        covers.append((name, f"{coverage['unboosted']:.1%}", less))
    match_header = ("draft", "samples", "top 1, before", "top 1, after", f"top {count}")
    cover_header = (f"{count} tokens per position", "coverage", "boost-tuned minus this")
    return (
        f"Share of {figures['held_out_tokens']:,} held-out positions at which the target's greedy "
        f"token is proposed:\n\n{markdown_table(match_header, matches)}\n\n"
        f"{markdown_table(cover_header, covers)}\n"
    )


def _signed(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:+.1f} ± {100 * value['standard_error']:.1f} points"


def note(figures: dict[str, Any], number: int) -> str:
    """Returns the section about tuning in the model card of draft `number`, in Markdown."""
    which = "all samples" if number == 1 else "the samples that earlier drafts do not match"
    plain = "`plain` drafts are tuned on all samples, for comparison. " if figures["plain"] else ""
    return f"Boost-tuned (SpecInfer, section 3) on {which}. {plain}{table(figures)}"
