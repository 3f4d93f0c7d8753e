"""Lower bounds of the bytes that a decoding step reads."""

from typing import Any

import jax


def weight_bytes(model: Any) -> int:
    """Returns the bytes of weights that one decoding step must read.

    It excludes tables of which a step reads a few rows: positions, and an embedding that is not
    tied to the output matrix. Offloaded weights are included.
    """
    tables = {"position_embedding"} | (set() if model.config.tie_embeddings else {"embedding"})
    return sum(
        leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path((model.params, model.layout))
        if getattr(path[-1], "key", "") not in tables
    )


def kv_bytes_per_token(model: Any) -> int:
    """Returns the bytes of keys and values per token."""
    c = model.config
    itemsize = jax.tree.leaves(model.params)[0].dtype.itemsize
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize


def step_bytes(model: Any, batch: int, context: int, new_tokens: int) -> float:
    """Returns the bytes that an average step of plain decoding reads: weights and live KV cache."""
    live = batch * (context + (new_tokens - 1) / 2)
    return weight_bytes(model) + live * kv_bytes_per_token(model)
