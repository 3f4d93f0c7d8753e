"""What a decoding step must read at the least: the floor that its time is held against."""

from typing import Any

import jax


def weight_bytes(model: Any) -> int:
    """Returns the bytes of weights that one decoding step must read.

    Tables of which a step reads only a few rows are left out: positions, and an embedding that is
    not the output matrix too. Weights that it must fetch from the host count like others.
    """
    looked_up = {"position_embedding"} | (set() if model.config.tie_embeddings else {"embedding"})
    return sum(
        leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path((model.params, model.blocks))
        if getattr(path[-1], "key", "") not in looked_up
    )


def kv_bytes_per_token(model: Any) -> int:
    """Returns the bytes of keys and values that one token of one row adds to the cache."""
    c = model.config
    item = jax.tree.leaves(model.params)[0].dtype.itemsize
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * item


def step_bytes(model: Any, batch: int, context: int, new_tokens: int) -> float:
    """Returns the bytes that an average step of plain decoding must read: weights and live KV."""
    live = batch * (context + (new_tokens - 1) / 2)
    return weight_bytes(model) + live * kv_bytes_per_token(model)
