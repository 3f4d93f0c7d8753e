"""Self-speculation: the target drafts for itself on a sparse cache (MagicDec)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.drafters import layer_skipping
from magicjax.drafters.base import Previous, RoundOutcome
from magicjax.drafters.sparse import (
    BUDGET,
    BUDGET_HELP,
    DRAW_HELP,
    KV_DTYPE_HELP,
    POLICY_HELP,
    KVDtype,
    SparseSettings,
    check_budget,
    check_refresh,
)
from magicjax.drafters.target_drafter import LAYERS_HELP, WEIGHTS_HELP, TargetDrafter
from magicjax.kv_cache.full_cache import KVCache, elements
from magicjax.kv_cache.model_stats import ModelStats, RecentQueries, update_from_path
from magicjax.kv_cache.sparse_cache import DraftCache, append_ring, repin
from magicjax.model import Model, softcap_of
from magicjax.options import option
from magicjax.policies import Policy, StreamingLLM, get_policy
from magicjax.settings import Settings, StatsSpec
from magicjax.trees.proposal import DrawMethod, Proposal
from magicjax.trees.token_tree import Tree
from pallas_kernels import prefix_mass


@struct.dataclass
class SelfSpeculationState:
    """The state of self-speculation between two rounds.

    Attributes:
      cache: the sparse draft cache.
      stats: what the policy reads at the next refresh; empty without refreshes.
      counted: int32 [B], the queries before this position are in `stats.total`.
      rounds: int32 [B], the rounds of each row so far. The schedule of refreshes is a row's own, so
        its drafts do not depend on when other rows began.
    """

    cache: DraftCache
    stats: ModelStats
    counted: Int[Array, "B"]
    rounds: Int[Array, "B"]


@struct.dataclass
class SelfSpeculation(TargetDrafter):
    """The target itself, reading only `budget` entries of its own cache.

    The entries are gathered from the target's prefill. Each commit adds the keys and values that
    the target computed, so the draft cache never drifts. Source: MagicDec (arXiv 2408.11049),
    section 4.

    A refresh chooses the pinned entries again, from the whole text, by the attention of the newest
    queries during verification (the idea of PillarAttn, arXiv 2512.01278). It costs one read of the
    target's keys and one gather of the pins.

    Attributes:
      policy: which entries are pinned, a name or a `Policy`.
      budget: C, the slots that a draft step reads for each layer and KV head.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      refresh_every: rounds of a row between refreshes; None: never.
      kv_dtype: dtype of the draft cache: "int8" or "int4", with one float32 scale for each token
        and head; None: the target's dtype. The target's own cache is not changed by it.
      weights: the format of a quantized copy of the target's blocks, which drafts, as for
        `FullCacheSpeculation`; None: the target itself drafts.
      layers: the layers of the target that draft, from 0, such as "0-9,20-29"; None: all. A copy
        and the draft cache have these layers only.
      blocks: that copy; `for_target` sets it.

    Raises:
      ValueError: an unknown policy or format, invalid layers, a budget below 1, or
        refresh_every < 1 or for a policy that a refresh cannot change.
      TypeError: the policy is neither a name nor a `Policy`, a number is not an integer, or an
        unknown draw or kv_dtype.
    """

    policy: Policy | str = option("streaming", POLICY_HELP, positional=True)
    budget: int = option(BUDGET, BUDGET_HELP, positional=True)
    draw: DrawMethod | None = option(None, DRAW_HELP)
    refresh_every: int | None = option(
        None, "rounds between two choices of the pinned entries; default: they are chosen once"
    )
    kv_dtype: KVDtype | None = option(None, KV_DTYPE_HELP)
    weights: str | None = option(None, WEIGHTS_HELP)
    layers: str | None = option(None, LAYERS_HELP)
    blocks: Model | None = struct.field(default=None, repr=False)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "policy", get_policy(self.policy))
        check_budget(self.budget)
        self._check_refresh()

    def _check_refresh(self) -> None:
        policy, every = self.sparse.policy, self.refresh_every
        if every is None:
            return
        check_refresh(every)
        if isinstance(policy, StreamingLLM):
            raise ValueError(
                f"refresh_every={every}: a streaming cache always pins the first tokens; omit "
                "refresh_every, or use another policy"
            )
        if policy.accumulates and not policy.window:
            raise ValueError(
                f"refresh_every={every}: {type(policy).__name__} accumulates attention but has "
                "window=0, so a refresh has no new queries; set its window, or omit refresh_every"
            )

    @property
    def sparse(self) -> SparseSettings:
        """The settings of its sparse cache."""
        assert isinstance(self.policy, Policy)  # since `__post_init__`
        return SparseSettings(self.policy, self.budget, self.kv_dtype)

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if paths of `depth` exceed the ring, or `tree` is too wide."""
        super().check(target, tree, depth, context)
        self.sparse.check(self.part_of(target), depth + 1, f"tree depth ({depth}) + 1")

    def stats_spec(self) -> StatsSpec:
        return self.sparse.stats_spec(self.refresh_every is not None)

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return self.sparse.num_bytes(self.part_of(target), batch)

    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> SelfSpeculationState:
        cache = layer_skipping.of_cache(cache, self.layer_indices)
        stats = self.sparse.select_stats(layer_skipping.of_stats(stats, self.layer_indices))
        draft_cache = self.sparse.make_cache(self.part_of(target), cache, stats, settings.backend)
        if self.refresh_every is None:
            stats = ModelStats(None, None)
        return SelfSpeculationState(
            draft_cache, stats, cache.lengths, jnp.zeros_like(cache.lengths)
        )

    def draft_cache(self, state: SelfSpeculationState, cache: KVCache) -> DraftCache:
        states = layer_skipping.of_cache(cache, self.layer_indices).states
        return dataclasses.replace(state.cache, states=states)

    def commit(
        self,
        target: Model,
        state: SelfSpeculationState,
        draft: None,
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> SelfSpeculationState:
        outcome = layer_skipping.of_outcome(outcome, self.layer_indices)
        path, committed = outcome.path, outcome.committed
        cache = append_ring(state.cache, outcome.kv, path, committed)
        if self.refresh_every is None:
            return dataclasses.replace(state, cache=cache)
        stats = state.stats
        if stats.queries is not None:
            queries = tuple(
                window and update_from_path(window, queries, path, committed, state.cache.count)
                for window, queries in zip(stats.queries, outcome.queries, strict=True)
            )
            stats = dataclasses.replace(stats, queries=queries)
        state = SelfSpeculationState(cache, stats, state.counted, state.rounds + 1)
        due = (state.rounds % self.refresh_every == 0) & (committed > 0)
        refresh = functools.partial(self._refresh, target, outcome, due)
        return jax.lax.cond(due.any(), refresh, lambda state: state, state)

    def _refresh(
        self,
        target: Model,
        outcome: RoundOutcome,
        due: Bool[Array, "B"],
        state: SelfSpeculationState,
    ) -> SelfSpeculationState:
        """Returns the state with pins chosen by the attention up to now, in the rows that are due.

        `outcome` has the layers of the draft. The other rows keep their pins. Their entries are
        read again, which changes no value.
        """
        stats, full, backend = state.stats, outcome.cache, outcome.backend
        if stats.total is not None:
            assert stats.queries is not None
            start = jnp.where(due, state.counted, jnp.iinfo(jnp.int32).max)
            softcap = softcap_of(target.config)

            def with_new_mass(total, queries, k):
                if total is None:
                    return None
                keys = elements(k, target.dtype)
                mass = _mass_since(queries, keys, start, softcap=softcap, backend=backend)
                return total + target.sum_over_replicas(mass)

            layers = zip(stats.total, stats.queries, full.k, strict=True)
            stats = dataclasses.replace(
                stats, total=tuple(with_new_mass(*layer) for layer in layers)
            )
        chosen = self.sparse.choose_pins(self.part_of(target), full, stats, backend)
        pins = jax.tree.map(
            lambda new, old: jnp.where(due[:, None, None], new, old), chosen, state.cache.pinned
        )
        counted = jnp.where(due, full.lengths, state.counted)
        return SelfSpeculationState(repin(state.cache, full, pins), stats, counted, state.rounds)


def _mass_since(
    queries: RecentQueries,
    keys: Float[Array, "B K S D"],
    start: Int[Array, "B"],
    **options: Any,
) -> Float[Array, "B K S"]:
    """Returns the attention of the window's queries at position `start` and later."""
    seen = jnp.where(queries.seen > start[:, None], queries.seen, 0)
    return prefix_mass(queries.q, keys, seen, queries.lse, **options)
