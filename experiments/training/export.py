"""Writes trained models for others to load: Hugging Face format, with tokenizer and a card."""

import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import models
from experiments.prompts import corpus
from experiments.schema import store
from experiments.training import trainer

CONTEXTS = (1024, 2048, 8192)  # of the losses in the cards
EVALUATED_TOKENS = 65536


def rounded(params):
    """Returns the parameters in bfloat16, as they are stored."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def widened(params):
    """Returns the parameters in float32, whatever they were rounded to."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def card(
    name: str,
    module: nn.Module,
    losses: dict[int, float],
    text: corpus.Text,
    command: str,
    note: str,
) -> str:
    """Returns a model card in Markdown: what it is, the command that makes it, losses by context.

    `note` comes last, in Markdown.
    """
    count = models.count_params(module.config)
    rows = "\n".join(
        f"| {context} | {nats:.3f} | {nats / np.log(2) / text.bytes_per_token:.3f} |"
        for context, nats in losses.items()
    )
    return f"""# magicjax zoo: {name}

A {count / 1e6:.2f} M parameter model, trained on {text.source},
for demonstrations and tests of speculative decoding. It writes Python-like text and knows nothing.

    {command}

Data: SHA-256 `{text.digest}` over paths and texts;
{len(text.train):,} tokens trained on, {len(text.held_out):,} held out (whole modules, chosen by a
hash of their path).

Held-out loss after rounding to bfloat16, in windows of the given context:

| context | nats a token | bits a byte |
|---|---|---|
{rows}
{note and chr(10) + note}"""


def export(
    path: pathlib.Path,
    module: nn.Module,
    params,
    tokenizer: Any,
    text: corpus.Text,
    *,
    command: str,
    note: str = "",
) -> None:
    """Writes one model, rounded to bfloat16, with tokenizer and card.

    Args:
      path: the directory; its name is the model's.
      module, params: the model.
      tokenizer: a transformers tokenizer with an end token.
      text: what it was trained and is evaluated on.
      command, note: see `card`.
    """
    stored = rounded(params)
    losses = {
        context: trainer.evaluate(module, widened(stored), text.held_out, context, EVALUATED_TOKENS)
        for context in CONTEXTS
        if context <= module.config.max_positions
    }
    models.save_checkpoint(
        path,
        models.build(module.config, jnp.bfloat16),
        stored,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        overwrite=True,
    )
    written = card(path.name, module, losses, text, command, note)
    store.write_text(path / "README.md", written)
    print(written)
