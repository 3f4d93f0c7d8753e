"""Attention to a committed prefix: the bridge between models and caches.

Models call `attend(layer)` for the attention of a layer. It is a pytree whose leaves are the arrays
of this layer and what all layers share, so that layers of equal shapes are traced once.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from magicjax.kv_cache import state_layers
from magicjax.kv_cache.full_cache import KVCache, rounded
from magicjax.kv_cache.pages import PagedCache
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.kv_cache.state_layers import LayerState, StateNodes
from models import LayerAttend
from models.gated_delta import DeltaNetInputs
from pallas_kernels import tree_attention

# For each layer, keys and values [B, N, K, D] of nodes; of a layer with a state, `StateNodes`.
KV = tuple[Any, ...]


@struct.dataclass
class _Rows:
    """The rows of a micro-batch; the batch's caches are read in place.

    Attributes:
      positions: int32 [B, T], of the tokens of all rows.
      first_row: None: all rows of the batch.
      num_rows: static; how many, from `first_row` on.
      cache: the committed prefix, of one layer in the attention of a layer.
      live: bool [B, T], tokens whose attention is not zeros; None: all. Rows without any read no
        prefix.
    """

    cache: Any
    positions: Int[Array, "B T"] = struct.field(kw_only=True)
    first_row: Int[Array, ""] | None = struct.field(default=None, kw_only=True)
    num_rows: int = struct.field(default=0, pytree_node=False, kw_only=True)
    live: Bool[Array, "B T"] | None = struct.field(default=None, kw_only=True)

    KEPT_BY_SHARED: ClassVar[Any] = None  # by a layer that reads the slots of another one

    def __call__(self, layer: int) -> LayerAttend:
        sources, states = self.cache.sources, self.cache.states
        if sources and sources[layer] is not None:
            return Partial(type(self)._attend_shared, self.of_layer(sources[layer]))
        has_state = bool(states) and states[layer] is not None
        run = type(self)._run_state if has_state else type(self)._attend_rounded
        return Partial(run, self.of_layer(layer))

    def of_layer(self, layer: int) -> Self:
        """Returns the same for one layer."""
        return dataclasses.replace(self, cache=self.cache.of_layers((layer,)))

    def _attend_rounded(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
        """Returns `_attend` with the keys and values that the cache stores later."""
        if not isinstance(self.cache, DraftCache):
            k, v = rounded(k, v, self.cache.k[0])
        return self._attend(q, k, v, **options)

    def _attend_shared(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
        """Returns the attention of a layer that reads the slots of this one, which keeps them."""
        out, _ = self._attend_rounded(q, k, v, **options)
        return out, self.KEPT_BY_SHARED

    def _attend(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
        """Returns the attention of the only layer, and what to keep."""
        raise NotImplementedError

    def _run_state(self, inputs: DeltaNetInputs) -> tuple[Array, Any]:
        """Returns the outputs of the only layer, which has a state, and what to keep."""
        if self.live is not None:  # as in `AttendTo._attend`
            inputs = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), inputs)
        state = jax.tree.map(self.slice, self.cache.states[0])
        out, nodes = self._advance(inputs, state, self.slice(self.positions))
        if self.live is not None:
            out = jnp.where(self.slice(self.live)[..., None, None], out, 0)
        return out, nodes

    def _advance(
        self, inputs: DeltaNetInputs, state: LayerState, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H Dv"], Any]:
        """Returns `_run_state`, given the state and the positions of these rows."""
        raise NotImplementedError

    def rows(self, first: Int[Array, ""], count: int) -> Self:
        """Returns the same for a range of rows."""
        return dataclasses.replace(self, first_row=first, num_rows=count)

    def slice(self, x: Array) -> Array:
        """Returns these rows of an array [B, ...]."""
        if self.first_row is None:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.first_row, self.num_rows)

    def slice_mask(self, mask: Bool[Array, "*B T N"]) -> Bool[Array, "*B T N"]:
        """Returns these rows of a mask, which all rows may share."""
        return self.slice(mask) if mask.ndim == 3 else mask


@struct.dataclass
class AttendTo(_Rows):
    """An `attend` for tokens that see their row's prefix, and each other under a mask.

    It keeps ((k, v), None) for each layer, the tokens' keys and values [B,T,K,D], and commits
    nothing.

    Attributes:
      cache: the committed prefix.
      mask: bool [T, T] or [B, T, T].
      backend: static; the attention backend.
      keep_queries: static; whether to keep ((k, v), (q, lse)) instead, with the queries and the
        log-sum-exp of their scores.
      chain: int32 [B], the tokens of each row that are no padding, if the mask is that of a chain.
        Layers with states run its parts, and keep (the state after it, None); None: a tree.
    """

    cache: KVCache | DraftCache
    mask: Bool[Array, "*B T T"]
    backend: str | None = struct.field(pytree_node=False)
    keep_queries: bool = struct.field(default=False, pytree_node=False)
    chain: Int[Array, "B"] | None = None

    KEPT_BY_SHARED: ClassVar[Any] = (None, None)

    def _advance(
        self, inputs: DeltaNetInputs, state: LayerState, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H Dv"], tuple[LayerState | StateNodes, None]]:
        if self.chain is not None:
            out, after = state_layers.run_chain(inputs, state, self.slice(self.chain))
            return out, (after, None)
        mask = self.slice_mask(self.mask)
        out, nodes = state_layers.run_tree(inputs, state, mask, positions)
        return out, (nodes, None)

    def _attend(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
        if self.live is not None:  # a wrong draft with NaN must not reach other nodes: 0 * NaN
            k, v = (jnp.where(jnp.isfinite(x), x, 0) for x in (k, v))
        mask, (window,) = self.mask, self.cache.windows
        if window is not None and window < q.shape[1]:
            distance = self.positions[:, :, None] - self.positions[:, None]
            mask = mask & (distance < window)
        out, lse = _attention(self, mask, q, k, v, **options)
        return out, ((k, v), (q, lse) if self.keep_queries else None)


@struct.dataclass
class AttendLevel(_Rows):
    """An `attend` for one level of a tree during drafting.

    It keeps `drafted` with the level's entries filled in. Layers with a sliding window see all
    nodes that the mask allows, even those of a tree that is deeper than the window.

    Attributes:
      cache: the committed prefix.
      drafted: per layer (k, v) [B,N,K,D] of all nodes, of which the mask hides later levels.
      nodes: int32 [T], the node of each token; N and above mark padding.
      mask: bool [T, N] or [B, T, N], the nodes that each token sees, itself included.
      backend: static; the attention backend.
    """

    cache: KVCache | DraftCache
    drafted: KV
    nodes: Int[Array, "T"]
    mask: Bool[Array, "*B T N"]
    backend: str | None = struct.field(pytree_node=False)

    def of_layer(self, layer: int) -> Self:
        return dataclasses.replace(super().of_layer(layer), drafted=(self.drafted[layer],))

    def _advance(
        self, inputs: DeltaNetInputs, state: LayerState, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H Dv"], StateNodes]:
        drafted = jax.tree.map(self.slice, self.drafted[0])
        mask, first = self.slice_mask(self.mask), self.slice(self.cache.committed)
        return state_layers.run_level(inputs, state, drafted, self.nodes, mask, positions, first)

    def _attend(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
        k_all, v_all = jax.tree.map(self.slice, self.drafted[0])
        k_all = k_all.at[:, self.nodes].set(k.astype(k_all.dtype), mode="drop")
        v_all = v_all.at[:, self.nodes].set(v.astype(v_all.dtype), mode="drop")
        out, _ = _attention(self, self.mask, q, k_all, v_all, **options)
        return out, (k_all, v_all)


@struct.dataclass
class ChoosePages(_Rows):
    """An `attend` for the root alone, whose queries choose the pages that it and its draft read.

    It keeps ((k, v), layer_pages) for each layer: the root's keys and values [B, 1, K, D], and the
    pages [B, K, C]. Of a layer with a state it keeps (`StateNodes`, None).

    Attributes:
      cache: the committed prefix, with the pages of the previous round.
      backend: static; the attention backend.
    """

    cache: PagedCache
    backend: str | None = struct.field(pytree_node=False)

    def _advance(
        self, inputs: DeltaNetInputs, state: LayerState, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H Dv"], tuple[StateNodes, None]]:
        out, nodes = state_layers.run_tree(inputs, state, jnp.ones((1, 1), bool), positions)
        return out, (dataclasses.replace(nodes, positions=positions), None)

    def _attend(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
        layer_pages, (window,) = self.slice(self.cache.layer_pages), self.cache.windows
        if window is None:
            layer_pages = self.cache.choose(q[:, -1], layer_pages, self.slice)
        mask = jnp.ones((1, 1), bool)
        out, _ = _attention(self, mask, q, k, v, layer_pages=layer_pages, **options)
        return out, ((k, v), layer_pages)


def _attention(
    attend: AttendTo | AttendLevel | ChoosePages,
    mask: Bool[Array, "*B T N"],
    q: Array,
    k: Array,
    v: Array,
    *,
    layer_pages: Int[Array, "B K C"] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> tuple[Array, Array]:
    """Returns the attention of q to the prefix and, under the mask, to k and v; and its lse.

    Args:
      attend: has the cache, of one layer, the positions and the rows.
      mask: as that of `AttendLevel`.
      q, k, v: the layer's queries, keys and values.
      layer_pages: those of these rows that are read of a `PagedCache`; None: those chosen before.
      softcap, sinks: the model's, as in `DecoderConfig`.
    """
    cache, (window,) = attend.cache, attend.cache.windows
    mask = attend.slice_mask(mask)
    options: dict[str, Any] = {}
    slots: Any
    if isinstance(cache, PagedCache) and window is None:
        if layer_pages is None:
            layer_pages = attend.slice(cache.layer_pages)
        *slots, lengths = cache.gather(layer_pages, attend.slice, attend.first_row)
    else:
        lengths = cache.live(0)
        if attend.live is not None:
            lengths = jnp.where(attend.live.any(1), lengths, 0)
        slots, lengths = (cache.k[0], cache.v[0]), attend.slice(lengths)
        has_other_rows = cache.k[0].shape[0] > q.shape[0] and attend.first_row is None
        options["first_row"] = 0 if has_other_rows else attend.first_row
    if window is not None:
        options["seen_from"] = attend.slice(attend.positions) - (window - 1)
    options |= dict(backend=attend.backend, softcap=softcap, return_lse=True)
    out, lse = tree_attention(q, slots[0], slots[1], lengths, k, v, mask, **options)
    out, lse = (out, lse) if sinks is None else _with_sinks(out, lse, sinks)
    if attend.live is not None:
        out = jnp.where(attend.slice(attend.live)[..., None, None], out, 0)
    return out, lse


def _with_sinks(
    out: Float[Array, "B T H D"], lse: Float[Array, "B T H"], sinks: Float[Array, "H"]
) -> tuple[Array, Array]:
    """Returns attention whose softmax has one more logit in each head, without a value."""
    sinks = sinks.astype(lse.dtype)
    share = jax.nn.sigmoid(lse - sinks)[..., None]
    return (out * share).astype(out.dtype), jnp.logaddexp(lse, sinks)


def empty_nodes(cache: Any, nodes: int, dtype: Any) -> KV:
    """Returns what `AttendLevel` fills, given its cache: zeros for `nodes` tokens."""
    batch = len(cache.live(0))

    def zeros(layer, old):
        if old is None:
            state = cache.states[layer] if cache.states else None
            return None if state is None else state_layers.empty_nodes(state, batch, nodes)
        _, heads, _, size = old.shape
        return tuple(jnp.zeros((batch, nodes, heads, size), dtype) for _ in "kv")

    return tuple(zeros(layer, k) for layer, k in enumerate(cache.k))
