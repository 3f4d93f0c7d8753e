"""Trains an EAGLE-3 head, or one for multi-token prediction, on text that its target writes.

    python -m experiments.training.eagle RECIPE.yaml --work build/eagle --out DIR

The target samples texts and its hidden states are recorded. The head is then trained on its own
outputs, as in drafting (`eagle_loss`): first with cross-entropy against the target's distributions,
then on the probability that its draws are accepted. Its output matrix is the target's, or rows of
it, so that the head needs no other.

Every stage resumes after a kill and ends with the same weights.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

import models
from experiments.schema.fields import ConfigError, Positive, Strict, read_mapping, validated
from experiments.schema.paths import from_working_directory
from experiments.training import export, recording, trainer
from experiments.training.eagle_loss import (
    OF_TARGET,
    HeadLoss,
    frozen_of,
    modules_of,
    recorded_layers,
)
from experiments.training.generated_text import HELD_OUT_EVERY, Generated
from experiments.training.trainer import Schedule
from magicjax.benchmarks.tables import markdown_table
from magicjax.sources import Source
from models.hf_config_writing import write_config

MEASURED_ROWS = 64


class HeadShape(Strict):
    """Sizes and settings of the head; sizes that are not given are the target's."""

    draft_vocab_size: Annotated[int, Field(ge=2)] = Field(
        description="Tokens that the head can propose, the most frequent ones of the text."
    )
    intermediate_size: Positive | None = Field(None, description="F, the width of the MLP.")
    num_heads: Positive | None = Field(None, description="H, query heads.")
    num_kv_heads: Positive | None = Field(None, description="K, key/value heads.")
    layer_inputs: tuple[int, int, int] | None = Field(
        None, description="Layers of the target whose inputs are read; null: 2, L // 2 and L - 3."
    )
    norm_before_residual: bool = Field(False, description="As in speculators.")
    fc_norm: bool = Field(False, description="As in EAGLE-3.1.")
    norm_output: bool = Field(False, description="As in EAGLE-3.1.")
    own_unembedding: bool = Field(
        False,
        description="Whether the files have the target's output rows, which SpecForge and "
        "speculators read from the head.",
    )


class EagleRecipe(BaseModel):
    """A target, its text, and the training of a head."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    target: str
    """The target, as for `magicjax.load`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the target, when it writes text."""
    generated: Generated
    """The text."""
    head: HeadShape | Literal["mtp"]
    """Sizes of an EAGLE-3 head; mtp: a head for multi-token prediction, which is a layer of the
    target."""
    steps: Positive = 4
    """Tokens that are drafted from each position in training."""
    decay: float = Field(0.8, gt=0, le=1)
    """The weight of step s is decay**s."""
    cross_entropy: Schedule
    """Schedule of the training against the target's distributions."""
    overlap: Schedule | None = None
    """Schedule of the training for acceptance, after that; null: none."""


def read(path: pathlib.Path) -> EagleRecipe:
    """Reads settings from a YAML file.

    Raises:
      ConfigError: the file is not a mapping, has an unknown key, or a value out of range.
    """
    raw = from_working_directory(read_mapping(path), path.parent, ("target",))
    return validated(EagleRecipe, raw, str(path))


def train(recipe: EagleRecipe, work: pathlib.Path, out: pathlib.Path) -> dict[str, list[float]]:
    """Writes the head to `out`; returns its results on held-out text, by depth.

    Raises:
      ConfigError: target and recipe do not fit, or `work` has stages of other settings.
    """
    directory = Source(recipe.target).checkpoint_directory
    target = models.load_checkpoint(directory, jnp.dtype(recipe.dtype), weights="none")
    config = head_config(recipe.head, target.config)
    longest = max(phase.context for phase in _phases(recipe)) + 1
    layers = recorded_layers(config, target.config.num_layers)
    rows = recording.write(recipe.target, recipe.dtype, layers, recipe.generated, work / "text")
    if longest > rows.shape[1]:
        raise ConfigError(
            f"context={longest - 1} is longer than the recorded rows of {rows.shape[1]} tokens: "
            f"use at most {rows.shape[1] - 1}, or a larger generated.length"
        )
    held_out = len(rows) // HELD_OUT_EVERY
    if held_out == 0:
        raise ConfigError(
            f"{len(rows)} rows of text are too few to hold one in {HELD_OUT_EVERY} out: use a "
            "larger generated.tokens"
        )
    training, measured = rows[:-held_out], rows[-held_out:]
    beginning = rows.shape[1] - (recipe.generated.length - 1)
    tokens, vocab_map = draft_tokens(training[:, beginning:], config)
    frozen = frozen_of(jnp.asarray(vocab_map), target, jnp.asarray(tokens))
    modules = modules_of(target, len(tokens))
    loss = HeadLoss(*modules, recipe.steps, recipe.decay, beginning=beginning)
    # The rows of the target are an argument of the loss, so that the head trains none of its own.
    module = models.build(dataclasses.replace(config, own_unembedding=True))
    params = _without_frozen(models.init_params(module, recipe.cross_entropy.seed))
    record = recipe.model_dump_json() + "\n"
    (work / "head").mkdir(parents=True, exist_ok=True)
    export.claim(work / "head" / "settings.txt", record)
    stream = training.reshape(-1, rows.shape[2])
    stages = [("cross_entropy", recipe.cross_entropy), ("overlap", recipe.overlap)]
    for kind, schedule in stages:
        if schedule is not None:
            params = trainer.train(
                module,
                stream,
                schedule,
                work / "head" / kind,
                loss=dataclasses.replace(loss, kind=kind),
                initial=params,
                frozen=frozen,
                row=rows.shape[1],
                label=kind.replace("_", " "),
            )
    metrics = measure(loss, module, params, measured, frozen)
    save(out, config, params, frozen, metrics, recipe)
    return metrics


