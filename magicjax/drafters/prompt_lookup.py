"""Look-up: the row's own text as the draft, no model (prompt look-up decoding, n-gram matching)."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax.drafters.base import Round
from magicjax.kv_cache.attention_stats import Seen, Watch
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.trees.merge import merge
from magicjax.trees.proposal import Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, Shape, TokenTree, Tree, chain
from magicjax.verification.sampling import Sampling

MAX_CHAINS = 64  # the shortest text buffer has as many slots


@struct.dataclass
class LookUpState:
    """A row's text between two rounds.

    Attributes:
      text: int32 [B, S], prompt and emitted tokens less the pending one; rubbish behind `count`.
      count: int32 [B].
    """

    text: Int[Array, "B S"]
    count: Int[Array, "B"]


@struct.dataclass
class LookUp:
    """Continues the text as it went on where its newest tokens stood before.

    Of all places the one that shares the most of the newest tokens is taken, of equals the latest;
    a tree of several chains below the root takes as many places. A row without a match proposes
    nothing. Beyond the text's end the continuation repeats its period. Source: prompt look-up
    decoding (Saxena, 2023).

    Attributes:
      max_ngram: how many of the newest tokens are compared at most.
      min_ngram: how many of them must match.

    Raises:
      ValueError: min_ngram < 1, or above max_ngram.
    """

    max_ngram: int = struct.field(pytree_node=False, default=4)
    min_ngram: int = struct.field(pytree_node=False, default=1)

    def __post_init__(self):
        for name in ("max_ngram", "min_ngram"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} and max_ngram={self.max_ngram}: "
                "min_ngram must be at least 1 and at most max_ngram"
            )

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError unless the tree is chains below the root, at most `MAX_CHAINS`."""
        if not isinstance(tree, TokenTree) or any(
            tree.parents.count(n) > 1 for n in tree.inner[1:]
        ):
            raise ValueError(
                f"a look-up proposes chains, and this tree branches below the root: {tree}\n"
                "use a chain, or an expansion such as 2,1,1"
            )
        if tree.parents.count(0) > MAX_CHAINS:
            raise ValueError(
                f"a look-up of {tree.parents.count(0)} chains: at most {MAX_CHAINS} are supported"
            )

    def shape(self, tree: Tree) -> Shape:
        return tree.shape

    def drawings(self, tree: Tree) -> set[str]:
        return {"top"}

    def watch(self) -> Watch:
        return Watch()

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return 0

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, seen: Seen, settings: Any
    ) -> LookUpState:
        text = jnp.pad(tokens, ((0, 0), (0, settings.capacity - tokens.shape[1])))
        return LookUpState(text, cache.lengths)

    def propose(
        self,
        target: Model,
        state: LookUpState,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Any,
    ) -> tuple[Proposal, None]:
        tree = settings.tree
        if tree.num_nodes == 1:
            return Proposal(root[:, None], tree.array), None
        text = state.text.at[jnp.arange(root.shape[0]), state.count].set(root)
        below, found = self.chains(text, state.count, tree)
        tokens = jnp.concatenate([root[:, None], below], 1)
        parents = jnp.where(found, jnp.asarray(tree.array[1:]), NO_NODE)
        draws = None
        if sampling is not None:
            draws = deterministic_draws(parents, target.own_vocab)
        parents = jnp.concatenate([jnp.full_like(root, NO_NODE)[:, None], parents], 1)
        proposal = Proposal(tokens, parents, draws)
        if tree.parents.count(0) > 1:  # places that go on alike are one branch
            proposal, _ = merge([proposal], tree.depth)
        return proposal, None

    def chains(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], tree: TokenTree
    ) -> tuple[Int[Array, "B D"], Bool[Array, "B D"]]:
        """Returns (the tokens of a tree's D = N - 1 nodes below the root, which of them there are).

        Args:
          text: of each row; rubbish behind its newest token.
          newest: the slot of that token, which is the root.
          tree: chains below the root.
        """
        place, found = self._places(text, newest, tree.parents.count(0))
        branch, depth = _branches(tree), tree.node_depths[1:]
        period = newest[:, None] + 1 - place[:, branch]
        at = place[:, branch] + (depth - 1) % jnp.maximum(period, 1)
        return jnp.take_along_axis(text, at, 1), found[:, branch]

    def _places(self, text, count, branches: int):
        """Returns (where the continuations begin [B, branches], whether there is such a place)."""
        rows, slots = jnp.arange(text.shape[0]), jnp.arange(text.shape[1])
        matched = jnp.zeros(text.shape, jnp.int32)
        going = (slots >= 1) & (slots <= count[:, None])
        for back in range(1, self.max_ngram + 1):
            newest = text[rows, jnp.maximum(count + 1 - back, 0)]
            going &= (jnp.roll(text, back, 1) == newest[:, None]) & (slots >= back)
            matched += going
        # Longer matches first, of equals the latest.
        score = jnp.where(matched >= self.min_ngram, matched * text.shape[1] + slots, -1)
        best, place = jax.lax.top_k(score.astype(jnp.int32), branches)
        return place, best >= 0

    def commit(
        self,
        target: Model,
        state: LookUpState,
        draft: None,
        proposal: Proposal,
        of_round: Round,
    ) -> LookUpState:
        tokens = jnp.take_along_axis(proposal.tokens, of_round.path, 1)
        write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        return LookUpState(write(state.text, tokens, state.count), state.count + of_round.kept)


@dataclasses.dataclass(frozen=True)
class Search:
    """What `accepted` is specialised on.

    Attributes:
      look_up, depth: who drafts, and how long chains.
      places: behind which it does, from each prompt's end on.
      mesh: none.
    """

    look_up: LookUp
    depth: int
    places: int
    mesh: None = None


def accepted(
    search: Search, text: Int[Array, "B S"], begins: Int[Array, "B"], ends: Int[Array, "B"]
) -> Int[Array, "P B"]:
    """Returns how many tokens of a chain behind each place are those that follow it in the text.

    Args:
      search: static.
      text: prompts and what came behind them; S is a chain longer than both.
      begins: where the prompts end; the first place is the token there.
      ends: where the text does.
    """
    tree, rows = chain(search.depth), jnp.arange(text.shape[0])[:, None]

    def count(place: Int[Array, ""]) -> Int[Array, "B"]:
        newest = jnp.minimum(begins + place, ends - 1)
        tokens, found = search.look_up.chains(text, newest, tree)
        behind = newest[:, None] + tree.node_depths[1:]
        right = (tokens == text[rows, behind]) & found & (behind < ends[:, None])
        return jnp.cumprod(right, axis=1).sum(1)

    return jax.lax.map(count, jnp.arange(search.places))


def _branches(tree: TokenTree) -> np.ndarray:
    """Returns which chain each node behind the root belongs to, int [N - 1]."""
    chain_of: dict[int, int] = {}
    for node, parent in enumerate(tree.parents[1:], 1):
        chain_of[node] = len(set(chain_of.values())) if parent == 0 else chain_of[parent]
    return np.array(list(chain_of.values()))
