"""A cascade: a cheap drafter drafts for the target on a sparse cache, which drafts for the target.

In a round, the first drafter proposes a tree and the middle model verifies it, until the tokens
that the middle model emitted are a chain of G tokens. The target verifies this chain. With G = 4,
one row may take two passes of the middle model:
    first drafter      a tree below the root        a tree below c
    middle model       accepts a b, emits c         accepts d, emits e
    chain              root a b c                   root a b c d, of which e is dropped
Source: TriForce (arXiv 2404.11912), whose first drafter is a small model.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.drafters.base import Drafter, Previous, RoundOutcome, commit_checked
from magicjax.drafters.draft_pass import Backlog, DraftContext, see_backlog
from magicjax.drafters.eagle import Eagle
from magicjax.drafters.target_drafter import TargetDrafter
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import KV, AttendLevel, empty_nodes
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.model import Model
from magicjax.settings import Settings, StatsSpec
from magicjax.trees import token_tree
from magicjax.trees.proposal import Draws, Proposal
from magicjax.trees.token_tree import (
    NO_NODE,
    ROOT_ONLY,
    TokenTree,
    Tree,
    TreeShape,
    chain,
    check_tree,
)
from magicjax.verification import verify
from magicjax.verification.sampling import Sampling, keys_within_round, warp


@struct.dataclass
class CascadeState:
    """The states of both drafters between two rounds."""

    first: Any
    middle: Any


@struct.dataclass
class CascadeDraft:
    """What a commit needs of a round.

    Attributes:
      first: what the first drafter's commit needs of its first tree in the round, by the nodes of
        the chain.
      middle: what the middle drafter's commit needs.
      advanced: the first drafter's state after its commits within the round.
    """

    first: Any
    middle: Any
    advanced: Any


@struct.dataclass
class _Chain:
    """The tokens that the middle model has emitted in a round.

    Attributes:
      tokens: int32 [B, G + 1], the root first; undefined after `count` more.
      count: int32 [B], 0..G.
      q: [B, G, V], the distributions of the tokens after the root; None in greedy decoding.
      kv: for each layer of the middle model k, v [B, N + G + 1, K, D], of the N nodes of a pass,
        then of the chain's tokens before its last one.
      first: the first drafter's state after the chain's tokens before its last one.
    """

    tokens: Int[Array, "B G+1"]
    count: Int[Array, "B"]
    q: Float[Array, "B G V"] | None
    kv: KV
    first: Any

    @property
    def length(self) -> int:
        """G."""
        return self.tokens.shape[1] - 1

    @property
    def is_full(self) -> Bool[Array, "B"]:
        """Whether a row has all G tokens."""
        return self.count == self.length

    def extended(
        self, tokens: Int[Array, "B N"], result: verify.VerifyResult, q: Array | None, kv: KV
    ) -> "_Chain":
        """Returns the chain with the tokens of a pass; those after the first G are dropped.

        Args:
          tokens: tokens of the nodes.
          result: the accepted path and the bonus token.
          q: [B, A, V], the distributions of the emitted tokens; None in greedy decoding.
          kv: the entries, with those of the nodes filled in.
        """
        steps = jnp.arange(result.path.shape[1])
        rows = jnp.arange(len(tokens))[:, None]
        index = self.count[:, None] + steps
        kept = (steps <= result.accepted[:, None]) & (index < self.length)
        index = jnp.where(kept, index, jax.tree.leaves(kv)[0].shape[1])  # beyond the end: dropped

        def put(old, new, indices):
            return old.at[rows, indices].set(new, mode="drop")

        entries_index = tokens.shape[1] + index
        return dataclasses.replace(
            self,
            tokens=put(self.tokens, result.emitted(tokens), index + 1),
            count=jnp.minimum(self.count + result.accepted + 1, self.length),
            q=None if self.q is None else put(self.q, q, index),
            kv=jax.tree.map(lambda entries: _keep_path(entries, result.path, entries_index), kv),
        )

    def proposal(self) -> Proposal:
        """Returns the chain of each row, padded to G tokens."""
        steps = jnp.arange(self.length, dtype=jnp.int32)
        below = jnp.where(steps < self.count[:, None], steps, NO_NODE)
        parents = jnp.concatenate([jnp.full_like(below[:, :1], NO_NODE), below], 1)
        draws = None
        if self.q is not None:
            steps = jnp.broadcast_to(steps, below.shape)
            draws = Draws(parent=below, node=steps + 1, q_index=steps, q=self.q)
        return Proposal(self.tokens, parents, draws)


@jax.jit  # traced once for all layers
def _keep_path(entries: Array, path: Int[Array, "B A"], index: Int[Array, "B A"]) -> Array:
    """Returns the entries [B, R, ...] with those of a path also at `index`."""
    rows = jnp.arange(len(path))[:, None]
    kept = jnp.take_along_axis(entries, path.reshape(*path.shape, *[1] * (entries.ndim - 2)), 1)
    return entries.at[rows, index].set(kept, mode="drop")


@dataclasses.dataclass(frozen=True)
class _RoundSetup:
    """What the passes of a round have in common.

    Attributes:
      target, cache: the target, and its cache.
      context: the middle model's context.
      sampling: how each row samples, with the keys of this round; None: greedy.
      settings: the first drafter's settings.
    """

    target: Model
    cache: KVCache
    context: DraftContext
    sampling: Sampling | None
    settings: Settings


@struct.dataclass
class Cascade(Drafter):
    """A drafter whose tokens the target on a sparse cache, or a quantized copy, verifies first.

    Under sampling the chain's tokens are drawn from the middle model's distributions, because `mss`
    verifies them within the round, with random numbers of its own; the target's verifier is given
    these distributions. Whether a token of the chain exists depends only on the tokens before it
    and on random numbers that are independent of it, given these tokens. So every token that exists
    has its distribution, also in chains of several lengths.

    Attributes:
      first: proposes to the middle model: `PromptLookup`, `SuffixLookup`, `SmallModel`, `Eagle`,
        `MTP`, or an `Ensemble` of them.
      middle: `SelfSpeculation`, `FullCacheSpeculation` or `PageRetrieval`, without a `draw`.
      first_tree: the tree that `first` drafts, as often as the chain passed to `generate` needs.
        None: `first` drafts the tree passed to `generate` once, and the chain has a token more
        than the tree's depth.

    Raises:
      ValueError: another first or middle drafter, a middle drafter with a draw, or an ensemble with
        trees.
      TypeError: first_tree is not a tree.
    """

    first: Drafter
    middle: TargetDrafter
    first_tree: Tree | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        super().__post_init__()
        first, middle = self.first, self.middle
        for drafter in (first, *first.members()) if isinstance(first, Drafter) else (first,):
            if getattr(type(drafter), "rewind", Drafter.rewind) is Drafter.rewind:
                raise ValueError(
                    f"first={type(drafter).__name__}: it cannot draft within a round, because it "
                    "does not define `rewind`; use PromptLookup, SuffixLookup, SmallModel, Eagle, "
                    "MTP, or an Ensemble"
                )
        if not isinstance(middle, TargetDrafter):
            raise ValueError(
                f"middle={type(middle).__name__}: it does not run the target; use SelfSpeculation, "
                "FullCacheSpeculation or PageRetrieval"
            )
        if middle.draw is not None:
            raise ValueError(
                f"draw={middle.draw!r} of the middle drafter has no effect, because it emits its "
                "own tokens: omit draw"
            )
        if getattr(first, "trees", None) is not None:
            raise ValueError(
                "the ensemble has a tree for each drafter, and a cascade drafts one tree: omit its "
                "trees, and give first_tree"
            )
        if self.first_tree is not None:
            check_tree(self.first_tree)

    def _trees(self, tree: Tree) -> tuple[Tree, TokenTree]:
        """Returns the trees of the first drafter and of the target, which is a chain.

        Raises:
          ValueError: `tree` is not a chain, and the first drafter has another tree.
        """
        if tree.num_nodes == 1:  # nothing is drafted
            return ROOT_ONLY, ROOT_ONLY
        if self.first_tree is None:
            return tree, chain(self.first.shape(tree).depth + 1)
        if not isinstance(tree, TokenTree) or tree.width > 1:
            raise ValueError(
                f"the target of a cascade verifies a chain: use chain:{tree.depth} instead of\n"
                f"{tree}"
            )
        return self.first_tree, tree

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if the first tree is only a root or too deep, or as its drafters."""
        first_tree, target_tree = self._trees(tree)
        if first_tree.num_nodes < 2:
            raise ValueError("first_tree has only a root: give it a child")
        if first_tree.depth > target_tree.depth:
            raise ValueError(
                f"the first drafter's tree has depth {first_tree.depth}, and the target verifies "
                f"a chain of {target_tree.depth}: use at least chain:{first_tree.depth} for the "
                "target, or a shallower first tree"
            )
        learned_heads = [drafter for drafter in self.first.members() if isinstance(drafter, Eagle)]
        if learned_heads and self.middle.layers is not None:
            raise ValueError(
                f"the first drafter is a learned head, which reads inputs of all layers, and "
                f"the middle one has layers={self.middle.layers!r} only: omit layers, or use "
                "another first drafter"
            )
        self.first.check(target, first_tree, depth, context)
        self.middle.check(target, target_tree, depth, context)

    def draw_methods(self, tree: Tree) -> set[str]:
        """Returns those of the first drafter: the chain has one draw below a node."""
        return self.first.draw_methods(self._trees(tree)[0])

    def for_target(self, target: Model) -> "Cascade":
        first, middle = self.first.for_target(target), self.middle.for_target(target)
        return dataclasses.replace(self, first=first, middle=middle)

    def shape(self, tree: Tree) -> TreeShape:
        return self._trees(tree)[1].shape

    def stats_spec(self) -> StatsSpec:
        return self.first.stats_spec() | self.middle.stats_spec()

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        drafters = self.first, self.middle
        return sum(drafter.cache_bytes(target, batch, capacity) for drafter in drafters)

    def state_bytes(self, batch: int) -> int:
        return self.first.state_bytes(batch) + self.middle.state_bytes(batch)

    @property
    def remembers(self) -> bool:
        return self.first.remembers

    def remember(self, text: Any, prompt: int = 0) -> "Cascade":
        return dataclasses.replace(self, first=self.first.remember(text, prompt))

    def members(self) -> tuple[Drafter, ...]:
        return *self.first.members(), self.middle

    def _with_settings(self, settings: Settings) -> tuple[Settings, Settings]:
        """Returns the settings of the first and the middle drafter."""
        first_tree, target_tree = self._trees(settings.tree)
        first = dataclasses.replace(settings, tree=first_tree, max_backlog=target_tree.depth)
        return first, dataclasses.replace(settings, tree=target_tree)

    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> CascadeState:
        first, middle = self._with_settings(settings)
        previous_first = previous_middle = None
        if previous is not None:
            previous_first = Previous(previous.state.first, previous.reused)
            previous_middle = Previous(previous.state.middle, previous.reused)
        return CascadeState(
            self.first.prefill(target, tokens, cache, stats, first, previous_first),
            self.middle.prefill(target, tokens, cache, stats, middle, previous_middle),
        )

    def propose(
        self,
        target: Model,
        state: CascadeState,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, CascadeDraft]:
        first, middle = self._with_settings(settings)
        context, middle_draft = self.middle.draft_context(
            target, state.middle, root, cache, sampling, middle
        )
        if middle.tree.num_nodes == 1:
            proposal, draft = self.first.propose(target, state.first, root, cache, sampling, first)
            return proposal, CascadeDraft(draft, middle_draft, state.first)
        if sampling is not None:
            keys = keys_within_round(sampling.keys, cache.lengths)
            sampling = dataclasses.replace(sampling, keys=keys)
        setup = _RoundSetup(target, cache, context, sampling, first)
        root_chain = self._root_chain(setup, state.first, middle.tree.depth)
        extended, draft = self._extend(setup, root_chain)
        if self.first_tree is None:
            return extended.proposal(), CascadeDraft(draft, middle_draft, state.first)
        full = jax.lax.while_loop(
            lambda chain: target.layout.any_running(~chain.is_full.all()),
            lambda chain: self._extend(setup, chain)[0],
            extended,
        )
        return full.proposal(), CascadeDraft(draft, middle_draft, full.first)

    def _root_chain(self, setup: _RoundSetup, first: Any, length: int) -> _Chain:
        """Returns the chain of only the root."""
        context, rows = setup.context, setup.context.root.shape[0]
        q = None
        if setup.sampling is not None:
            dtype = jnp.promote_types(context.model.dtype, jnp.float32)
            q = jnp.zeros((rows, length, setup.target.local_vocab), dtype)
        nodes = self.first.shape(setup.settings.tree).num_nodes
        return _Chain(
            tokens=jnp.zeros((rows, length + 1), jnp.int32).at[:, 0].set(context.root),
            count=jnp.zeros(rows, jnp.int32),
            q=q,
            kv=empty_nodes(context.cache, nodes + length + 1, context.model.dtype),
            first=first,
        )

    def _extend(self, setup: _RoundSetup, chain: _Chain) -> tuple[_Chain, Any]:
        """Returns the chain after a tree of the first drafter and a pass of the middle model.

        Rows whose chain has G tokens already stay the same. The second result is what the first
        drafter needs to commit the tree, by the nodes of the chain, if the chain was only a root.
        """
        target, sampling, axis_names = setup.target, setup.sampling, setup.target.split.axes
        proposal, draft, cache = self._draft(setup, chain)
        logits, kv, layer_inputs = self._score(setup.context, chain, proposal, cache.lengths)
        verifier = "greedy" if sampling is None else "mss"
        depth = self.first.shape(setup.settings.tree).depth
        result = verify.verify_tree(
            verifier, logits, proposal, depth, sampling, cache.lengths, axis_names
        )
        result = target.layout.broadcast_decision(result)
        q = None
        if sampling is not None:
            q = warp(sampling, result.along_path(logits), axis_names)
        committed = jnp.where(chain.is_full, 0, result.accepted + 1)
        committed = committed + full_cache.zero_after(result.bonus)
        nodes_kv = jax.tree.map(lambda x: x[:, : proposal.tokens.shape[1]], kv)
        cache = dataclasses.replace(cache, lengths=cache.lengths + committed)
        outcome = RoundOutcome(
            result.path, committed, nodes_kv, (), layer_inputs, cache, setup.settings.backend
        )
        first = commit_checked(self.first, target, chain.first, draft, proposal, outcome)
        extended = dataclasses.replace(chain.extended(proposal.tokens, result, q, kv), first=first)
        node_of = _nodes_of_chain(result, proposal.tokens.shape[1])
        return extended, self.first.renumber(draft, node_of, chain.length + 1)

    def _draft(self, setup: _RoundSetup, chain: _Chain) -> tuple[Proposal, Any, KVCache]:
        """Returns the first drafter's tree below the chain's last token, and its draft.

        The third result is the target's cache with the lengths that it would have there; it lacks
        the chain's entries.
        """
        target = setup.target
        root = jnp.take_along_axis(chain.tokens, chain.count[:, None], 1)[:, 0]
        cache = dataclasses.replace(setup.cache, lengths=setup.cache.lengths + chain.count)
        proposal, draft = self.first.propose(
            target, chain.first, root, cache, setup.sampling, setup.settings
        )
        proposal = proposal.in_vocabulary(root, target.config.vocab_size)
        decision = target.layout.broadcast_decision((proposal.tokens, proposal.parents))
        proposal = dataclasses.replace(proposal, tokens=decision[0], parents=decision[1])
        return proposal.root_only(chain.is_full), draft, cache

    def _score(
        self, context: DraftContext, chain: _Chain, proposal: Proposal, position: Int[Array, "B"]
    ) -> tuple[Float[Array, "B N V"], KV, dict[int, Array]]:
        """Returns the middle model's logits at the nodes, the entries, and its layers' inputs.

        The nodes see the middle model's cache, their ancestors, and the chain before the root of
        their tree, which is at `position`.
        """
        rows, nodes = proposal.tokens.shape
        mask = jnp.asarray(token_tree.ancestor_mask(proposal.parents))
        backlog = Backlog(chain.tokens, chain.count)  # its entries too come after the nodes'
        mask = see_backlog(backlog, jnp.broadcast_to(mask, (rows, nodes, nodes)))
        positions = position[:, None] + token_tree.depths(proposal.parents)
        positions = jnp.broadcast_to(positions, proposal.tokens.shape)
        attend = AttendLevel(
            context.cache, chain.kv, jnp.arange(nodes), mask, context.backend, positions=positions
        )
        layers = self.first.stats_spec().layer_inputs
        hidden, kv, layer_inputs = context.model(proposal.tokens, positions, attend, layers)
        return context.model.unembed(hidden), kv, layer_inputs

    def commit(
        self,
        target: Model,
        state: CascadeState,
        draft: CascadeDraft,
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> CascadeState:
        """Returns the states after the committed tokens.

        The first drafter commits from its state before the round. What its first tree did not
        include is the next backlog of a small model.
        """
        first = self.first.rewind(state.first, draft.advanced)
        return CascadeState(
            commit_checked(self.first, target, first, draft.first, proposal, outcome),
            commit_checked(self.middle, target, state.middle, draft.middle, proposal, outcome),
        )

    def insert(self, state: CascadeState, row: CascadeState, slot: Int[Array, ""]) -> CascadeState:
        return CascadeState(
            self.first.insert(state.first, row.first, slot),
            self.middle.insert(state.middle, row.middle, slot),
        )

    def extract(self, state: CascadeState, slot: Int[Array, ""]) -> CascadeState:
        return CascadeState(
            self.first.extract(state.first, slot),
            self.middle.extract(state.middle, slot),
        )


def _nodes_of_chain(result: verify.VerifyResult, nodes: int) -> Int[Array, "B N"]:
    """Returns the node of the chain that each node of the first tree is; `NO_NODE` off the path.

    The path 0 2 2 of N = 4 nodes, of which one was accepted, gives [0, -1, 1, -1].
    """
    steps = jnp.arange(result.path.shape[1], dtype=jnp.int32)
    path = jnp.where(steps <= result.accepted[:, None], result.path, nodes)  # else dropped
    rows = jnp.arange(len(path))[:, None]
    empty = jnp.full((len(path), nodes), NO_NODE, jnp.int32)
    return empty.at[rows, path].set(jnp.broadcast_to(steps, path.shape), mode="drop")
