"""Numbers that a speed-up must be read with.

Does the text loop, do the models agree, how near is plain decoding to the memory's bandwidth?
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int


def repeated_ngrams(tokens: Int[np.ndarray, "B M"], n: int = 8) -> float:
    """Returns the share of n-grams that occurred before in the same row.

    A text that loops flatters every draft. Of `a b a b a b` the 2-grams are ab, ba, ab, ba, ab:
    three of five occurred before.

    Raises:
      ValueError: the rows are shorter than n.
    """
    if tokens.shape[1] < n:
        raise ValueError(f"{tokens.shape[1]} new tokens hold no {n}-gram: generate at least {n}")
    repeated = total = 0
    for row in tokens.tolist():
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total


def agreement(wanted: Int[np.ndarray, "B T"], drafted: Int[np.ndarray, "B T"]) -> float:
    """Returns the share of positions at which the draft's best token is the target's.

    Both are teacher-forced on real text (`teacher.greedy_tokens`). Only the second half counts:
    near the start even a small cache holds everything.
    """
    half = wanted.shape[1] // 2
    return float((np.asarray(wanted)[:, half:] == np.asarray(drafted)[:, half:]).mean())


def weight_bytes(model: Any) -> int:
    """Returns the bytes of weights that one decoding step must read.

    Tables of which a step reads only a few rows are left out: positions, and an embedding that is
    not the output matrix too.
    """
    looked_up = {"position_embedding"} | (set() if model.config.tie_embeddings else {"embedding"})
    return sum(
        leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
        if path[-1].key not in looked_up
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
