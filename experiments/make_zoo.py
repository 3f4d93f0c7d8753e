"""Makes the embedded models: tokenizer, target, two drafts, each a directory with a card.

    python -m experiments.make_zoo experiments/recipes/cpu.yaml --work build/zoo --out DIR

Every stage resumes after a kill: a finished one is read back, the one at work goes on from its
newest checkpoint.
"""

import argparse
import dataclasses
import pathlib
import platform

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import yaml
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import models
from experiments import corpus, distill, training
from models import LlamaConfig, Rope

CONTEXTS = (1024, 2048, 8192)  # of the losses in the cards
EVALUATED_TOKENS = 65536


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe file, read: shapes and schedules of the target and of the drafts.

    Attributes:
      vocab_size: of the tokenizer.
      target, draft: shapes.
      target_schedule: the target's training.
      draft_text: the drafts' common training on text.
      draft_labels: each draft's training on what the target would say.
      labelled_tokens: how much text the target labels.
      missed_weight: the second draft's loss weight where the first one missed.
    """

    vocab_size: int
    target: LlamaConfig
    target_schedule: training.Schedule
    draft: LlamaConfig
    draft_text: training.Schedule
    draft_labels: training.Schedule
    labelled_tokens: int
    missed_weight: float


@dataclasses.dataclass(frozen=True)
class Text:
    """The data: tokens to train on, tokens held out, and their bytes.

    Attributes:
      train, held_out: int32 streams.
      bytes_per_token: of the held-out text.
      digest: SHA-256 of all modules.
    """

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float
    digest: str


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


def claim(work: pathlib.Path, recipe: Recipe) -> None:
    """Marks the work folder as this recipe's on this library; its stages are read back as they are.

    Raises:
      ValueError: it is another's.
    """
    claimed = work / "recipe.txt"
    wanted = f"{recipe}\n{corpus.data_hash(corpus.library())}\n"
    if not claimed.exists():
        claimed.write_text(wanted)
    if claimed.read_text() != wanted:
        raise ValueError(
            f"{work} holds stages of another recipe, or of another Python's library: "
            "use an empty folder, or remove it"
        )


def read_text(recipe: Recipe, work: pathlib.Path) -> tuple[Tokenizer, Text]:
    """Returns (the tokenizer, trained once and kept in the work folder, the data)."""
    modules = corpus.library()
    trained_on, held_out = corpus.split(modules)
    path = work / "tokenizer.json"
    if not path.exists():
        partial = path.with_suffix(".partial")
        corpus.train_tokenizer(trained_on, recipe.vocab_size).save(str(partial))
        partial.rename(path)
    tokenizer = Tokenizer.from_file(str(path))
    unseen = corpus.encode(tokenizer, held_out)
    size = sum(len(module.text.encode()) for module in held_out)
    return tokenizer, Text(
        corpus.encode(tokenizer, trained_on), unseen, size / len(unseen), corpus.data_hash(modules)
    )


def make_drafts(recipe: Recipe, target: nn.Module, params, text: Text, work: pathlib.Path) -> list:
    """Returns the parameters of the two drafts.

    Both start from one small model of the text. The first learns what the target would say; the
    second too, but what the first one missed counts `missed_weight` times.
    """
    module = models.build(recipe.draft)
    begun = training.train(
        module, text.train, recipe.draft_text, work / "draft-text", label="draft, text"
    )
    tokens = text.train[: recipe.labelled_tokens]
    labels = distill.choices(target, params, tokens, work / "labels.npy")

    def learn(name: str, weights: np.ndarray):
        columns = np.stack([tokens[: len(labels)], labels, weights], 1)
        return training.train(
            module,
            columns,
            recipe.draft_labels,
            work / name,
            loss=distill.label_loss,
            initial=begun,
            label=name,
        )

    first = learn("draft-1", np.ones_like(labels))
    chosen = distill.choices(module, first, tokens, work / "draft-1-choices.npy")
    missed = np.where(chosen == labels, 1, int(recipe.missed_weight)).astype(np.int32)
    return [first, learn("draft-2", missed)]


def card(
    name: str,
    module: nn.Module,
    losses: dict[int, float],
    agreement: float,
    text: Text,
    recipe: str,
) -> str:
    """Returns a model card in Markdown."""
    count = models.count_params(module.config)
    rows = "\n".join(
        f"| {context} | {nats:.3f} | {nats / np.log(2) / text.bytes_per_token:.3f} |"
        for context, nats in losses.items()
    )
    matches = ""
    if name != "target":
        matches = f"\nIts first choice is the target's on {agreement:.1%} of held-out tokens.\n"
    return f"""# magicjax zoo: {name}

A {count / 1e6:.2f} M parameter Llama, trained on the source of Python {platform.python_version()}'s
standard library (without tests), for demonstrations and tests of speculative decoding. It writes
Python-like text and knows nothing.

    python -m experiments.make_zoo {recipe} --work build/zoo --out experiments/zoo

Data: SHA-256 `{text.digest}` over paths and texts; {len(text.train):,} tokens trained on,
{len(text.held_out):,} held out (whole modules, chosen by a hash of their path).

Held-out loss after rounding to bfloat16, in windows of the given context:

| context | nats a token | bits a byte |
|---|---|---|
{rows}
{matches}"""


def export(
    name: str,
    module: nn.Module,
    params,
    agreement: float,
    tokenizer: Tokenizer,
    text: Text,
    arguments: argparse.Namespace,
) -> None:
    """Writes one model, rounded to bfloat16, with tokenizer and card."""
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    losses = {
        context: training.evaluate(module, widen(rounded), text.held_out, context, EVALUATED_TOKENS)
        for context in CONTEXTS
    }
    path = arguments.out / name
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=corpus.END, pad_token=corpus.END
    )
    end = tokenizer.token_to_id(corpus.END)
    models.save_checkpoint(
        path,
        models.build(module.config, jnp.bfloat16),
        rounded,
        eos_token_ids=(end,),
        pad_token_id=end,
        tokenizer=wrapped,
        overwrite=True,
    )
    written = card(name, module, losses, agreement, text, str(arguments.recipe))
    partial = path / ".README.partial"
    partial.write_text(written)
    partial.rename(path / "README.md")
    print(written)


def widen(params):
    """Returns the parameters in float32, whatever they were rounded to."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def main() -> None:
    """Runs the recipe named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe", type=pathlib.Path, help="experiments/recipes/*.yaml")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="checkpoints go here")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="models go here")
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    arguments.work.mkdir(parents=True, exist_ok=True)
    claim(arguments.work, recipe)
    tokenizer, text = read_text(recipe, arguments.work)

    target = models.build(recipe.target)
    params = training.train(
        target, text.train, recipe.target_schedule, arguments.work / "target", label="target"
    )
    export("target", target, params, 1.0, tokenizer, text, arguments)
    drafts = make_drafts(recipe, target, params, text, arguments.work)
    draft = models.build(recipe.draft)
    for number, draft_params in enumerate(drafts, 1):
        sample = text.held_out[:EVALUATED_TOKENS]
        agreement = distill.agreement((target, params), (draft, draft_params), sample)
        export(f"draft-{number}", draft, draft_params, agreement, tokenizer, text, arguments)


if __name__ == "__main__":
    main()
