"""What a draft reads: a policy and a budget, validated, and turned into a cache."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.kv_cache.attention_stats import AttentionStats, newest
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.pages import PageBounds, PagedCache, Pages, bounds_of, in_order
from magicjax.kv_cache.sparse_cache import DraftCache, Pins, gather
from magicjax.model import Model
from magicjax.policies import Evidence, Full, Policy, Quest, choose, get_policy
from magicjax.settings import AttentionStatsSpec
from sharding import KV_HEADS, LAYER_BATCH, Split, logical_axes

KVDtype = Literal["int8", "int4"]
KV_DTYPES = {None: None, "int8": 8, "int4": 4}  # bits of an element
BUDGET = 256  # the default

# Help of the options that drafters with a cache share.
POLICY_HELP = "which entries of the cache are pinned"
BUDGET_HELP = f"slots of a sparse cache for each layer and KV head; default: {BUDGET}"
KV_DTYPE_HELP = "of a sparse cache; default: the dtype of the model"
DRAW_HELP = (
    "how children are drawn under sampling; default: without_replacement, or top (the most likely) "
    "in a dynamic tree"
)


def resolve_policy(drafter: Any, full_reads: str, *unused: str) -> None:
    """Replaces a drafter's policy by an object and sets its budget, and validates both.

    The budget of policy 'full' is None.

    Args:
      drafter: with `policy`, `budget` and `kv_dtype`; a frozen dataclass in `__post_init__`.
      full_reads: what the draft does with policy 'full', for the error.
      unused: fields without a meaning for policy 'full', besides budget and kv_dtype.

    Raises:
      ValueError: an unknown policy, a budget below 1, or a field that policy 'full' does not use.
      TypeError: the policy is neither a name nor a `Policy`.
    """
    object.__setattr__(drafter, "policy", get_policy(drafter.policy))
    if not isinstance(drafter.policy, Full):
        if drafter.budget is None:
            object.__setattr__(drafter, "budget", BUDGET)
        if drafter.budget < 1:
            raise ValueError(
                f"budget={drafter.budget}: a draft cache needs at least 1 slot for each layer and "
                f"KV head; omit budget for the default of {BUDGET}"
            )
    else:
        for name in ("budget", *unused, "kv_dtype"):
            value = getattr(drafter, name)
            if value is not None:
                raise ValueError(
                    f"{name}={value!r}: with policy 'full' the draft {full_reads}; use another "
                    f"policy, or omit {name}"
                )


def sparse_settings(drafter: Any) -> "SparseSettings | None":
    """Returns the settings of a drafter's sparse cache; None with policies 'full' and 'quest'."""
    if isinstance(drafter.policy, Full | Quest):
        return None
    return SparseSettings(drafter.policy, drafter.budget, drafter.kv_dtype)


@dataclasses.dataclass(frozen=True)
class SparseSettings:
    """The size and contents of a sparse draft cache.

    Attributes:
      policy: chooses the pinned entries.
      budget: C, slots for each layer and KV head; the mean over layers if the policy varies it.
      kv_dtype: of the entries: int8 or int4, with a scale for each token and head; None: the
        model's dtype.
    """

    policy: Policy
    budget: int
    kv_dtype: str | None

    @property
    def ring(self) -> int:
        """R, the slots of the ring."""
        return self.policy.ring(self.budget)

    @property
    def num_pinned(self) -> int:
        """P = C - R, the pinned slots; the mean over layers."""
        return self.budget - self.ring

    def check(self, model: Model, needed: int, because: str) -> None:
        """Raises ValueError if the ring has fewer than `needed` slots, or nothing can be pinned."""
        if self.kv_dtype == "int4" and model.config.head_dim % 2:
            raise ValueError(
                f"kv_dtype='int4' packs two elements into a byte and needs an even head "
                f"dimension, not {model.config.head_dim}: use int8"
            )
        if model.config.kv_head_dim != model.config.head_dim:
            self._check_alibi()
        _check_context(model, self.budget)
        if self.ring < needed:
            raise ValueError(
                f"budget={self.budget} is too small: its ring has {max(self.ring, 0)} slots "
                f"besides {self.num_pinned} pinned ones, and needs at least {because} = {needed}; "
                "use a larger budget, fewer pins, or a shallower tree"
            )
        if self.num_pinned < 1:
            raise ValueError(
                f"budget={self.budget} leaves no pinned slots besides a ring of {self.ring}: use a "
                "larger budget, or a smaller `recent`"
            )
        layers = model.config.num_layers
        pinned, total = self.policy.pinned(self.budget, layers), layers * self.num_pinned
        if len(pinned) != layers or min(pinned) < 0 or sum(pinned) != total:
            raise ValueError(
                f"{type(self.policy).__name__}.pinned({self.budget}, {layers}) returned {pinned}: "
                f"it must return {layers} numbers, none below 0, with the sum {total}"
            )

    def attention_stats_spec(self, refreshes: bool = False) -> AttentionStatsSpec:
        """Returns the attention statistics that the policy needs."""
        window, total = self.policy.window, self.policy.accumulates
        return AttentionStatsSpec(window, total, rounds=refreshes and window > 0)

    def select_stats(self, stats: AttentionStats) -> AttentionStats:
        """Returns the statistics that the policy needs; an ensemble can have collected more."""
        queries, window = stats.queries, self.policy.window
        if queries is not None:
            queries = tuple(newest(layer, window) for layer in queries) if window else None
        total = stats.total if self.policy.accumulates else None
        return dataclasses.replace(stats, queries=queries, total=total)

    def choose_pins(
        self, model: Model, full: KVCache, stats: AttentionStats, backend: str | None
    ) -> Pins:
        """Returns the positions that the policy pins in each layer, given selected statistics."""
        candidates = (full.lengths - self.ring).clip(0)
        counts = self.policy.pinned(self.budget, len(full.k))
        pins = []
        for layer, (k, v, count) in enumerate(zip(full.k, full.v, counts, strict=True)):
            evidence = Evidence(
                keys=k,
                values=v,
                candidates=candidates,
                queries=stats.queries[layer] if stats.queries else None,
                accumulated=stats.total[layer] if stats.total else None,
                layer=model.first_layer + layer,
                config=model.config,
                split=model.split,
                backend=backend,
            )
            pins.append(choose(self.policy, evidence, count))
        return tuple(pins)

    def make_cache(
        self, model: Model, full: KVCache, stats: AttentionStats, backend: str | None
    ) -> DraftCache:
        """Returns the draft cache of the tokens in `full`."""
        pins = self.choose_pins(model, full, stats, backend)
        return gather(full, pins, self.ring, KV_DTYPES[self.kv_dtype])

    def _check_alibi(self) -> None:
        """Raises ValueError if the cache cannot have keys with positions."""
        if self.kv_dtype is not None:
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} rounds the positions that cached keys have with "
                "ALiBi: omit kv_dtype"
            )
        if self.policy.reads_keys:
            raise ValueError(
                f"policy={self.policy!r} compares keys, which have positions with ALiBi: use a "
                "policy that does not, such as streaming, snapkv or tova"
            )

    def num_bytes(self, model: Model, batch: int) -> int:
        """Returns the bytes of keys and values of the draft cache, scales included."""
        config, bits = model.config, KV_DTYPES[self.kv_dtype]
        if bits is None:
            return model.kv_bytes(batch, self.budget)
        entry_bytes = config.kv_head_dim * bits // 8 + 4  # and a float32 scale
        return 2 * batch * config.num_layers * config.num_kv_heads * self.budget * entry_bytes


