"""The one bridge between models and caches: `attend` closures over a committed prefix."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from magicjax.cache import KVCache
from magicjax.draft_cache import DraftCache
from models import Attend
from pallas_kernels import tree_attention


def attend_to(
    cache: KVCache | DraftCache,
    mask: Bool[Array, "T T"],
    backend: str | None,
    watched: bool = False,
) -> Attend:
    """Returns an `attend` for tokens that see their row's prefix and each other under `mask`.

    It keeps for each layer ((k, v), None), the new keys and values [B,T,K,D], and commits nothing.
    Watched, it also keeps the queries and the log-sum-exp of their scores: ((k, v), (q, lse)).
    """

    def attend(layer, q, k, v):
        prefix = cache.k[layer], cache.v[layer], cache.live(layer)
        out, lse = tree_attention(q, *prefix, k, v, mask, return_lse=True, backend=backend)
        return out, ((k, v), (q, lse) if watched else None)

    return attend


def attend_level(
    cache: KVCache | DraftCache,
    drafted: tuple[tuple[Array, Array], ...],
    nodes: Array,
    mask: Bool[Array, "T N"],
    backend: str | None,
) -> Attend:
    """Returns an `attend` for one level of a tree that is being drafted.

    Args:
      cache: the committed prefix.
      drafted: for each layer k, v [B,N,K,D] of all nodes; those of later levels are not seen.
      nodes: int32 [T], which nodes these tokens are; N and beyond stand for padding.
      mask: which nodes each of them sees, itself included.
      backend: of the attention.

    It keeps `drafted` with the level's own entries in place.
    """

    def attend(layer, q, k, v):
        k_all, v_all = drafted[layer]
        k_all = k_all.at[:, nodes].set(k.astype(k_all.dtype), mode="drop")
        v_all = v_all.at[:, nodes].set(v.astype(v_all.dtype), mode="drop")
        prefix = cache.k[layer], cache.v[layer], cache.live(layer)
        out = tree_attention(q, *prefix, k_all, v_all, mask, backend=backend)
        return out, (k_all, v_all)

    return attend


def empty_nodes(
    cache: KVCache | DraftCache, nodes: int, dtype: Any
) -> tuple[tuple[Array, Array], ...]:
    """Returns room for the keys and values of `nodes` drafted tokens, zeros, for each layer."""

    def room(old):
        batch, heads, _, size = old.shape
        return jnp.zeros((batch, nodes, heads, size), dtype)

    return tuple((room(k), room(v)) for k, v in zip(cache.k, cache.v))
