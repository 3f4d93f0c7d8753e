"""Makes the embedded models: tokenizer, target, two drafts, each a directory with a card.

    python -m experiments.training.make_zoo experiments/recipes/cpu.yaml --work build/zoo --out DIR

The drafts are boost-tuned (`experiments/training/boost.py`, which makes them alone from a target
that is
there). Every stage resumes after a kill: a finished one is read back, the one at work goes on from
its newest checkpoint.
"""

import argparse
import dataclasses
import pathlib
import sys

import yaml
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import models
from experiments.prompts import corpus
from experiments.schema import store
from experiments.training import boost, boost_config, boost_report, export, trainer
from models import LlamaConfig, Rope


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe file, read: shape and schedule of the target, and how the drafts are made.

    Attributes:
      vocab_size: of the tokenizer.
      target: shape.
      target_schedule: the target's training.
      drafts: settings of the drafts; their target is the one made here.
    """

    vocab_size: int
    target: LlamaConfig
    target_schedule: trainer.Schedule
    drafts: boost_config.Boosting


def read_recipe(path: pathlib.Path) -> Recipe:
    """Returns the recipe in a YAML file; an unknown or missing key is an error."""
    raw = yaml.safe_load(path.read_text())
    shared = dict(
        vocab_size=raw["vocab_size"],
        max_positions=raw.pop("max_positions"),
        rope=Rope(theta=raw.pop("rope_theta")),
        tie_embeddings=True,
    )

    def schedule(fields: dict) -> trainer.Schedule:
        phases = tuple(trainer.Phase(**phase) for phase in fields.pop("phases"))
        return trainer.Schedule(phases=phases, **fields)

    target = raw.pop("target")
    return Recipe(
        target=LlamaConfig(**shared, **target["shape"]),
        target_schedule=schedule(target["schedule"]),
        drafts=boost_config.read(path.parent / raw.pop("drafts")),
        **raw,
    )


def claim(work: pathlib.Path, recipe: Recipe) -> None:
    """Marks the work folder as this target's on this library; its stages are read back as they are.

    Raises:
      ValueError: it is another's.
    """
    claimed = work / "recipe.txt"
    digest = corpus.data_hash(corpus.library())
    wanted = f"{recipe.vocab_size} {recipe.target}\n{recipe.target_schedule}\n{digest}\n"
    if not claimed.exists():
        store.write_text(claimed, wanted)
    if claimed.read_text() != wanted:
        raise ValueError(
            f"{work} holds stages of another recipe, or of another Python's library: "
            "use an empty folder, or remove it"
        )


def make_tokenizer(vocab_size: int, work: pathlib.Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer, trained once and kept in the work folder."""
    path = work / "tokenizer.json"
    if not path.exists():
        modules, _ = corpus.split(corpus.library())
        store.write_text(path, corpus.train_tokenizer(modules, vocab_size).to_str(pretty=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path)), eos_token=corpus.END, pad_token=corpus.END
    )


def main() -> None:
    """Runs the recipe named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.training.make_zoo",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("recipe", type=pathlib.Path, help="experiments/recipes/*.yaml")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="checkpoints go here")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="models go here")
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    arguments.work.mkdir(parents=True, exist_ok=True)
    claim(arguments.work, recipe)
    tokenizer = make_tokenizer(recipe.vocab_size, arguments.work)
    text = corpus.read(tokenizer.backend_tokenizer)
    boost.check_sizes(recipe.drafts, text, recipe.target.max_positions)  # now, not an hour later

    target = models.build(recipe.target)
    params = trainer.train(
        target, text.train, recipe.target_schedule, arguments.work / "target", label="target"
    )
    path, command = arguments.out / "target", f"{parser.prog} {' '.join(sys.argv[1:])}"
    export.export(path, target, params, tokenizer, text, command=command)
    drafts = recipe.drafts.model_copy(update={"target": str(path)})
    figures = boost.run(drafts, arguments.work, arguments.out, command)
    print(boost_report.table(figures))


if __name__ == "__main__":
    main()
