"""The one bridge between models and caches: `attend` closures over a committed prefix."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from magicjax.cache import DraftCache, KVCache
from models import Attend
from pallas_kernels import tree_attention


def attend_to(cache: KVCache | DraftCache, mask: Bool[Array, "T T"], backend: str | None) -> Attend:
    """Returns an `attend` for tokens that see their row's prefix and each other under `mask`.

    It keeps the new keys and values, (k, v) [B,T,K,D] for each layer, and commits nothing.
    """

    def attend(layer, q, k, v):
        out = tree_attention(
            q, cache.k[layer], cache.v[layer], cache.lengths, k, v, mask, backend=backend
        )
        return out, (k, v)

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
        out = tree_attention(
            q, cache.k[layer], cache.v[layer], cache.lengths, k_all, v_all, mask, backend=backend
        )
        return out, (k_all, v_all)

    return attend


def empty_nodes(cache: KVCache | DraftCache, nodes: int) -> tuple[tuple[Array, Array], ...]:
    """Returns room for the keys and values of `nodes` drafted tokens, zeros, for each layer."""

    def room(old):
        batch, heads, _, size = old.shape
        return jnp.zeros((batch, nodes, heads, size), old.dtype)

    return tuple((room(k), room(v)) for k, v in zip(cache.k, cache.v))
