"""Boost-tuning (SpecInfer, arXiv 2305.09781, section 3): draft models with complementary choices.

    python -m experiments.training.boost RECIPE_drafts.yaml --work build/zoo --out DIR

The target labels a text with its greedy tokens. Draft 1 is tuned on all labels, draft 2 on those
that draft 1 does not predict, draft 3 on those that neither predicts, and so on. Merged into one
token tree, their top-1 tokens contain more of the target's tokens than a single draft's.

A sample is a position of the text; its label is the target's next token. In the paper a sample is a
prompt with the target's whole continuation, and a prompt is dropped if a draft matches all of it.
With positions, every draft reads the whole text, and matched positions have weight 0 in its loss.

Every stage resumes after a kill and ends with the same weights: finished stages are read from the
work folder, and the current one continues from its newest checkpoint.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

import models
from experiments.prompts import corpus
from experiments.schema import grid
from experiments.schema.fields import ConfigError
from experiments.training import (
    boost_config,
    boost_report,
    distill,
    draft_vocab,
    export,
    generated_text,
    trainer,
)
from experiments.training.boost_config import Boosting
from magicjax.sources import Source
from models.hf_config_writing import write_config


@dataclasses.dataclass(frozen=True)
class Material:
    """Models and text of boost-tuning, loaded and checked.

    Attributes:
      target: the model that labels the text.
      tokenizer: the target's transformers tokenizer.
      text: training and held-out text.
      modules: one per draft.
      starts: initial parameters of each draft; None to train them on the text first.
      vocab_map: the map of the drafts' vocabulary, or None.
    """

    target: models.Checkpoint
    tokenizer: Any
    text: corpus.TokenizedCorpus
    modules: list[nn.Module]
    starts: list[Any] | None
    vocab_map: Int[np.ndarray, "V"] | None = None

    def embedding_ids(self, tokens: Int[np.ndarray, "T"]) -> Int[np.ndarray, "T"]:
        """Returns what the drafts are trained on: the index of each token's embedding."""
        return tokens if self.vocab_map is None else self.vocab_map[tokens]

    def with_target_vocab(self, module: nn.Module, params: Any) -> tuple[nn.Module, Any]:
        """Returns a draft that reads and predicts the target's tokens."""
        if self.vocab_map is None:
            return module, params
        return draft_vocab.with_map(module, params, self.vocab_map)


def prepare(settings: Boosting, work: pathlib.Path) -> Material:
    """Loads models and text; generated text is written first, or read from `work`.

    Raises:
      ConfigError: models, text and settings do not fit each other.
      FileNotFoundError: a directory is missing.
    """
    directory = Source(settings.target).checkpoint_directory
    target = models.load_checkpoint(directory, jnp.dtype(settings.dtype), weights="none")
    tokenizer = models.load_tokenizer(directory)
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise ConfigError(f"{settings.target} has no tokenizer with an end token: add one")
    check_shape(settings, target.config)
    if settings.generated is None:
        root = settings.corpus or None
        text = corpus.read(tokenizer.backend_tokenizer, tokenizer.eos_token_id, root)
    else:
        folder = work / "generated"
        text = generated_text.write(settings.target, settings.dtype, settings.generated, folder)
    vocab_map = None
    if settings.shape:
        sizes = settings.shape.model_dump(exclude={"draft_vocab_size"})
        if size := settings.shape.draft_vocab_size:
            vocab_map = draft_vocab.make_map(text.train, target.config.vocab_size, size)
            sizes["vocab_size"] = size
        module = models.build(dataclasses.replace(target.config, **sizes))
        modules, starts = [module] * settings.drafts, None
    else:
        loaded = [_start(path, target, tokenizer) for path in settings.start]
        loaded *= settings.drafts // len(loaded)
        modules, starts = [c.module for c in loaded], [c.params for c in loaded]
    check_sizes(settings, text, min(module.config.max_positions for module in modules))
    return Material(target, tokenizer, text, modules, starts, vocab_map)


