"""A draft vocabulary: embeddings of the most frequent tokens only, and one for all others.

Most of a small model's parameters are embeddings, and most of the tokens are rare: FR-Spec, arXiv
2502.14856. The draft model is trained on the indices of its embeddings, as an ordinary model
with that vocabulary, and reads and predicts the target's tokens once it has the map.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

import models


def make_map(tokens: Int[np.ndarray, "T"], vocab_size: int, size: int) -> Int[np.ndarray, "V"]:
    """Returns the embedding of each token: of its own for the `size` - 1 most frequent ones.

    All other tokens share the last embedding, size - 1.
    """
    counts = np.bincount(tokens, minlength=vocab_size)
    frequent = np.argsort(-counts, kind="stable")[: size - 1]
    vocab_map = np.full(vocab_size, size - 1, np.int32)
    vocab_map[frequent] = np.arange(len(frequent))
    return vocab_map


def with_map(
    module: nn.Module, params: Any, vocab_map: Int[np.ndarray, "V"]
) -> tuple[nn.Module, Any]:
    """Returns a trained model with the map, so that it reads and predicts the target's tokens."""
    sizes = {"vocab_size": len(vocab_map), "draft_vocab_size": module.config.vocab_size}
    config = dataclasses.replace(module.config, **sizes)
    inner = params["params"] | {"vocab_map": jnp.asarray(vocab_map)}
    return models.build(config, module.dtype), {"params": inner}


def expanded(module: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """Returns the model with an embedding for every token, which other libraries can run.

    Tokens without their own embedding have the logit 0, below that of a likely token.
    """
    inner = dict(params["params"])
    vocab_map = inner.pop("vocab_map")
    output = inner["embedding" if module.config.tie_embeddings else "unembedding"][vocab_map]
    is_other = vocab_map == module.config.draft_vocab_size - 1
    inner["unembedding"] = jnp.where(is_other[:, None], 0, output)
    inner["embedding"] = inner["embedding"][vocab_map]
    config = dataclasses.replace(module.config, draft_vocab_size=None, tie_embeddings=False)
    return models.build(config, module.dtype), {"params": inner}
