"""Does a draft cache go stale? Acceptance by quarter of long outputs.

`python -m experiments.studies.long_outputs` samples outputs several times as long as the ring and
prints,
for each draft, how much of what it drafted was accepted in each quarter. Beside the drafts of this
project stands a static one, whose cache stays as it was behind the prompt: what a ring that follows
the text is worth. Outputs are sampled, because greedy ones of a small model soon loop, and loops
are easy to draft.

Sampled text drifts away from what the models were trained on, and becomes harder to draft whatever
the cache. So each draft that follows the text is also measured with caches made anew at the start
of every quarter, by a prefill of the same text: what is lost beyond that is lost to a stale cache.
"""

import dataclasses
import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from flax import struct
from jaxtyping import Int
from tqdm import tqdm

import magicjax
from experiments import prompts
from experiments.schema import store

QUARTERS = 4
ANEW = "anew each quarter"


@dataclasses.dataclass
class Settings:
    """Acceptance by quarter of long outputs, of drafts that follow the text and one that does not.

    Attributes:
      target: directory of the target.
      results: folder for the CSV and the plot.
      budget: slots of every draft cache, for each layer and KV head.
      sinks: pinned tokens of the streaming cache; its ring is the rest of the budget.
      rings: output length, in rings of the streaming cache.
      batch: rows decoded together; more rows, less noise.
      context: tokens of each prompt.
      tree: what is drafted.
      refresh_every: rounds between refreshes, in the row that refreshes.
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
    """A control: its cache stays as it was behind the prompt."""

    def commit(self, target, state, draft, proposal, of_round):
        return state


def drafts(settings: Settings) -> dict[str, magicjax.SelfSpeculation]:
    """Returns the drafts to compare, by name."""
    streaming, budget = magicjax.StreamingLLM(settings.sinks), settings.budget
    return {
        "streaming": magicjax.SelfSpeculation(streaming, budget),
        "snapkv": magicjax.SelfSpeculation("snapkv", budget),
        f"snapkv, refreshed every {settings.refresh_every}": magicjax.SelfSpeculation(
            "snapkv", budget, refresh_every=settings.refresh_every
        ),
        "streaming, static": StaticSelfSpeculation(streaming, budget),
        "snapkv, static": StaticSelfSpeculation("snapkv", budget),
    }


def by_part(
    emitted: list[Int[np.ndarray, "B"]], depth: int, new_tokens: int, parts: int
) -> tuple[list[float], list[int]]:
    """Returns (the accepted share of what was drafted, NaN of nothing; how much was) by part.

    A round counts in the part of the output in which it begins. Of a row's last round nothing is
    counted: the limit may have cut it.

    Args:
      emitted: tokens of each row after prefill and after every round.
      depth: how many tokens a round drafts.
      new_tokens: length of the outputs.
      parts: into how many equal parts they are cut.
    """
    accepted, drafted = np.zeros(parts, int), np.zeros(parts, int)
    for before, after in zip(emitted, emitted[1:], strict=False):
        going = after < new_tokens
        part = (before * parts // new_tokens)[going]
        np.add.at(accepted, part, (after - before - 1)[going])
        np.add.at(drafted, part, depth)
    share = np.divide(accepted, drafted, out=np.full(parts, np.nan), where=drafted > 0)
    return share.tolist(), drafted.tolist()


def run(
    target: magicjax.Model, drafter: Any, rows: list, new_tokens: int, settings: Settings
) -> tuple[list[Int[np.ndarray, "B"]], list[Int[np.ndarray, "T"]]]:
    """Returns (tokens of each row after prefill and every round, prompts and outputs)."""
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
    """Returns rows of the table by name: one draft's acceptance by quarter.

    Of a draft that follows the text there is a second row: each quarter sampled again, behind the
    same text, with caches made anew. The last round before a quarter's end is not counted there,
    and a long round is likelier to be the last, so these shares are a little low.
    """
    depth = magicjax.parse_tree(settings.tree).depth
    new_tokens = settings.rings * (settings.budget - settings.sinks)
    emitted, texts = run(target, drafter, rows, new_tokens, settings)
    found = {name: _row(*by_part(emitted, depth, new_tokens, QUARTERS))}
    if isinstance(drafter, StaticSelfSpeculation):
        return found
    length = new_tokens // QUARTERS
    shares: list[float] = []
    drafted: list[int] = []
    for i in range(QUARTERS):
        begun = [text[: settings.context + i * length] for text in texts]
        emitted, _ = run(target, drafter, begun, length, settings)
        share, count = by_part(emitted, depth, length, 1)
        shares, drafted = shares + share, drafted + count
    return found | {f"{name}, {ANEW}": _row(shares, drafted)}


def _row(share: list[float], drafted: list[int]) -> dict[str, float]:
    names = [f"quarter {i + 1}" for i in range(QUARTERS)]
    return dict(zip(names, share, strict=True)) | {"drafted, least": min(drafted)}


def plot(table: pd.DataFrame, path: pathlib.Path) -> None:
    """Draws the table: a line for each draft, dashed for static ones, dotted for new caches."""
    figure, axes = plt.subplots(figsize=(8.4, 3.6), layout="constrained")
    for name, row in table.iterrows():
        line = "--" if "static" in str(name) else ":" if ANEW in str(name) else "-"
        axes.plot(range(1, QUARTERS + 1), row.iloc[:QUARTERS], line, marker="o", label=name)
    axes.set(xlabel="quarter of the output", ylabel="drafted tokens accepted", ylim=(0, 1))
    axes.set_xticks(range(1, QUARTERS + 1))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(settings: Settings) -> None:
    """Measures every draft, prints the table, writes it and its plot."""
    target = magicjax.load(settings.target, dtype="float32")
    made = prompts.make(prompts.STDLIB, target.tokenizer, "", settings.batch, settings.context)
    rows = [prompt.tokens for prompt in made]
    found: dict[str, dict[str, float]] = {}
    for name, drafter in tqdm(drafts(settings).items(), unit="draft"):
        found |= measure(name, target, drafter, rows, settings)
    table = pd.DataFrame(found).T.rename_axis("draft")
    folder = pathlib.Path(settings.results)
    folder.mkdir(parents=True, exist_ok=True)
    store.write_text(folder / "long_outputs.csv", table.round(4).to_csv())
    plot(table, folder / "long_outputs.png")
    print(table.round(3).to_string())
    print(f"written to {folder}: long_outputs.csv, long_outputs.png")


if __name__ == "__main__":
    main(tyro.cli(Settings))
