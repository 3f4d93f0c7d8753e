"""The output matrix of a draft model, cut to a part of its vocabulary.

The output matrix is a large part of what a small model reads for a token. Tokenizers number their
tokens in the order of their merges, the most frequent first, so the first ones are most of a text.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from models.build import build
from models.decoder_config import DecoderConfig
from models.eagle import EagleConfig
from models.quantized import MatrixFormats
from pallas_kernels.cpu.packed import OUTPUTS, take_blocks


def with_draft_vocab(
    module: nn.Module, params: Any, size: int, eos_token_ids: Sequence[int]
) -> tuple[nn.Module, Any]:
    """Returns a model that proposes some tokens only, and reads all of them.

    Args:
      module: without a draft vocabulary.
      params: the module's parameters, or None.
      size: rows of the output matrix, a multiple of 16: the first tokens, and the blocks of 16 that
        contain `eos_token_ids`. The last row becomes that of all other tokens.
      eos_token_ids: tokens that end a text.

    Raises ValueError for an invalid size, a model with a draft vocabulary, and a learned head.

    Source: FR-Spec (arXiv 2502.14856), which counts tokens of a text.
    """
    c = module.config
    if isinstance(c, EagleConfig) or c.draft_vocab_size is not None:
        raise ValueError(
            f"draft_vocab={size}: the model is a learned head, or has a draft vocabulary of its "
            "own; omit draft_vocab"
        )
    blocks = _blocks(c, size, eos_token_ids)
    tokens = (blocks[:, None] * OUTPUTS + np.arange(OUTPUTS)).reshape(-1)
    tokens = tokens[tokens < c.vocab_size]  # of matrices that are not packed
    others = np.setdiff1d(np.arange(c.vocab_size), tokens)
    tokens = np.concatenate([tokens, others[: size - len(tokens)]])
    config = dataclasses.replace(c, draft_vocab_size=size, embeds_all=True, tie_embeddings=False)
    weights, source = module.weights, "embedding" if c.tie_embeddings else "unembedding"
    weight_format = weights.of(source)
    if weight_format is not None and c.tie_embeddings:
        weights = MatrixFormats((*weights.texts, ("unembedding", str(weight_format))))
    draft_module = build(config, module.dtype, weights).clone(backend=module.backend)
    if params is None:
        return draft_module, None
    model_params = params["params"]
    rows = model_params[source]
    output_rows = (
        take_blocks(rows, blocks) if weight_format is not None else jnp.take(rows, tokens, axis=0)
    )
    added = {"unembedding": output_rows, "vocab_map": jnp.asarray(_vocab_map(c.vocab_size, tokens))}
    return draft_module, {**params, "params": {**model_params, **added}}


def _blocks(c: DecoderConfig, size: int, eos_token_ids: Sequence[int]) -> Int[np.ndarray, "B"]:
    """Returns the blocks of tokens that stay, those of `eos_token_ids` first."""
    others = sorted({token // OUTPUTS for token in eos_token_ids if 0 <= token < c.vocab_size})
    count = size // OUTPUTS - len(others)
    if size % OUTPUTS or count < 1 or size >= c.vocab_size:
        least = (len(others) + 1) * OUTPUTS
        raise ValueError(
            f"draft_vocab={size}: use a multiple of {OUTPUTS}, at least {least} and below the "
            f"model's {c.vocab_size} tokens"
        )
    first = np.setdiff1d(np.arange(count + len(others)), others)[:count]
    return np.array([*others, *first])


def _vocab_map(vocab_size: int, tokens: Int[np.ndarray, "R"]) -> Int[np.ndarray, "V"]:
    """Returns the row of each token, the last one for tokens without a row."""
    index_of = np.full(vocab_size, len(tokens) - 1, np.int32)
    index_of[tokens[:-1]] = np.arange(len(tokens) - 1)
    return index_of
