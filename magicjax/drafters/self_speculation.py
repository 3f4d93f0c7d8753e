"""Self-speculation: the target drafts for itself on a sparse cache (MagicDec)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.drafters import quantized_copy
from magicjax.drafters.base import Drafter, RoundOutcome
from magicjax.drafters.draft_pass import (
    Backlog,
    DraftContext,
    check_width,
    resolve_draw_method,
)
from magicjax.drafters.dynamic_tree import draft_tree
from magicjax.drafters.sparse import (
    BUDGET_HELP,
    DRAW_HELP,
    KV_DTYPE_HELP,
    POLICY_HELP,
    KVDtype,
    RetrievalSettings,
    RetrievalState,
    SparseSettings,
    resolve_policy,
    sparse_settings,
)
from magicjax.kv_cache.attention_stats import AttentionStats, RecentQueries, update_from_path
from magicjax.kv_cache.pages import update_bounds
from magicjax.kv_cache.sparse_cache import DraftCache, append_ring, repin
from magicjax.model import Model
from magicjax.options import option
from magicjax.policies import Policy, Quest, StreamingLLM
from magicjax.settings import AttentionStatsSpec, Settings
from magicjax.trees.proposal import DrawMethod, Proposal
from magicjax.trees.token_tree import Tree
from models import WeightFormat
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
    stats: AttentionStats
    counted: Int[Array, "B"]
    rounds: Int[Array, "B"]


State = SelfSpeculationState | RetrievalState | None  # None: it reads the target's cache


@struct.dataclass
class SelfSpeculation(Drafter):
    """The target itself, reading only `budget` entries of its own cache.

    The entries are gathered from the target's prefill. Each commit adds the keys and values that
    the target computed, so the draft cache never drifts. Source: MagicDec (arXiv 2408.11049),
    section 4.

    A refresh chooses the pinned entries again, from the whole text, by the attention of the newest
    queries during verification (the idea of PillarAttn, arXiv 2512.01278). It costs one read of the
    target's keys and one gather of the pins.

    The policy "quest" has no draft cache. The queries of each round's root select pages of the
    target's cache, and the draft reads only these pages.

    Attributes:
      policy: which entries are pinned, a name or a `Policy`. "full", a control, drafts on the
        target's own cache.
      budget: C, the slots that a draft step reads for each layer and KV head; None: 256.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      refresh_every: rounds between refreshes; None: never, and with "quest" every round.
      kv_dtype: of the draft cache: "int8" or "int4", with one float32 scale for each token and
        head; None: the target's dtype. The target's cache is never quantized.
      weights: the format of a quantized copy of the target's blocks, which drafts, as for
        `magicjax.load`; None: the target itself drafts. The target verifies, so the copy changes
        acceptance only (SpecInfer, arXiv 2305.09781; QuantSpec, arXiv 2502.10424).
      blocks: that copy; `for_target` sets it.

    Raises:
      ValueError: an unknown policy or format, refresh_every < 1 or for a policy that a refresh
        cannot change, a field that policy "full" does not use, or a kv_dtype with "quest".
      TypeError: the policy is neither a name nor a `Policy`, a number is not an integer, or an
        unknown draw or kv_dtype.
    """

    policy: Policy | str = option("streaming", POLICY_HELP, positional=True)
    budget: int | None = option(None, BUDGET_HELP, positional=True)
    draw: DrawMethod | None = option(None, DRAW_HELP)
    refresh_every: int | None = option(
        None,
        "rounds between two choices of the pinned entries; default: they are chosen once, with "
        "policy quest in every round",
    )
    kv_dtype: KVDtype | None = option(None, KV_DTYPE_HELP)
    weights: str | None = option(
        None, "quantized copy of the target's matrices to draft with: int8, int4 or int4:32"
    )
    blocks: Model | None = struct.field(default=None, repr=False)

    def __post_init__(self):
        if self.weights is not None:
            WeightFormat.parse(self.weights).validate_rounding()
        resolve_policy(self, "reads the target's own cache", "refresh_every")
        if isinstance(self.policy, Quest) and self.kv_dtype is not None:
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r}: with policy 'quest' the draft reads the target's own "
                "cache; use another policy, or omit kv_dtype"
            )
        if self.refresh_every is not None:
            if self.refresh_every < 1:
                raise ValueError(
                    f"refresh_every={self.refresh_every}: it must be at least 1 round; omit it for "
                    "the default"
                )
            if isinstance(self.policy, StreamingLLM):
                raise ValueError(
                    f"refresh_every={self.refresh_every}: a streaming cache always pins the first "
                    "tokens; omit refresh_every, or use another policy"
                )
            assert isinstance(self.policy, Policy)  # since `resolve_policy`
            if self.policy.accumulates and not self.policy.window:
                raise ValueError(
                    f"refresh_every={self.refresh_every}: {type(self.policy).__name__} accumulates "
                    "attention but has window=0, so a refresh has no new queries; set its window, "
                    "or omit refresh_every"
                )

    @property
    def sparse(self) -> SparseSettings | None:
        """The settings of its sparse cache; None: it reads the target's cache."""
        return sparse_settings(self)

    @property
    def retrieval(self) -> RetrievalSettings | None:
        """How it chooses pages of the target's cache; None: it reads all of it, or another one."""
        if not isinstance(self.policy, Quest):
            return None
        assert self.budget is not None  # since `resolve_policy`
        return RetrievalSettings(self.policy, self.budget, self.refresh_every or 1)

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if paths of `depth` exceed the ring, or `tree` is too wide."""
        resolve_draw_method(self.draw, tree)
        check_width(tree, target.config.vocab_size)
        if self.sparse is not None:
            self.sparse.check(target, depth + 1, f"tree depth ({depth}) + 1")
        if self.retrieval is not None:
            self.retrieval.check(target)
        if self.weights is not None:
            quantized_copy.check(target, self.weights)

    def for_target(self, target: Model) -> "SelfSpeculation":
        if self.weights is None:
            return self
        return dataclasses.replace(self, blocks=quantized_copy.of(target, self.weights))

    def draw_methods(self, tree: Tree) -> set[str]:
        return {resolve_draw_method(self.draw, tree)}

    def attention_stats_spec(self) -> AttentionStatsSpec:
        if self.sparse is None:
            return AttentionStatsSpec()
        return self.sparse.attention_stats_spec(self.refresh_every is not None)

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        if self.retrieval is not None:
            return self.retrieval.num_bytes(target, batch, capacity)
        return 0 if self.sparse is None else self.sparse.num_bytes(target, batch)

    def prefill(self, target, tokens, cache, stats, settings: Settings) -> State:
        if self.retrieval is not None:
            return self.retrieval.first_state(cache)
        if self.sparse is None:
            return None
        stats = self.sparse.select_stats(stats)
        draft_cache = self.sparse.make_cache(target, cache, stats, settings.backend)
        if self.refresh_every is None:
            stats = AttentionStats(None, None)
        return SelfSpeculationState(
            draft_cache, stats, cache.lengths, jnp.zeros_like(cache.lengths)
        )

    def propose(
        self, target, state: State, root, cache, sampling, settings: Settings
    ) -> tuple[Proposal, tuple | None]:
        drafted_on, backlog = cache, None
        if isinstance(state, RetrievalState):
            assert self.retrieval is not None
            drafted_on = self.retrieval.view(state, cache)
            if settings.tree.num_nodes > 1:  # an empty backlog: the root runs alone, and chooses
                backlog = Backlog(jnp.zeros((len(root), 0), jnp.int32), jnp.zeros_like(root))
        elif state is not None:
            drafted_on = state.cache
        context = DraftContext(
            model=target if self.blocks is None else quantized_copy.join(self.blocks, target),
            target=target,
            cache=drafted_on,
            root=root,
            root_position=cache.lengths,
            sampling=sampling,
            backlog=backlog,
            draw_method=resolve_draw_method(self.draw, settings.tree),
            backend=settings.backend,
            drafter_index=settings.drafter_index,
        )
        proposal, block = draft_tree(context, settings.tree)
        if not isinstance(state, RetrievalState):
            return proposal, None
        if backlog is None:
            return proposal, (state.pages, state.wait)
        assert self.retrieval is not None
        wait = jnp.where(state.wait == 0, self.retrieval.every, state.wait) - 1
        return proposal, (tuple(pages for _, pages in block.drafted), wait)

    def commit(
        self, target, state: State, draft: tuple | None, proposal, outcome: RoundOutcome
    ) -> State:
        if state is None:
            return None
        path, kept = outcome.path, outcome.kept
        if isinstance(state, RetrievalState):
            assert draft is not None
            bounds = update_bounds(state.bounds, outcome.new, path, kept, outcome.cache)
            return RetrievalState(bounds, *draft)
        cache = append_ring(state.cache, outcome.new, path, kept)
        if self.refresh_every is None:
            return dataclasses.replace(state, cache=cache)
        stats = state.stats
        if stats.queries is not None:
            queries = tuple(
                update_from_path(old, new, path, kept, state.cache.count)
                for old, new in zip(stats.queries, outcome.queries, strict=True)
            )
            stats = dataclasses.replace(stats, queries=queries)
        state = SelfSpeculationState(cache, stats, state.counted, state.rounds + 1)
        due = (state.rounds % self.refresh_every == 0) & (kept > 0)
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

        The other rows keep their pins. Their entries are read again, which changes no value.
        """
        stats, sparse, full, backend = state.stats, self.sparse, outcome.cache, outcome.backend
        assert sparse is not None
        if stats.total is not None:
            assert stats.queries is not None
            first = jnp.where(due, state.counted, jnp.iinfo(jnp.int32).max)
            layers = zip(stats.total, stats.queries, full.k, strict=True)
            total = tuple(
                old + target.sum_over_replicas(_mass_since(q, k, first, backend))
                for old, q, k in layers
            )
            stats = dataclasses.replace(stats, total=total)
        chosen = sparse.choose_pins(target, full, stats, backend)
        pins = tuple(
            jnp.where(due[:, None, None], new, old)
            for new, old in zip(chosen, state.cache.pinned, strict=True)
        )
        counted = jnp.where(due, full.lengths, state.counted)
        return SelfSpeculationState(repin(state.cache, full, pins), stats, counted, state.rounds)

    def synthetic_state(self, state: State, lengths: Int[Array, "B"]) -> State:
        if state is None or isinstance(state, RetrievalState):
            return state
        cache = dataclasses.replace(state.cache, count=jnp.array(lengths))
        return dataclasses.replace(state, cache=cache, counted=jnp.array(lengths))


def _mass_since(
    queries: RecentQueries,
    keys: Float[Array, "B K S D"],
    first: Int[Array, "B"],
    backend: str | None,
) -> Float[Array, "B K S"]:
    """Returns the attention of the window's queries at position `first` and later."""
    seen = jnp.where(queries.seen > first[:, None], queries.seen, 0)
    return prefix_mass(queries.q, keys, seen, queries.lse, backend=backend)