@dataclasses.dataclass(frozen=True)
class RetrievalSettings:
    """How self-speculation reads pages of the target's cache.

    Attributes:
      policy: the size of a page, and the slots of the newest tokens.
      budget: slots that a draft step reads for each layer and KV head, rounded down to pages.
      every: rounds of a row between two choices.
    """

    policy: Quest
    budget: int
    every: int

    @property
    def newest(self) -> int:
        """The pages of the newest tokens."""
        return self.policy.ring(self.budget) // self.policy.page_size

    @property
    def chosen(self) -> int:
        """C, the pages that the queries choose: all but the first and the newest."""
        return self.budget // self.policy.page_size - 1 - self.newest

    def check(self, model: Model) -> None:
        """Raises ValueError if no page can be chosen, or the budget exceeds the context."""
        _check_context(model, self.budget)
        if self.chosen < 1:
            size = self.policy.page_size
            raise ValueError(
                f"budget={self.budget} is too small: use at least {(2 + self.newest) * size}, for "
                f"{2 + self.newest} pages of {size} slots (the first, {self.newest} of the newest "
                "tokens, 1 chosen), or a smaller page_size or `recent`"
            )

    def first_state(self, full: KVCache) -> "RetrievalState":
        """Returns the state after prefill; no more pages are chosen than the cache has."""
        bounds = bounds_of(full, self.policy.page_size)
        others = bounds.low[0].shape[2] - 1 - self.newest
        pages = in_order(full, min(self.chosen, max(1, others)))
        return RetrievalState(bounds, pages, jnp.zeros_like(full.lengths))

    def view(self, state: "RetrievalState", full: KVCache) -> PagedCache:
        """Returns the target's cache as the draft of this round reads it."""
        due = None if self.every == 1 else state.wait == 0
        return PagedCache(full, state.bounds, state.pages, due, self.newest, self.policy.page_size)

    def num_bytes(self, model: Model, batch: int, capacity: int) -> int:
        """Returns the bytes of the bounds, two vectors for each page and KV head."""
        return model.kv_bytes(batch, capacity // self.policy.page_size)


@struct.dataclass
class RetrievalState:
    """The state of self-speculation on pages between two rounds.

    Attributes:
      bounds: of the target's committed keys.
      pages: the pages that each row chose last.
      wait: int32 [B], rounds of the row before it chooses again; 0: in the next one.
    """

    bounds: PageBounds
    pages: Pages = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    wait: Int[Array, "B"]

    @property
    def split(self) -> Split:
        """The model's division over devices."""
        return self.bounds.split


def _check_context(model: Model, budget: int) -> None:
    """Raises ValueError if a budget exceeds the context of its model."""
    longest = model.config.max_positions
    if longest is not None and budget > longest:
        raise ValueError(
            f"budget={budget} is larger than the context of the model, {longest} tokens: "
            "use a smaller budget, or policy 'full' for a draft that reads all tokens"
        )