def check_shape(settings: Boosting, config: models.DecoderConfig) -> None:
    """Raises ConfigError if the drafts' shape or the generated text does not fit the target."""
    if settings.shape:
        try:
            write_config(dataclasses.replace(config, **settings.shape.model_dump()))
        except ValueError as error:
            raise ConfigError(f"shape does not fit the target: {error}") from error
    if generated := settings.generated:
        if generated.length >= config.max_positions:
            raise ConfigError(
                f"generated.length={generated.length} is too large: the target has "
                f"{config.max_positions} positions"
            )


def _start(path: str, target: models.Checkpoint, tokenizer: Any) -> models.Checkpoint:
    """Loads a small model; raises ConfigError unless it has the target's vocabulary."""
    directory = Source(path).checkpoint_directory
    small = models.load_checkpoint(directory, jnp.float32, weights="none")
    if getattr(small.config, "draft_vocab_size", None) is not None:
        raise ConfigError(
            f"{path} has a draft vocabulary, with which training cannot start: give another model, "
            "or `shape`"
        )
    size, target_size = small.config.vocab_size, target.config.vocab_size
    if size != target_size:
        raise ConfigError(
            f"{path} has a vocabulary of {size} tokens, but the target's has {target_size}: a "
            "draft must have the target's vocabulary"
        )
    small_tokenizer = models.load_tokenizer(directory)
    if small_tokenizer is not None and small_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{path} has other token ids than the target: use the target's tokenizer")
    return small


def check_sizes(settings: Boosting, text: corpus.TokenizedCorpus, max_positions: int) -> None:
    """Raises ConfigError if the text is too short, or a window too long for a draft."""
    available, labelled = len(text.train), settings.labelled_tokens
    if available < labelled:
        raise ConfigError(
            f"labelled_tokens={labelled} is too large: the text has {available} training tokens: "
            "give more text, or lower labelled_tokens"
        )
    in_windows = labelled // distill.CONTEXT * distill.CONTEXT
    longest = max(phase.context for phase in settings.labels.phases)
    if in_windows < longest + 1:
        raise ConfigError(
            f"labelled_tokens={labelled} gives {in_windows} tokens in windows of "
            f"{distill.CONTEXT}, but labels with context={longest} needs {longest + 1}: raise "
            "labelled_tokens"
        )
    contexts = [longest, distill.CONTEXT]
    if settings.text:
        contexts += [phase.context for phase in settings.text.phases]
        if available < max(contexts) + 1:
            raise ConfigError(
                f"the text has {available} training tokens, but the schedule `text` with "
                f"context={max(contexts)} needs {max(contexts) + 1}: give more text"
            )
    if max(contexts) > max_positions:
        raise ConfigError(
            f"a window of {max(contexts)} tokens is longer than a draft's max_positions="
            f"{max_positions}: shorten the schedules' contexts"
        )
    needed = max(c for c in (*export.CONTEXTS, distill.CONTEXT) if c <= max_positions) + 1
    if len(text.held_out) < needed:
        raise ConfigError(
            f"the text has {len(text.held_out)} held-out tokens, but the model cards need "
            f"{needed}: give more text"
        )


def claim(settings: Boosting, material: Material, work: pathlib.Path) -> None:
    """Records settings, models and text in the work folder, as `export.claim`.

    The number of drafts is not recorded, so that a later run can add drafts.
    """
    free = {"target", "start", "corpus", "drafts"}  # paths, recorded by content, and the number
    starts = [grid.fingerprint(path) for path in settings.start]
    record = (
        f"{settings.model_dump_json(exclude=free)}\n"
        f"{grid.fingerprint(settings.target)} {starts}\n{material.text.digest}\n"
    )
    export.claim(work / "boost.txt", record)


def sample_weights(
    matched: Bool[np.ndarray, "M"], kept_share: float, seed: int
) -> Int[np.ndarray, "M"]:
    """Returns 1 for samples without a match and for a random share of the others, else 0.

    Raises:
      ConfigError: all weights are 0.
    """
    kept = np.random.default_rng(seed).random(len(matched)) < kept_share
    weights = (~matched | kept).astype(np.int32)
    if not weights.any():
        raise ConfigError(
            f"draft {seed} has no samples: the {seed - 1} drafts before it match all "
            f"{len(matched)}: set drafts={seed - 1}"
        )
    return weights