def _phases(recipe: EagleRecipe) -> list[trainer.Phase]:
    schedules = [recipe.cross_entropy, recipe.overlap]
    return [phase for schedule in schedules if schedule for phase in schedule.phases]


def head_config(
    shape: HeadShape | Literal["mtp"], target: models.DecoderConfig
) -> models.EagleConfig:
    """Returns the config of a head of a target.

    Raises:
      ConfigError: the sizes do not fit each other or the target.
    """
    if isinstance(shape, str):
        return _mtp_config(target)
    shapes = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    fields = {name: getattr(target, name) for name in (*shapes, "max_positions", "norm_eps")}
    given = {name: x for name, x in shape.model_dump().items() if x is not None}
    # Of a mixture, the width of the experts that a token uses.
    experts = target.experts_per_token if target.num_experts is not None else 1
    layer = dict(
        intermediate_size=target.intermediate_size * experts,
        num_layers=1,
        positions=target.rope or models.Rope(),
        family="llama",
        tie_embeddings=False,
        target_hidden_size=target.hidden_size,
    )
    try:
        config = models.EagleConfig(**fields | layer | given)
        layers = config.layers_of(target.num_layers)
        config = dataclasses.replace(config, layer_inputs=layers)
        if min(layers) < 0 or max(layers) > target.num_layers:
            raise ValueError(
                f"it reads inputs of the layers {layers}, and the target has {target.num_layers}: "
                "set layer_inputs"
            )
        write_config(config.layer)
        return config
    except ValueError as error:
        raise ConfigError(f"the head does not fit the target: {error}") from error


def _mtp_config(target: models.DecoderConfig) -> models.MtpConfig:
    if target.attention_softcap is not None or target.attention_sinks:
        raise ConfigError(
            "attention with a softcap or sinks is not trained: train an EAGLE-3 head for this "
            "target, whose attention has neither"
        )
    try:
        return models.MtpConfig.of_target(target, layer_inputs=(target.num_layers,))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def draft_tokens(rows: np.ndarray, config: models.EagleConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the most frequent tokens of the text, rising, and the draft token of each token."""
    size = config.output_rows
    counts = np.bincount(recording.tokens_of(rows).ravel(), minlength=config.vocab_size)
    tokens = np.sort(np.argsort(-counts, kind="stable")[:size])
    vocab_map = np.full(config.vocab_size, size, np.int32)
    vocab_map[tokens] = np.arange(size)
    return tokens, vocab_map


def _without_frozen(params: Any) -> Any:
    inner = params["params"]
    return {"params": {k: v for k, v in inner.items() if k not in OF_TARGET}}


def measure(
    loss: HeadLoss, module: Any, params: Any, rows: np.ndarray, frozen: Any
) -> dict[str, list[float]]:
    """Returns means over held-out rows, by depth (`HeadLoss.measured`)."""
    batches = [
        jax.device_get(loss.measured(module, params, row[None], frozen))
        for row in rows[:MEASURED_ROWS]
    ]
    return {name: np.mean([batch[name] for batch in batches], 0).tolist() for name in batches[0]}


def save(
    path: pathlib.Path,
    config: models.EagleConfig,
    params: Any,
    frozen: Any,
    metrics: dict[str, list[float]],
    recipe: EagleRecipe,
) -> None:
    """Writes the head in its layout of checkpoints, rounded to bfloat16, with a card.

    The layout of EAGLE-3 heads is SpecForge's.
    """
    if isinstance(recipe.head, str):
        config = dataclasses.replace(config, layer_inputs=None)
        names, title = ["target_norm"], "A head for multi-token prediction"
    else:
        # The text of `eagle_check` can be unlike the documents of a model that does not chat.
        is_chat = getattr(Source(recipe.target).tokenizer, "chat_template", None)
        config = dataclasses.replace(
            config,
            layer_inputs=recipe.head.layer_inputs,  # trainers number default layers differently
            acceptance=round(metrics["same token"][0], 4) if is_chat else None,
        )
        names = ["vocab_map"] + ["unembedding"] * config.own_unembedding
        title = "An EAGLE-3 head"
    inner = export.rounded(params["params"] | {name: frozen[name] for name in names})
    module = models.build(config, jnp.bfloat16)
    models.save_checkpoint(path, module, {"params": inner}, overwrite=True)
    size = sum(x.size for x in jax.tree.leaves(params))
    table = markdown_table(
        ("depth", *metrics),
        [
            (depth + 1, *(f"{values[depth]:.3f}" for values in metrics.values()))
            for depth in range(recipe.steps)
        ],
    )
    card = f"""# {path.name}

{title} of {size / 1e6:.2f} M parameters for {recipe.target}, trained on texts
that it wrote ({recipe.generated.tokens:,} tokens, temperature {recipe.generated.temperature}). It
proposes the {config.output_rows:,} most frequent tokens, with the target's output matrix.

On held-out texts: at what share of positions both choose the same token, and the mean
overlap of their distributions, by depth of the draft. The head reads the text itself, so a depth
counts whether or not the earlier tokens of a draft would have been right. Acceptance in use
differs:

{table}

    {json.dumps(recipe.model_dump(mode="json"))}
"""
    (path / "README.md").write_text(card)
    print(card)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.training.eagle")
    parser.add_argument("recipe", type=pathlib.Path, help="a YAML file (experiments/recipes)")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder of the stages")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory of the head")
    arguments = parser.parse_args(argv)
    try:
        train(read(arguments.recipe), arguments.work, arguments.out)
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
