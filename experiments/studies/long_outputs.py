"""Measures acceptance by quarter of long outputs: `python -m experiments.studies.long_outputs`.

Does a draft cache become stale? Outputs are several times as long as the ring and sampled, because
greedy text of a small model soon loops, and loops are easy to draft. Two controls:

* Static drafts keep their cache as it was after the prompt.
* Sampled text drifts away from the training data and becomes harder to draft with any cache. So
  every other draft is also measured with a new prefill of the same text at the start of each
  quarter. Only a loss beyond that one is due to a stale cache.
"""

import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import pandas as pd
import tyro
from flax import struct
from jaxtyping import Int
from matplotlib.figure import Figure
from tqdm import tqdm

import magicjax
from experiments import prompts
from experiments.studies import plots
from magicjax.files import write_atomically

QUARTERS = 4
REFILLED = "refilled each quarter"


@dataclasses.dataclass
class Settings:
    """Acceptance by quarter of long outputs.

    Attributes:
      target: directory of the target.
      results: folder for the CSV and the plot.
      budget: slots of every draft cache, for each layer and KV head.
      sinks: pinned tokens of the streaming cache; its ring is the remainder of the budget.
      rings: output length, in rings of the streaming cache.
      batch: rows decoded in one call; more rows, less noise.
      context: tokens of each prompt.
      tree: token tree.
      refresh_every: rounds between refreshes of the refreshed draft.
      temperature: of the sampling.
      seed: of the sampling.
    """

    target: str = "experiments/zoo/target"
    results: str = "results/long_outputs"
    budget: int = 128
    sinks: int = 16
    rings: int = 4
    batch: int = 64
    context: int = 1024
    tree: str = "chain:3"
    refresh_every: int = 8
    temperature: float = 1.0
    seed: int = 0


@struct.dataclass
class StaticSelfSpeculation(magicjax.SelfSpeculation):
    """A control, whose cache stays as it was after the prompt."""

    def commit(self, target, state, draft, proposal, outcome):
        return state


def drafts(settings: Settings) -> dict[str, magicjax.SelfSpeculation]:
    """Returns the drafts to compare, by name."""
    streaming, budget = magicjax.StreamingLLM(settings.sinks), settings.budget
    every = settings.refresh_every
    refreshed = magicjax.SelfSpeculation("snapkv", budget, refresh_every=every)
    return {
        "streaming": magicjax.SelfSpeculation(streaming, budget),
        "snapkv": magicjax.SelfSpeculation("snapkv", budget),
        f"snapkv, refreshed every {every}": refreshed,
        "streaming, static": StaticSelfSpeculation(streaming, budget),
        "snapkv, static": StaticSelfSpeculation("snapkv", budget),
    }


def by_part(
    emitted: list[Int[np.ndarray, "B"]], depth: int, new_tokens: int, parts: int
) -> tuple[list[float], list[int]]:
    """Returns the acceptance rate (NaN where nothing was drafted) and drafted tokens of each part.

    A round counts in the part of the output in which it begins. A row's last round is not counted,
    because the limit may have cut it.

    Args:
      emitted: tokens of each row after prefill and after every round.
      depth: tokens drafted per round.
      new_tokens: length of the outputs.
      parts: number of equal parts.
    """
    accepted, drafted = np.zeros(parts, int), np.zeros(parts, int)
    for before, after in zip(emitted, emitted[1:], strict=False):
        running = after < new_tokens
        part = (before * parts // new_tokens)[running]
        np.add.at(accepted, part, (after - before - 1)[running])
        np.add.at(drafted, part, depth)
    share = np.divide(accepted, drafted, out=np.full(parts, np.nan), where=drafted > 0)
    return share.tolist(), drafted.tolist()


def run(
    target: magicjax.Model, drafter: Any, rows: list, new_tokens: int, settings: Settings
) -> tuple[list[Int[np.ndarray, "B"]], list[Int[np.ndarray, "T"]]]:
    """Returns the emitted tokens after prefill and every round, and prompts with outputs."""
    emitted: list[np.ndarray] = []
    count = np.zeros(len(rows), int)
    rounds = magicjax.stream(
        target,
        rows,
        drafter=drafter,
        tree=magicjax.parse_tree(settings.tree),
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=settings.temperature,
        seed=settings.seed,
        eos_token_id=[],
    )
    while True:
        try:
            count = count + [len(row) for row in next(rounds)]
        except StopIteration as end:
            return emitted, end.value.sequences
        emitted.append(count)


def measure(
    name: str, target: magicjax.Model, drafter: Any, rows: list, settings: Settings
) -> dict[str, dict[str, float]]:
    """Returns table rows by name: a draft's acceptance by quarter, and with refilled caches.

    Refilled caches exclude one more round, the last of each quarter. Long rounds are more often
    the last, so these shares are slightly low.
    """
    depth = magicjax.parse_tree(settings.tree).depth
    new_tokens = settings.rings * (settings.budget - settings.sinks)
    emitted, texts = run(target, drafter, rows, new_tokens, settings)
    table = {name: _row(*by_part(emitted, depth, new_tokens, QUARTERS))}
    if isinstance(drafter, StaticSelfSpeculation):
        return table
    length, parts = new_tokens // QUARTERS, []
    for quarter in range(QUARTERS):
        begun = [text[: settings.context + quarter * length] for text in texts]
        emitted, _ = run(target, drafter, begun, length, settings)
        parts.append(by_part(emitted, depth, length, 1))
    shares, drafted = (list(itertools.chain(*each)) for each in zip(*parts, strict=True))
    return table | {f"{name}, {REFILLED}": _row(shares, drafted)}


def _row(shares: list[float], drafted: list[int]) -> dict[str, float]:
    by_quarter = {f"quarter {i + 1}": share for i, share in enumerate(shares)}
    return by_quarter | {"drafted, least": min(drafted)}


def plot(table: pd.DataFrame) -> Figure:
    """Returns a line for each draft, dashed for static ones, dotted for refilled caches."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.subplots()
    quarters = range(1, QUARTERS + 1)
    for name, row in table.iterrows():
        line = "--" if "static" in str(name) else ":" if REFILLED in str(name) else "-"
        axes.plot(quarters, row.iloc[:QUARTERS], line, marker="o", label=name)
    axes.set(xlabel="quarter of the output", ylabel="drafted tokens accepted", ylim=(0, 1))
    axes.set_xticks(quarters)
    plots.add_legend(axes)
    return figure


def main(settings: Settings) -> None:
    """Measures every draft, prints the table, and writes it with its plot."""
    target = magicjax.load(settings.target, dtype="float32")
    made = prompts.make(prompts.STDLIB, target.tokenizer, "", settings.batch, settings.context)
    rows = [prompt.tokens for prompt in made]
    shares: dict[str, dict[str, float]] = {}
    for name, drafter in tqdm(drafts(settings).items(), unit="draft"):
        shares |= measure(name, target, drafter, rows, settings)
    table = pd.DataFrame(shares).T.rename_axis("draft")
    folder = pathlib.Path(settings.results)
    write_atomically(folder / "long_outputs.csv", table.round(4).to_csv())
    plots.write_png(folder / "long_outputs.png", plot(table))
    print(table.round(3).to_string())
    print(f"wrote long_outputs.csv and long_outputs.png to {folder}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
