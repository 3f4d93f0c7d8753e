"""A small model with a cache of its own (SpecInfer's SSM, MagicDec's stand-alone draft)."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters.base import Round
from magicjax.drafters.draft_pass import NOT_RUN, Drafted, Lead, Source, check_width, drawing_of
from magicjax.drafters.dynamic_tree import draft_tree
from magicjax.drafters.sink_rotation import SinkKeys, prefill_window, settle
from magicjax.drafters.sparse import Sparse, resolve, sparse_of
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attention_stats import Seen, Watch
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.prefill import prefill_cache
from magicjax.kv_cache.sparse_cache import DraftCache, append_ring
from magicjax.model import Model
from magicjax.policies import Policy, StreamingLLM
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Shape, Tree
from magicjax.verification.sampling import Sampling

SINK_POSITIONS = ("text", "in_cache")


@struct.dataclass
class SmallModelState:
    """A small model between two rounds.

    Attributes:
      cache: its own keys and values.
      lead: the newest committed tokens that it never ran: a leaf that was accepted, or another
        drafter's branch.
      sinks: the pinned keys before rotation, if they move with the ring; else None.
    """

    cache: KVCache | DraftCache
    lead: Lead
    sinks: SinkKeys | None


@struct.dataclass
class SmallModel:
    """A smaller model of the same vocabulary, on its full cache or a sparse one.

    With a policy it prefills in full, keeps `budget` entries of each layer and KV head, and from
    then on the newest of its own (MagicDec's stand-alone draft, arXiv 2408.11049).

    Attributes:
      model: as `magicjax.load` returns it.
      draw: how children are drawn under sampling (`DRAWINGS`); None: without replacement, and in
        a dynamic tree the most likely.
      policy: which entries of its own cache are pinned, a name or an object; full: all are kept.
      budget: C, the slots for each layer and KV head with another policy than full; None: 256.
      kv_dtype: of a sparse cache, as for `SelfSpeculation`.
      sink_positions: "text": pinned entries keep their place in the text. "in_cache": they are
        moved to just before the ring, so that a draft may read texts longer than its own context;
        for policy streaming and rotary positions. The prompt is prefilled through the same window.

    Raises:
      ValueError: an unknown policy or sink_positions; a budget or kv_dtype for a full cache;
        sink_positions="in_cache" with another policy than streaming, or with a kv_dtype.
      TypeError: policy is neither a name nor a policy, or budget is no whole number.
    """

    model: Model
    draw: str | None = struct.field(pytree_node=False, default=None)
    policy: Policy | str = struct.field(pytree_node=False, default="full")
    budget: int | None = struct.field(pytree_node=False, default=None)
    kv_dtype: str | None = struct.field(pytree_node=False, default=None)
    sink_positions: str = struct.field(pytree_node=False, default="text")

    def __post_init__(self):
        resolve(self, "keeps all of its cache")
        if self.sink_positions not in SINK_POSITIONS:
            raise ValueError(
                f"sink_positions={self.sink_positions!r} is unknown: use one of "
                f"{', '.join(SINK_POSITIONS)}"
            )
        if self._windowed and (not isinstance(self.policy, StreamingLLM) or self.kv_dtype):
            raise ValueError(
                "sink_positions='in_cache' moves the sinks of policy 'streaming', unquantized: "
                f"it cannot be used with policy={self.policy!r}, kv_dtype={self.kv_dtype!r}"
            )

    @property
    def _windowed(self) -> bool:
        return self.sink_positions == "in_cache"

    @property
    def sparse(self) -> Sparse | None:
        """How its cache is made sparse; None: it is not."""
        return sparse_of(self)

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises if vocabularies or tokenizers differ, or context or tree are too large."""
        if not isinstance(self.model, Model):
            raise TypeError(f"SmallModel needs what magicjax.load returns, not {self.model!r}")
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(
                f"the drafter's vocabulary has {ours} tokens and the target's {theirs}: "
                "they must be the same, so pick a drafter of the target's family"
            )
        drawing_of(self.draw, tree)
        check_width(tree, theirs)
        if self.model.tokenizer is not None and target.tokenizer is not None:
            _check_tokenizers(self.model, target)
        self._check_positions(context, depth)
        if self.sparse is not None:
            # A round commits a path behind a lead, which in an ensemble is as long.
            self.sparse.check(self.model, 2 * depth + 1, f"2 x tree depth ({depth}) + 1")

    def _check_positions(self, context: int, depth: int) -> None:
        config = self.model.config
        limit = config.max_positions
        if not self._windowed:
            if context > limit:
                raise ValueError(
                    f"prompt and new tokens need {context} positions and the drafter has {limit}: "
                    "use a drafter with a longer context, a shorter prompt, or policy='streaming' "
                    "with sink_positions='in_cache'"
                )
            return
        assert self.sparse is not None
        if getattr(config, "rope", None) is None:
            raise ValueError(
                "sink_positions='in_cache' needs a drafter with rotary positions, and this one "
                f"learned its {limit}: use sink_positions='text' and a context within them"
            )
        of_round = 2 * depth + 1
        needed, most = self.sparse.budget + of_round, limit - of_round
        if needed > limit:
            fits = self.sparse.policy.ring(most) >= of_round  # as `Sparse.check` will ask
            remedy = f"use a budget of at most {most}" if fits else "use a shallower tree"
            raise ValueError(
                f"budget={self.sparse.budget} and a round need {needed} positions and the drafter "
                f"has {limit}: {remedy}"
            )

    def shape(self, tree: Tree) -> Shape:
        return tree.shape

    def drawings(self, tree: Tree) -> set[str]:
        return {drawing_of(self.draw, tree)}

    def watch(self) -> Watch:
        return Watch()  # of the target's attention; its own is its own business

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        if self.sparse is not None:
            # Sinks that move are kept a second time, as keys before rotation.
            sinks = self.sparse.budget - self.sparse.ring if self._windowed else 0
            kept_twice = self.model.kv_bytes(batch, sinks) // 2
            return self.sparse.num_bytes(self.model, batch) + kept_twice
        return self.model.kv_bytes(batch, capacity)

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, seen: Seen, settings: Any
    ) -> SmallModelState:
        own, sinks = self._prefill(tokens, cache.lengths, settings)
        rows = cache.lengths.shape[0]
        nothing = Lead(jnp.zeros((rows, settings.lead), jnp.int32), jnp.zeros(rows, jnp.int32))
        return SmallModelState(own, nothing, sinks)

    def _prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], settings: Any
    ) -> tuple[KVCache | DraftCache, SinkKeys | None]:
        sparse = self.sparse
        if sparse is not None and self._windowed:
            sinks = sparse.budget - sparse.ring
            return prefill_window(self.model, tokens, lengths, settings, sinks, sparse.ring)
        watch = Watch() if sparse is None else sparse.watch()
        full, _, seen = prefill_cache(self.model, tokens, lengths, settings, watch)
        if sparse is None:
            return full, None
        return sparse.start(self.model, full, seen, settings.backend), None

    def propose(
        self,
        target: Model,
        state: SmallModelState,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Any,
    ) -> tuple[Proposal, Drafted]:
        source = Source(
            model=self.model,
            target=target,
            cache=state.cache,
            root=root,
            root_position=cache.lengths,
            sampling=sampling,
            lead=state.lead,
            drawing=drawing_of(self.draw, settings.tree),
            backend=settings.backend,
            index=settings.index,
        )
        return draft_tree(source, settings.tree)

    def commit(
        self,
        target: Model,
        state: SmallModelState,
        draft: Drafted,
        proposal: Proposal,
        of_round: Round,
    ) -> SmallModelState:
        """Returns the state with the lead and the kept nodes that were run; the others lead next.

        A node was run only if its parent was, so what was run is the beginning of the path.
        """
        path, kept = of_round.path, of_round.kept
        length, leads = path.shape[1], state.lead.tokens.shape[1]
        slots = jnp.take_along_axis(draft.slots, path, 1)
        has_run = (slots != NOT_RUN) & (jnp.arange(length) < kept[:, None])
        ran = has_run.sum(-1, dtype=jnp.int32)
        led = state.lead.count
        first_lead = draft.new[0][0].shape[1] - leads
        place = jnp.arange(leads + length)
        behind = jnp.clip(place - led[:, None], 0, length - 1)
        entries = jnp.maximum(jnp.take_along_axis(slots, behind, 1), 0)
        entries = jnp.where(place < led[:, None], first_lead + place, entries)
        count = jnp.where(kept > 0, led + ran, 0)
        missed = jnp.minimum(ran[:, None] + jnp.arange(leads), length - 1)
        missed = jnp.take_along_axis(path, missed, 1)
        lead = Lead(
            jnp.where(
                kept[:, None] > 0,
                jnp.take_along_axis(proposal.tokens, missed, 1),
                state.lead.tokens,
            ),
            jnp.where(kept > 0, kept - ran, led),
        )
        own, sinks = state.cache, state.sinks
        if isinstance(own, KVCache):
            return SmallModelState(full_cache.append(own, draft.new, entries, count), lead, sinks)
        before, own = own.count, append_ring(own, draft.new, entries, count)
        if sinks is not None:
            own, sinks = settle(self.model, own, sinks, before)
        return SmallModelState(own, lead, sinks)


def _check_tokenizers(drafter: Model, target: Model) -> None:
    ours, theirs = drafter.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    example = differing[0]
    raise ValueError(
        f"the drafter's tokenizer differs from the target's in {len(differing)} tokens, such as "
        f"{example!r} ({ours.get(example)} against {theirs.get(example)}): "
        "they must be the same, or a drafted token would mean another word"
    )
