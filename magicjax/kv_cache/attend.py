"""The one bridge between models and caches: what attends to a committed prefix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache
from pallas_kernels import tree_attention


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of a batch, of whose caches they are read where they lie.

    Attributes:
      first: None: the batch is whole.
      count: how many.
    """

    first: Int[Array, ""] | None = None
    count: int = 0

    def of(self, x: Array) -> Array:
        """Returns these rows of an array [B, ...]."""
        if self.first is None:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.count)


@dataclasses.dataclass(frozen=True, eq=False)
class AttendTo:
    """An `attend` for tokens that see their row's prefix and each other under a mask.

    It keeps for each layer ((k, v), None), the new keys and values [B,T,K,D], and commits nothing.

    Attributes:
      cache: the committed prefix.
      mask: bool [T, T] or [B, T, T].
      backend: of the attention.
      watched: whether it also keeps the queries and the log-sum-exp of their scores:
        ((k, v), (q, lse)).
      own: whose tokens they are.
    """

    cache: KVCache | DraftCache
    mask: Bool[Array, "*B T T"]
    backend: str | None
    watched: bool = False
    own: _Rows = _Rows()

    def rows(self, first: Int[Array, ""], count: int) -> "AttendTo":
        """Returns the same for some rows of the batch."""
        return dataclasses.replace(self, own=_Rows(first, count))

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        prefix, mask = _prefix(self.cache, layer, self.own), _mask(self.mask, self.own)
        out, lse = tree_attention(
            q,
            *prefix,
            k,
            v,
            mask,
            first_row=self.own.first,
            return_lse=True,
            backend=self.backend,
        )
        return out, ((k, v), (q, lse) if self.watched else None)


@dataclasses.dataclass(frozen=True, eq=False)
class AttendLevel:
    """An `attend` for one level of a tree that is being drafted.

    It keeps `drafted` with the level's own entries in place.

    Attributes:
      cache: the committed prefix.
      drafted: for each layer k, v [B,N,K,D] of all nodes; those of later levels are not seen.
      nodes: int32 [T], which nodes these tokens are; N and beyond stand for padding.
      mask: bool [T, N] or [B, T, N], which nodes each of them sees, itself included.
      backend: of the attention.
      own: whose tokens they are.
    """

    cache: KVCache | DraftCache
    drafted: tuple[tuple[Array, Array], ...]
    nodes: Int[Array, "T"]
    mask: Bool[Array, "*B T N"]
    backend: str | None
    own: _Rows = _Rows()

    def rows(self, first: Int[Array, ""], count: int) -> "AttendLevel":
        """Returns the same for some rows of the batch."""
        return dataclasses.replace(self, own=_Rows(first, count))

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        k_all, v_all = map(self.own.of, self.drafted[layer])
        k_all = k_all.at[:, self.nodes].set(k.astype(k_all.dtype), mode="drop")
        v_all = v_all.at[:, self.nodes].set(v.astype(v_all.dtype), mode="drop")
        prefix, mask = _prefix(self.cache, layer, self.own), _mask(self.mask, self.own)
        out: Any = tree_attention(
            q, *prefix, k_all, v_all, mask, first_row=self.own.first, backend=self.backend
        )
        return out, (k_all, v_all)


def _prefix(cache: KVCache | DraftCache, layer: int, own: _Rows) -> tuple[Any, Any, Array]:
    """Returns keys and values of all rows, and how many slots of one's own are live."""
    return cache.k[layer], cache.v[layer], own.of(cache.live(layer))


def _mask(mask: Bool[Array, "*B T N"], own: _Rows) -> Array:
    return own.of(mask) if mask.ndim == 3 else mask


def empty_nodes(
    cache: KVCache | DraftCache, nodes: int, dtype: Any
) -> tuple[tuple[Array, Array], ...]:
    """Returns room for the keys and values of `nodes` drafted tokens, zeros, for each layer."""

    def room(old):
        batch, heads, _, size = old.shape
        return jnp.zeros((batch, nodes, heads, size), dtype)

    return tuple((room(k), room(v)) for k, v in zip(cache.k, cache.v))
