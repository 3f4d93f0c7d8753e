"""Trains the bundled models: tokenizer, target and drafts, each in a directory with a card.

    python -m experiments.training.make_zoo experiments/recipes/cpu.yaml --work build/zoo --out DIR

The drafts are boost-tuned; `experiments.training.boost` makes them for an existing target. A recipe
without drafts makes a target. Every stage resumes after a kill: finished stages are read from the
work folder, and the current one continues from its newest checkpoint.
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
from experiments.training import boost, boost_config, boost_report, export, trainer
from magicjax.files import write_atomically
from models import DecoderConfig, DeltaNetShape, Rope, family_config


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The content of a recipe file.

    Attributes:
      vocab_size: size of the tokenizer's vocabulary.
      target: shape of the target.
      target_schedule: schedule of the target's training.
      drafts: settings of the drafts, whose target is replaced by the one trained here; None: none.
    """

    vocab_size: int
    target: DecoderConfig
    target_schedule: trainer.Schedule
    drafts: boost_config.Boosting | None


def read_recipe(path: pathlib.Path) -> Recipe:
    """Reads a recipe from a YAML file; an unknown or missing key is an error."""
    raw = yaml.safe_load(path.read_text())
    target, drafts = raw.pop("target"), raw.pop("drafts", None)
    shape, schedule = target["shape"], target["schedule"]
    if "delta_net" in shape:
        shape["delta_net"] = DeltaNetShape(**shape["delta_net"])
        shape["linear_layers"] = tuple(shape["linear_layers"])
    phases = tuple(trainer.Phase(**phase) for phase in schedule.pop("phases"))
    return Recipe(
        target=family_config(
            shape.pop("family", "llama"),
            vocab_size=raw["vocab_size"],
            max_positions=raw.pop("max_positions"),
            positions=Rope(**raw.pop("rope")),
            tie_embeddings=True,
            **shape,
        ),
        target_schedule=trainer.Schedule(phases=phases, **schedule),
        drafts=drafts and boost_config.read(path.parent / drafts),
        **raw,
    )


def make_tokenizer(vocab_size: int, work: pathlib.Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer, trained once and stored in the work folder."""
    path = work / "tokenizer.json"
    if not path.exists():
        modules, _ = corpus.split(corpus.library())
        write_atomically(path, corpus.train_tokenizer(modules, vocab_size).to_str(pretty=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path)), eos_token=corpus.END, pad_token=corpus.END
    )


def main() -> None:
    """Runs the recipe of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.training.make_zoo",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("recipe", type=pathlib.Path, help="experiments/recipes/*.yaml")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder of checkpoints")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the models")
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    arguments.work.mkdir(parents=True, exist_ok=True)
    digest = corpus.data_hash(corpus.library())
    record = f"{recipe.vocab_size} {recipe.target}\n{recipe.target_schedule}\n{digest}\n"
    export.claim(arguments.work / "recipe.txt", record)
    tokenizer = make_tokenizer(recipe.vocab_size, arguments.work)
    text = corpus.read(tokenizer.backend_tokenizer)
    if recipe.drafts is not None:  # before the target is trained
        boost.check_sizes(recipe.drafts, text, recipe.target.max_positions)

    target = models.build(recipe.target)
    params = trainer.train(
        target, text.train, recipe.target_schedule, arguments.work / "target", label="target"
    )
    path, command = arguments.out / "target", f"{parser.prog} {' '.join(sys.argv[1:])}"
    export.export(path, target, params, tokenizer, text, command=command)
    if recipe.drafts is None:
        return
    drafts = recipe.drafts.model_copy(update={"target": str(path)})
    figures = boost.run(drafts, arguments.work, arguments.out, command)
    print(boost_report.table(figures))


if __name__ == "__main__":
    main()
