"""Makes the embedded models: tokenizer, target, two drafts, each with a card.

    python -m experiments.make_zoo experiments/recipes/cpu.yaml --work /tmp/zoo --out experiments/zoo

Every stage resumes after a kill: finished ones are read back, the one at work goes on from its
newest checkpoint.
"""

import argparse
import dataclasses
import pathlib

import numpy as np
import yaml
from tokenizers import Tokenizer

from experiments import corpus, training
from models import Llama, LlamaConfig, Rope


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe file, read: shapes and schedules of the target and of the drafts."""

    vocab_size: int
    target: LlamaConfig
    target_schedule: training.Schedule
    draft: LlamaConfig
    draft_text: training.Schedule
    draft_labels: training.Schedule
    labelled_tokens: int
    missed_weight: float


def read_recipe(path: pathlib.Path) -> Recipe:
    """Returns the recipe in a YAML file; an unknown or missing key is an error."""
    raw = yaml.safe_load(path.read_text())
    shared = dict(
        vocab_size=raw["vocab_size"],
        max_positions=raw.pop("max_positions"),
        rope=Rope(theta=raw.pop("rope_theta")),
        tie_embeddings=True,
    )

    def schedule(fields: dict) -> training.Schedule:
        phases = tuple(training.Phase(**phase) for phase in fields.pop("phases"))
        return training.Schedule(phases=phases, **fields)

    target, drafts = raw.pop("target"), raw.pop("drafts")
    return Recipe(
        target=LlamaConfig(**shared, **target["shape"]),
        target_schedule=schedule(target["schedule"]),
        draft=LlamaConfig(**shared, **drafts.pop("shape")),
        draft_text=schedule(drafts.pop("text")),
        draft_labels=schedule(drafts.pop("labels")),
        **drafts,
        **raw,
    )


def tokenizer_of(recipe: Recipe, modules: list[corpus.Module], work: pathlib.Path) -> Tokenizer:
    """Returns the tokenizer, trained once and kept in the work folder."""
    path = work / "tokenizer.json"
    if not path.exists():
        tokenizer = corpus.train_tokenizer(modules, recipe.vocab_size)
        partial = path.with_suffix(".partial")
        tokenizer.save(str(partial))
        partial.rename(path)
    return Tokenizer.from_file(str(path))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="checkpoints go here")
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    arguments.work.mkdir(parents=True, exist_ok=True)

    trained_on, held_out = corpus.split(corpus.library())
    tokenizer = tokenizer_of(recipe, trained_on, arguments.work)
    stream = corpus.encode(tokenizer, trained_on)
    unseen = corpus.encode(tokenizer, held_out)
    target = Llama(recipe.target)
    params = training.train(
        target, stream, recipe.target_schedule, arguments.work / "target", label="target"
    )
    for context in (1024, 2048, 8192):
        print(context, training.evaluate(target, params, unseen, context, 65536))


if __name__ == "__main__":
    main()
