"""Pages of the target's cache that a draft reads, chosen by the draft's own queries.

Layers with a sliding window are read as they are: they have no pages (P = 0) and choose none. So
are layers without slots, which have None in place of bounds and pages.

Page i is the slots i * page_size to (i + 1) * page_size - 1. A draft reads M pages for each layer,
row and KV head: the first one, the newest ones, and those between that may hold the keys with the
highest scores. The elementwise bounds of a page's keys bound the score of each of its keys, so that
choosing reads two vectors of a page instead of all keys. Source: Quest (arXiv 2406.10774).

With M = 4, of which one is the newest, a row of 20 tokens and pages of 4 slots reads
    page    0   1 2 3   4
    read    x   two     x
A row of at most M pages reads all of them. Pages are gathered for the attention of one layer at a
time: a temporary array of the budget's size, and no copy of the cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.kv_cache.full_cache import KVCache, Slots, elements, select
from sharding import KV_HEADS, LAYER_BATCH, Split, collectives, logical_axes

# Of each layer; None of a layer without slots. C and P are 0 in a layer with a sliding window.
Pages = tuple[Int[Array, "B K C"] | None, ...]  # indices of chosen pages
Bounds = tuple[Float[Array, "B K P D"] | None, ...]  # the lowest or highest elements of pages


@struct.dataclass
class PageBounds:
    """The smallest and the largest element of the keys in each page of a cache.

    Attributes:
      low, high: one array per layer, in the model's dtype; inf and -inf in pages without tokens.
      split: static; the model's division over devices.
    """

    low: Bounds = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    high: Bounds = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    split: Split = struct.field(pytree_node=False, default=Split())


def bounds_of(cache: KVCache, page_size: int, dtype: Any) -> PageBounds:
    """Returns the bounds of all pages of a cache, whose slots must be a multiple of `page_size`.

    `dtype` is the model's.
    """
    bounds = [
        (None, None)
        if k is None
        else _bounds_of(elements(k, dtype), cache.lengths, page_size, bool(window))
        for k, window in zip(cache.k, cache.windows, strict=True)
    ]
    low, high = zip(*bounds, strict=True)
    return PageBounds(low, high, cache.split)


@functools.partial(jax.jit, static_argnums=(2, 3))  # traced once for all layers
def _bounds_of(
    keys: Float[Array, "B K S D"], lengths: Int[Array, "B"], page_size: int, is_ring: bool
) -> tuple[Array, Array]:
    """Returns the bounds of a layer's pages; a ring has none."""
    batch, heads, slots, size = keys.shape
    if is_ring:
        return keys[:, :, :0], keys[:, :, :0]
    live = (jnp.arange(slots) < lengths[:, None])[:, None, :, None]

    def pages(hidden):
        shown = jnp.where(live, keys, jnp.array(hidden, keys.dtype))
        return shown.reshape(batch, heads, slots // page_size, page_size, size)

    return pages(jnp.inf).min(3), pages(-jnp.inf).max(3)


def update_bounds(
    bounds: PageBounds, kv: tuple, path: Int[Array, "B A"], count: Int[Array, "B"], cache: KVCache
) -> PageBounds:
    """Returns the bounds with the keys of the first `count` nodes of each path.

    Args:
      bounds: before the round.
      kv: per layer the pair k, v [B, N, K, D] of the nodes, or the `StateNodes`.
      path: the committed nodes first.
      count: int32 [B], the number of committed nodes.
      cache: after the round.
    """
    # All layers with pages have the same number of pages and slots.
    layers = zip(bounds.low, cache.k, strict=True)
    num_pages, slots = next((low.shape[2], k.shape[2]) for low, k in layers if _has_pages(low))
    page_size = slots // num_pages
    steps = jnp.arange(path.shape[1])
    position = (cache.lengths - count)[:, None] + steps
    page = jnp.where(steps < count[:, None], position // page_size, num_pages)  # dropped
    updated = [
        _update_bounds(low, high, new[0], path, page) if _has_pages(low) else (low, high)
        for low, high, new in zip(bounds.low, bounds.high, kv, strict=True)
    ]
    low, high = zip(*updated, strict=True)
    return dataclasses.replace(bounds, low=low, high=high)


def _has_pages(low: Float[Array, "B K P D"] | None) -> TypeGuard[Array]:
    """Returns whether a layer has pages, given its bounds: it has slots, and no sliding window."""
    return low is not None and low.shape[2] > 0


@jax.jit  # traced once for all layers
def _update_bounds(
    low: Float[Array, "B K P D"],
    high: Float[Array, "B K P D"],
    nodes: Float[Array, "B N K D"],
    path: Int[Array, "B A"],
    page: Int[Array, "B A"],
) -> tuple[Array, Array]:
    """Returns the bounds of a layer's pages with the nodes' keys, each in its `page`."""
    keys = jnp.take_along_axis(nodes, path[:, :, None, None], axis=1)  # [B, A, K, D]
    where = jnp.arange(path.shape[0])[:, None], slice(None), page
    return low.at[where].min(keys, mode="drop"), high.at[where].max(keys, mode="drop")


def in_order(cache: KVCache, count: int) -> Pages:
    """Returns pages 1, 2, … `count` for every row and KV head of layers that have pages."""
    pages = 1 + jnp.arange(count, dtype=jnp.int32)

    def of_layer(k, window):
        if k is None:
            return None
        chosen = pages if window is None else pages[:0]
        return jnp.broadcast_to(chosen, (*k.shape[:2], len(chosen)))

    return tuple(of_layer(k, w) for k, w in zip(cache.k, cache.windows, strict=True))


@struct.dataclass
class PagedCache(KVCache):
    """The target's cache as a draft reads it: the first page, C chosen ones, the newest ones.

    It has the arrays of that cache, and is only read (TypeError): a commit updates the cache, and
    `update_bounds` the bounds.

    Attributes:
      bounds: bounds of the keys of all its pages.
      chosen_pages: the pages between, as last chosen.
      due: bool [B], the rows that choose in this round; None: all.
      newest: static; how many pages of the newest tokens are read.
      page_size: static.
    """

    bounds: PageBounds = struct.field(kw_only=True)
    chosen_pages: Pages = struct.field(kw_only=True)
    due: Bool[Array, "B"] | None = struct.field(kw_only=True)
    newest: int = struct.field(pytree_node=False, kw_only=True)
    page_size: int = struct.field(pytree_node=False, kw_only=True)

    @property
    def layer_pages(self) -> Int[Array, "B K C"]:
        """The chosen pages of the only layer, which has slots."""
        (layer_pages,) = self.chosen_pages
        assert layer_pages is not None
        return layer_pages

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Returns the cache with these layers only, whose arrays it shares."""
        low, high = select(self.bounds.low, layers), select(self.bounds.high, layers)
        bounds = dataclasses.replace(self.bounds, low=low, high=high)
        pages = select(self.chosen_pages, layers)
        return dataclasses.replace(super().of_layers(layers), bounds=bounds, chosen_pages=pages)

    def choose(
        self, query: Float[Array, "B H D"], old: Int[Array, "B K C"], take: Callable
    ) -> Int[Array, "B K C"]:
        """Returns the pages that a round reads besides the first and the newest, in order.

        The cache has one layer.

        The score of a page is the upper bound of its keys' scores, averaged over the G query heads
        of a KV head: with the maximum instead, the head with the longest queries would choose.
        Rows that are not due, and rows whose pages are all read, keep `old`.

        Args:
          query: the root's query, for some rows of the batch.
          old: the pages that these rows chose before.
          take: returns these rows of an array of all rows.
        """
        (low,), (high,) = self.bounds.low, self.bounds.high
        assert low is not None and high is not None
        count, num_pages = old.shape[2], low.shape[2]
        if num_pages <= 1 + count + self.newest:  # every row fits
            return old

        def choose(due: Array) -> Array:
            score = upper_bounds(query, take(low), take(high)).mean(2)
            score = collectives.psum(score, self.split.replica_axes)
            last = self._last_page(take)[:, None, None]
            page = jnp.arange(num_pages)
            between = (page > 0) & (page <= last - self.newest)
            best = jax.lax.top_k(jnp.where(between, score, -jnp.inf), count)[1]
            fits = last <= count + self.newest
            return jnp.where(due & ~fits, jnp.sort(best).astype(jnp.int32), old)

        if self.due is None:
            return choose(jnp.array(True))
        due = take(self.due)
        return jax.lax.cond(due.any(), choose, lambda _: old, due[:, None, None])

    def gather(
        self,
        chosen: Int[Array, "B K C"],
        take: Callable,
        first_row: Int[Array, ""] | None,
    ) -> tuple[Slots, Slots, Int[Array, "B"]]:
        """Returns keys and values [B, K, M * page_size, D] of the pages, and each row's live slots.

        Only the last page can be partial, and it comes last, so the live slots are the first ones.
        The cache has one layer.

        Args:
          chosen: as `choose` returns them.
          take: returns these rows of an array of all rows.
          first_row: index of the first of these rows; None: all rows.
        """
        count = chosen.shape[2]
        last, page = self._last_page(take), jnp.arange(self.newest)
        # The newest pages, or those after the chosen ones while all fit.
        newest = jnp.maximum(last - self.newest, count)[:, None] + 1 + page
        newest = jnp.broadcast_to(newest[:, None], (*chosen.shape[:2], self.newest))
        pages = jnp.concatenate([jnp.zeros_like(chosen[..., :1]), chosen, newest], -1)
        skipped = jnp.maximum(last - count - self.newest, 0)  # pages that are not read
        live = take(self.lengths) - skipped * self.page_size

        rows = jnp.arange(chosen.shape[0]) + (0 if first_row is None else first_row)
        heads = jnp.arange(chosen.shape[1])

        def read(slots):
            parts = slots.reshape(*slots.shape[:2], -1, self.page_size, *slots.shape[3:])
            index = rows[:, None, None], heads[:, None], pages
            taken = parts.at[index].get(mode="clip")  # pages beyond the end have no live slots
            return taken.reshape(*pages.shape[:2], -1, *slots.shape[3:])

        return *jax.tree.map(read, (self.k[0], self.v[0])), live

    def _last_page(self, take: Callable) -> Int[Array, "B"]:
        """Returns the page of each row's newest token; 0 for a row without tokens."""
        return jnp.maximum(take(self.lengths) - 1, 0) // self.page_size


def upper_bounds(
    query: Float[Array, "B H D"], low: Float[Array, "B K P D"], high: Float[Array, "B K P D"]
) -> Float[Array, "B K G P"]:
    """Returns the sum over d of max(q_d * low_d, q_d * high_d), at least q times any key between.

    The larger product is that with `high` where q_d > 0 and that with `low` elsewhere, so that the
    sum is two matrix products. Undefined for pages without tokens.
    """
    batch, heads, _, size = low.shape
    query = query.reshape(batch, heads, -1, size).astype(low.dtype)

    def dot(q, bound):
        return jnp.einsum(
            "bkgd,bkpd->bkgp",
            q,
            bound,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
        )

    return dot(jnp.maximum(query, 0), high) + dot(jnp.minimum(query, 0), low)