def tune(
    settings: Boosting,
    modules: list[nn.Module],
    starts: list[Any],
    tokens: Int[np.ndarray, "M"],
    labels: Int[np.ndarray, "M"],
    work: pathlib.Path,
) -> tuple[list[Any], list[float]]:
    """Returns the parameters of each draft, and the share of samples that it is tuned on."""
    matched = np.zeros(len(labels), bool)
    size = settings.shape and settings.shape.draft_vocab_size
    shared = size - 1 if size else None
    tuned, shares = [], []
    for number, (module, start) in enumerate(zip(modules, starts), 1):
        weights = sample_weights(matched, settings.kept_share, number)
        name = f"draft-{number}"
        params = trainer.train(
            module,
            np.stack((tokens, labels, weights), 1),
            dataclasses.replace(settings.labels, seed=settings.labels.seed + number - 1),
            work / name,
            loss=distill.label_loss,
            initial=start,
            label=name,
        )
        tuned.append(params)
        shares.append(float(weights.mean()))
        if number < len(modules):
            path = work / f"{name}-choices.npy"
            # A draft never predicts the embedding that rare tokens share.
            can_match = labels != shared if shared is not None else True
            matched |= (distill.choices(module, params, tokens, path) == labels) & can_match
    return tuned, shares


def begin(settings: Boosting, material: Material, work: pathlib.Path) -> list[Any]:
    """Returns the initial parameters of each draft, trained on the text if none are given."""
    if material.starts is not None:
        return material.starts
    assert settings.text is not None
    params = trainer.train(
        material.modules[0],
        material.embedding_ids(material.text.train),
        settings.text,
        work / "draft-text",
        label="draft-text",
    )
    return [params] * settings.drafts


def run(settings: Boosting, work: pathlib.Path, out: pathlib.Path, command: str) -> dict[str, Any]:
    """Tunes drafts and writes them to `out`/draft-1, -2, ...; returns figures on held-out text.

    Args:
      settings: the settings.
      work: folder of checkpoints and labels, from which a killed run resumes.
      out: folder of the drafts.
      command: the command line named in the model cards.

    Raises:
      ConfigError, FileNotFoundError: see `prepare`, `claim` and `sample_weights`.
    """
    material = prepare(settings, work)
    work.mkdir(parents=True, exist_ok=True)
    claim(settings, material, work)
    modules, starts = material.modules, begin(settings, material, work)
    tokens = material.text.train[: settings.labelled_tokens]
    labels = distill.choices(
        material.target.module, material.target.params, tokens, work / "labels.npy"
    )
    tokens, labels = material.embedding_ids(tokens[: len(labels)]), material.embedding_ids(labels)
    tuned, shares = tune(settings, modules, starts, tokens, labels, work)
    figures = boost_report.measure(
        (material.target.module, material.target.params),
        [material.with_target_vocab(m, p) for m, p in zip(modules, starts)],
        [material.with_target_vocab(m, export.as_stored(p)) for m, p in zip(modules, tuned)],
        material.text.held_out,
    )
    for draft, share in zip(figures["drafts"], shares):
        draft["samples"] = share
    for number, draft in enumerate(zip(modules, tuned), 1):
        module, params = material.with_target_vocab(*draft)
        note = boost_report.note(figures, number)
        path, tokenizer, text = out / f"draft-{number}", material.tokenizer, material.text
        export.export(path, module, params, tokenizer, text, command=command, note=note)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for invalid settings."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.training.boost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=pathlib.Path, help="experiments/recipes/*_drafts.yaml")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder of checkpoints")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the drafts")
    options = parser.parse_args(arguments)
    command = f"{parser.prog} {options.config} --work {options.work} --out {options.out}"
    try:
        settings = boost_config.read(options.config)
        figures = run(settings, options.work, options.out, command)
    except (ConfigError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    print(boost_report.table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
