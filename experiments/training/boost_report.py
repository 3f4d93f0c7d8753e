"""Results of boost-tuning: the share of the target's tokens that the drafts propose.

The top-1 tokens of N drafts add N children to a node of a token tree, and so do the top-N tokens of
one draft, with N - 1 fewer models to run. The report therefore compares both.
"""

from typing import Any

import flax.linen as nn
import numpy as np
from jaxtyping import Bool, Int

from experiments.training import distill
from magicjax.benchmarks.tables import markdown_table

Model = tuple[nn.Module, Any]  # (module, parameters)


def covered(
    labels: Int[np.ndarray, "M"], proposed: Int[np.ndarray, "M N"]
) -> Bool[np.ndarray, "M"]:
    """Returns whether each label is among the N proposed tokens."""
    return (proposed == labels[:, None]).any(1)


def measure(
    target: Model, starts: list[Model], drafts: list[Model], tokens: Int[np.ndarray, "T"]
) -> dict[str, Any]:
    """Returns the shares of held-out positions at which the target's greedy token is proposed.

    Args:
      target: the model whose tokens are the labels.
      starts: each draft before tuning.
      drafts: the N boost-tuned drafts in order.
      tokens: held-out text, read in windows of `distill.CONTEXT`.
    """
    labels = distill.choices(*target, tokens)
    before = {  # drafts may share their initial parameters
        id(start[1]): float((distill.choices(*start, tokens) == labels).mean())
        for start in {id(s[1]): s for s in starts}.values()
    }
    ranked = [distill.ranked(*model, tokens, len(drafts)) for model in drafts]
    firsts = np.stack([best[:, 0] for best in ranked], 1)
    return {
        "held_out_tokens": len(labels),
        "drafts": [
            {
                "name": f"draft-{number}",
                "match_before": before[id(start[1])],
                "match": float((best[:, 0] == labels).mean()),
                "top_n": float(covered(labels, best).mean()),
            }
            for number, (start, best) in enumerate(zip(starts, ranked), 1)
        ],
        "boosted": float(covered(labels, firsts).mean()),
    }


def table(figures: dict[str, Any]) -> str:
    """Returns a Markdown table of the matches of each draft, and the coverage of all."""
    drafts, count = figures["drafts"], len(figures["drafts"])
    rows = [
        (draft["name"], *(f"{draft[key]:.1%}" for key in ("samples", "match_before", "match")))
        + (f"{draft['top_n']:.1%}",)
        for draft in drafts
    ]
    header = ("draft", "samples", "top 1, before", "top 1, after", f"top {count}")
    together = f"\n\nTop 1 of {count} drafts: {figures['boosted']:.1%}." if count > 1 else ""
    return (
        f"Share of {figures['held_out_tokens']:,} held-out positions at which the target's greedy "
        f"token is proposed:\n\n{markdown_table(header, rows)}{together}\n"
    )


def note(figures: dict[str, Any], number: int) -> str:
    """Returns the section about tuning in the model card of draft `number`, in Markdown."""
    which = "all samples" if number == 1 else "the samples that earlier drafts do not match"
    return f"Boost-tuned (SpecInfer, section 3) on {which}. {table(figures)}"
