"""Boost-tuning (SpecInfer, arXiv 2305.09781, section 3): drafts that cover each other's misses.

    python -m experiments.training.boost experiments/recipes/cpu_drafts.yaml --work build/zoo --out
    DIR

The target labels a text with its greedy choices. Draft 1 is tuned on all of them, draft 2 on those
that draft 1 does not choose, draft 3 on those that neither does, and so on. Together their first
choices, merged into one token tree, hold more of the target's tokens than those of a single draft.

A sample here is a position: what stands before it is the prompt, and the target's one next token
is the label. The paper's sample is a prompt with the target's whole continuation, and it drops the
prompts whose continuation a draft matches from end to end. With positions every window of text is
still read by every draft, and matched positions have no weight in its loss, so no label is
lost because its neighbour was matched, or kept because its neighbour was not.

Every stage resumes after a kill and ends with the same weights: a finished one is read back, the
one at work goes on from its newest checkpoint.
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
from experiments.schema import grid, store
from experiments.schema.fields import ConfigError
from experiments.training import boost_config, boost_report, distill, export, trainer
from experiments.training.boost_config import Boosting


@dataclasses.dataclass(frozen=True)
class Material:
    """What boost-tuning works on, loaded and checked.

    Attributes:
      target: labels the text; float32.
      tokenizer: the target's, of transformers.
      text: what is labelled, and what is held out.
      modules: one for each draft.
      starts: parameters that each draft begins from; None: to be trained on the text.
    """

    target: models.Checkpoint
    tokenizer: Any
    text: corpus.Text
    modules: list[nn.Module]
    starts: list[Any] | None


def prepare(settings: Boosting) -> Material:
    """Returns models and text; nothing has been compiled by then.

    Raises:
      ConfigError: they do not fit each other; the message names what is there and what is needed.
      FileNotFoundError: a directory is missing.
    """
    target = models.load_checkpoint(settings.target, jnp.float32)
    tokenizer = models.load_tokenizer(settings.target)
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise ConfigError(f"{settings.target} has no tokenizer with an end token: text needs one")
    if settings.shape:
        if not isinstance(target.config, models.LlamaConfig):
            raise ConfigError(
                "shape makes a Llama, and the target is none: name small models under `start`"
            )
        shape = dataclasses.replace(target.config, **settings.shape.model_dump())
        modules, starts = [models.build(shape)] * settings.drafts, None
    else:
        loaded = [_start(path, target, tokenizer) for path in settings.start]
        loaded *= settings.drafts // len(loaded)
        modules, starts = [c.module for c in loaded], [c.params for c in loaded]
    text = corpus.read(tokenizer.backend_tokenizer, tokenizer.eos_token_id, settings.corpus or None)
    check_sizes(settings, text, min(module.config.max_positions for module in modules))
    return Material(target, tokenizer, text, modules, starts)


def _start(path: str, target: models.Checkpoint, tokenizer: Any) -> models.Checkpoint:
    """Returns the small model in a directory; raises ConfigError if its tokens are others."""
    small = models.load_checkpoint(path, jnp.float32)
    ours, theirs = small.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"{path} has a vocabulary of {ours} tokens and the target one of {theirs}: a draft "
            "must speak the target's tokens"
        )
    own = models.load_tokenizer(path)
    if own is not None and own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{path} numbers its tokens otherwise than the target: use its tokenizer")
    return small


def check_sizes(settings: Boosting, text: corpus.Text, max_positions: int) -> None:
    """Raises ConfigError where the text is too short, or a window too long for a draft."""
    has, wants = len(text.train), settings.labelled_tokens
    if has < wants:
        raise ConfigError(
            f"the corpus has {has} tokens to train on and labelled_tokens={wants} needs {wants}: "
            "give more text, or lower labelled_tokens"
        )
    whole = wants // distill.CONTEXT * distill.CONTEXT
    longest = max(phase.context for phase in settings.labels.phases)
    if whole < longest + 1:
        raise ConfigError(
            f"labelled_tokens={wants} gives {whole} tokens in windows of {distill.CONTEXT}, and "
            f"labels with context={longest} needs {longest + 1}: raise labelled_tokens"
        )
    contexts = [longest, distill.CONTEXT]
    if settings.text:
        contexts += [phase.context for phase in settings.text.phases]
        if has < max(contexts) + 1:
            raise ConfigError(
                f"the corpus has {has} tokens to train on and text with "
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
            f"the corpus has {len(text.held_out)} held-out tokens and the cards need {needed}: "
            "give more modules"
        )


def claim(settings: Boosting, material: Material, work: pathlib.Path) -> None:
    """Marks the work folder as that of these settings, models and text; its stages are read back.

    How many drafts are tuned is left out: one more may follow those that are there.

    Raises:
      ConfigError: it is another's.
    """
    free = {"target", "start", "corpus", "drafts"}  # told by their contents, or free to change
    starts = [grid.fingerprint(path) for path in settings.start]
    wanted = (
        f"{settings.model_dump_json(exclude=free)}\n"
        f"{grid.fingerprint(settings.target)} {starts}\n{material.text.digest}\n"
    )
    claimed = work / "boost.txt"
    if not claimed.exists():
        store.write_text(claimed, wanted)
    if claimed.read_text() != wanted:
        raise ConfigError(
            f"{work} holds stages of other settings, models or text: use an empty folder, or "
            "remove it"
        )


def sample_weights(
    matched: Bool[np.ndarray, "M"], kept_share: float, seed: int
) -> Int[np.ndarray, "M"]:
    """Returns 1 for each sample a draft is tuned on: those not matched, and a share of the others.

    Raises:
      ConfigError: none is left.
    """
    kept = np.random.default_rng(seed).random(len(matched)) < kept_share
    weights = (~matched | kept).astype(np.int32)
    if not weights.any():
        raise ConfigError(
            f"draft {seed} has no samples left: the {seed - 1} before it match all {len(matched)}; "
            f"set drafts={seed - 1}"
        )
    return weights


def learn(
    name: str,
    number: int,
    settings: Boosting,
    module: nn.Module,
    start: Any,
    samples: tuple[np.ndarray, np.ndarray, np.ndarray],
    work: pathlib.Path,
):
    """Returns the parameters of one draft, tuned on samples (token, label, weight), each [M]."""
    schedule = dataclasses.replace(settings.labels, seed=settings.labels.seed + number - 1)
    return trainer.train(
        module,
        np.stack(samples, 1),
        schedule,
        work / name,
        loss=distill.label_loss,
        initial=start,
        label=name,
    )


def tune(
    settings: Boosting,
    modules: list[nn.Module],
    starts: list[Any],
    tokens: Int[np.ndarray, "M"],
    labels: Int[np.ndarray, "M"],
    work: pathlib.Path,
) -> tuple[list[Any], list[float]]:
    """Returns (each draft's parameters, the share of samples each was tuned on)."""
    matched = np.zeros(len(labels), bool)
    tuned, shares = [], []
    for number, (module, start) in enumerate(zip(modules, starts), 1):
        weights = sample_weights(matched, settings.kept_share, number)
        name = f"draft-{number}"
        params = learn(name, number, settings, module, start, (tokens, labels, weights), work)
        tuned.append(params)
        shares.append(float(weights.mean()))
        if number < len(modules):
            path = work / f"{name}-choices.npy"
            matched |= distill.choices(module, params, tokens, path) == labels
    return tuned, shares


def begin(settings: Boosting, material: Material, work: pathlib.Path) -> list[Any]:
    """Returns the parameters each draft is tuned from, having trained them on text if need be."""
    if material.starts is not None:
        return material.starts
    assert settings.text is not None
    params = trainer.train(
        material.modules[0],
        material.text.train,
        settings.text,
        work / "draft-text",
        label="draft-text",
    )
    return [params] * settings.drafts


def run(
    settings: Boosting,
    work: pathlib.Path,
    out: pathlib.Path,
    command: str,
    compare: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Returns the figures on held-out text, having written the drafts to `out`/draft-1, -2, ...

    Args:
      settings: what is done.
      work: checkpoints and labels; a killed run goes on from here.
      out: where the drafts go.
      command: what the cards say makes them.
      compare: a JSON file for the figures; then drafts 2, 3, ... are tuned on all samples as well.

    Raises:
      ConfigError, FileNotFoundError: see `prepare`, `claim` and `sample_weights`.
    """
    material = prepare(settings)
    work.mkdir(parents=True, exist_ok=True)
    claim(settings, material, work)
    modules, starts = material.modules, begin(settings, material, work)
    tokens = material.text.train[: settings.labelled_tokens]
    labels = distill.choices(
        material.target.module, material.target.params, tokens, work / "labels.npy"
    )
    tokens = tokens[: len(labels)]
    tuned, shares = tune(settings, modules, starts, tokens, labels, work)
    plain = []
    if compare is not None:
        samples = tokens, labels, np.ones_like(labels)
        plain = [
            learn(f"plain-{n}", n, settings, modules[n - 1], starts[n - 1], samples, work)
            for n in range(2, settings.drafts + 1)
        ]
    figures = boost_report.measure(
        (material.target.module, material.target.params),
        list(zip(modules, starts)),
        [(m, export.widened(export.rounded(p))) for m, p in zip(modules, tuned)],
        [(m, export.widened(export.rounded(p))) for m, p in zip(modules[1:], plain)],
        material.text.held_out,
    )
    for draft, share in zip(figures["drafts"], shares):
        draft["samples"] = share
    for number, (module, params) in enumerate(zip(modules, tuned), 1):
        export.export(
            out / f"draft-{number}",
            module,
            params,
            material.tokenizer,
            material.text,
            command=command,
            note=boost_report.note(figures, number),
        )
    if compare is not None:
        boost_report.write(compare, figures)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for wrong settings."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.training.boost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=pathlib.Path, help="experiments/recipes/*_drafts.yaml")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="checkpoints go here")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="drafts go here")
    parser.add_argument(
        "--compare",
        type=pathlib.Path,
        metavar="FILE.json",
        help="also tune drafts 2, 3, ... without boosting, and write the comparison here",
    )
    given = parser.parse_args(arguments)
    command = f"{parser.prog} {given.config} --work {given.work} --out {given.out}"
    try:
        settings = boost_config.read(given.config)
        figures = run(settings, given.work, given.out, command, given.compare)
    except (ConfigError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    print(boost_report.table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
