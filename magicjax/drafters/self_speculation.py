"""Self-speculation: the target drafts for itself on a sparse cache (MagicDec)."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax.drafters.base import Round
from magicjax.drafters.draft_pass import Source, check_width, drawing_of
from magicjax.drafters.dynamic_tree import draft_tree
from magicjax.drafters.sparse import Sparse, resolve, sparse_of
from magicjax.kv_cache.attention_stats import Queries, Seen, Watch, follow
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache, append_ring, repin
from magicjax.model import Model
from magicjax.policies import Policy, StreamingLLM
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Shape, Tree
from magicjax.verification.sampling import Sampling
from pallas_kernels import prefix_mass


@struct.dataclass
class SelfSpeculationState:
    """Self-speculation between two rounds.

    Attributes:
      cache: what the draft sees.
      seen: what the policy will be shown at the next refresh; nothing if none is to come.
      added: int32 [B], up to which position the queries are in `seen.total`.
      rounds: int32 [], how many rounds there were.
    """

    cache: DraftCache
    seen: Seen
    added: Int[Array, "B"]
    rounds: Int[Array, ""]


@struct.dataclass
class SelfSpeculation:
    """The target itself, reading `budget` entries of its own cache instead of all.

    The entries are gathered from the target's prefill, and each commit brings in the *verified*
    keys and values, so they never drift. Source: MagicDec (arXiv 2408.11049), section 4.

    A refresh picks the pinned entries again, from all of the text so far, by the attention that the
    target paid when it verified the newest tokens (the idea of PillarAttn, arXiv 2512.01278). It
    costs, in rounds that refresh, one read of the target's keys and the gathering of the pins.

    Attributes:
      policy: which tokens are pinned: a name, or an object (`magicjax.policies`). `full`, a
        control, drafts on the target's own cache.
      budget: C, the slots of the draft cache for each layer and KV head; None: 256.
      draw: how children are drawn under sampling (`DRAWINGS`); None: without replacement, and in
        a dynamic tree the most likely.
      refresh_every: after how many rounds the pinned entries are picked again; None: never.
      kv_dtype: of the draft cache: "int8" or "int4", with one float32 scale for each token and
        head; None: the target's own. The target's cache is never quantized.

    Raises:
      ValueError: an unknown policy, refresh_every < 1 or of a policy that never changes its mind,
        a full cache with a budget or anything else that it has no use for.
      TypeError: policy is neither a name nor a policy, or a number is not whole.
    """

    policy: Policy | str = struct.field(pytree_node=False, default="streaming")
    budget: int | None = struct.field(pytree_node=False, default=None)
    draw: str | None = struct.field(pytree_node=False, default=None)
    refresh_every: int | None = struct.field(pytree_node=False, default=None)
    kv_dtype: str | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        resolve(self, "reads the target's own cache", "refresh_every")
        if self.refresh_every is not None:
            object.__setattr__(self, "refresh_every", operator.index(self.refresh_every))
            if self.refresh_every < 1:
                raise ValueError(
                    f"refresh_every={self.refresh_every}: it must be at least 1 round; leave it "
                    "out to keep the pins of the prompt"
                )
            if isinstance(self.policy, StreamingLLM):
                raise ValueError(
                    f"refresh_every={self.refresh_every}: a streaming cache always pins the first "
                    "tokens; leave refresh_every out, or use another policy"
                )
            assert isinstance(self.policy, Policy)  # `resolve` has looked it up
            if self.policy.accumulates and not self.policy.window:
                raise ValueError(
                    f"refresh_every={self.refresh_every}: {type(self.policy).__name__} accumulates "
                    "attention and has window=0, so that a refresh would add none; give it a "
                    "window, or leave refresh_every out"
                )

    @property
    def sparse(self) -> Sparse | None:
        """How its cache is made sparse; None: it reads the target's own."""
        return sparse_of(self)

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if paths of that depth overrun the ring, or `tree` is too wide."""
        drawing_of(self.draw, tree)
        check_width(tree, target.config.vocab_size)
        if self.sparse is not None:
            self.sparse.check(target, depth + 1, f"tree depth ({depth}) + 1")

    def shape(self, tree: Tree) -> Shape:
        return tree.shape

    def drawings(self, tree: Tree) -> set[str]:
        return {drawing_of(self.draw, tree)}

    def watch(self) -> Watch:
        refreshes = self.refresh_every is not None
        return Watch() if self.sparse is None else self.sparse.watch(refreshes)

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return 0 if self.sparse is None else self.sparse.num_bytes(target, batch)

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, seen: Seen, settings: Any
    ) -> SelfSpeculationState | None:
        if self.sparse is None:
            return None
        seen = self.sparse.own(seen)
        own = self.sparse.start(target, cache, seen, settings.backend)
        if self.refresh_every is None:
            seen = Seen(None, None)
        return SelfSpeculationState(own, seen, cache.lengths, jnp.zeros((), jnp.int32))

    def propose(
        self,
        target: Model,
        state: SelfSpeculationState | None,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Any,
    ) -> tuple[Proposal, None]:
        source = Source(
            model=target,
            target=target,
            cache=cache if state is None else state.cache,
            root=root,
            root_position=cache.lengths,
            sampling=sampling,
            lead=None,
            drawing=drawing_of(self.draw, settings.tree),
            backend=settings.backend,
            index=settings.index,
        )
        return draft_tree(source, settings.tree)[0], None

    def commit(
        self,
        target: Model,
        state: SelfSpeculationState | None,
        draft: None,
        proposal: Proposal,
        of_round: Round,
    ) -> SelfSpeculationState | None:
        if state is None:
            return None
        own = append_ring(state.cache, of_round.new, of_round.path, of_round.kept)
        if self.refresh_every is None:
            return dataclasses.replace(state, cache=own)
        queries = state.seen.queries
        if queries is not None:
            path, kept, count = of_round.path, of_round.kept, state.cache.count
            pairs = zip(queries, of_round.queries, strict=True)
            queries = tuple(follow(old, new, path, kept, count) for old, new in pairs)
        seen = dataclasses.replace(state.seen, queries=queries)
        state = SelfSpeculationState(own, seen, state.added, state.rounds + 1)
        due = state.rounds % self.refresh_every == 0
        return jax.lax.cond(due, lambda s: self._refresh(target, s, of_round), _same, state)

    def _refresh(
        self, target: Model, state: SelfSpeculationState, of_round: Round
    ) -> SelfSpeculationState:
        """Returns the state with pins by what was seen up to now."""
        seen, sparse, full, backend = state.seen, self.sparse, of_round.cache, of_round.backend
        assert sparse is not None
        if seen.total is not None:
            assert seen.queries is not None
            layers = zip(seen.total, seen.queries, full.k, strict=True)
            total = tuple(
                old + target.of_all_queries(_unadded_mass(q, k, state.added, backend))
                for old, q, k in layers
            )
            seen = dataclasses.replace(seen, total=total)
        pins = sparse.pins(target, full, seen, backend)
        return SelfSpeculationState(
            repin(state.cache, full, pins), seen, full.lengths, state.rounds
        )


def _same(state: SelfSpeculationState) -> SelfSpeculationState:
    return state


def _unadded_mass(
    queries: Queries, keys: Float[Array, "B K S D"], added: Int[Array, "B"], backend: str | None
) -> Float[Array, "B K S"]:
    """Returns the attention of those queries of the window that stand at `added` or later."""
    seen = jnp.where(queries.seen > added[:, None], queries.seen, 0)
    return prefix_mass(queries.q, keys, seen, queries.lse, backend=backend)
