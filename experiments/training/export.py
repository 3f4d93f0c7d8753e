"""Writes trained models in Hugging Face format, with tokenizer and model card."""

import pathlib
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

import models
from experiments.prompts import corpus
from experiments.schema.fields import ConfigError
from experiments.training import trainer
from magicjax.benchmarks.tables import markdown_table
from magicjax.files import write_atomically

CONTEXTS = (1024, 2048, 8192)  # contexts of the losses in the model cards
EVALUATED_TOKENS = 65536


def rounded(params):
    """Returns the parameters in bfloat16, the stored dtype."""
    return models.cast_params(params, jnp.bfloat16)


def as_stored(params):
    """Returns the parameters in float32 after rounding to the stored dtype."""
    return models.cast_params(rounded(params), jnp.float32)


def card(
    name: str,
    module: nn.Module,
    losses: dict[int, float],
    text: corpus.TokenizedCorpus,
    command: str,
    note: str,
) -> str:
    """Returns a model card in Markdown: description, command, losses by context, and `note`.

    A model with a draft vocabulary has no losses: on tokens that it never predicts, they would be
    infinite.
    """
    count = models.count_params(module.config)
    rows = [
        (context, f"{nats:.3f}", f"{nats / np.log(2) / text.bytes_per_token:.3f}")
        for context, nats in losses.items()
    ]
    table = f"""
Held-out loss after rounding to bfloat16, in windows of the given context:

{markdown_table(("context", "nats per token", "bits per byte"), rows)}
"""
    return f"""# magicjax zoo: {name}

A {count / 1e6:.2f} M parameter model, trained on {text.source},
for demonstrations and tests of speculative decoding.

    {command}

Data: SHA-256 `{text.digest}`;
{len(text.train):,} training tokens, {len(text.held_out):,} held out ({text.selection}).
{table if losses else ""}
{note and chr(10) + note}"""


def export(
    path: pathlib.Path,
    module: nn.Module,
    params,
    tokenizer: Any,
    text: corpus.TokenizedCorpus,
    *,
    command: str,
    note: str = "",
) -> None:
    """Writes one model, rounded to bfloat16, with tokenizer and card.

    Args:
      path: the directory, named like the model.
      module, params: the model.
      tokenizer: a transformers tokenizer with an end token.
      text: training and evaluation text.
      command, note: see `card`.
    """
    widened = as_stored(params)
    every_token = getattr(module.config, "draft_vocab_size", None) is None
    losses = {
        context: trainer.evaluate(module, widened, text.held_out, context, EVALUATED_TOKENS)
        for context in CONTEXTS
        if every_token and context <= module.config.max_positions
    }
    models.save_checkpoint(
        path,
        models.build(module.config, jnp.bfloat16),
        rounded(params),
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        overwrite=True,
    )
    text_card = card(path.name, module, losses, text, command, note)
    write_atomically(path / "README.md", text_card)
    print(text_card)


def claim(path: pathlib.Path, record: str) -> None:
    """Records in a work folder what its stages belong to.

    Raises:
      ConfigError: the file exists and has another record.
    """
    if not path.exists():
        write_atomically(path, record)
    if path.read_text() != record:
        raise ConfigError(
            f"{path.parent} holds stages of other settings, models or text: use an empty folder, "
            "or remove it"
        )
