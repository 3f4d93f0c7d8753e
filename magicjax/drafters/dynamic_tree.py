"""Drafting trees, and those that grow where the draft is surest: one for each row and round."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.drafters.draft_pass import NOT_RUN, Drafted, Source, run_root_with_lead, with_lead
from magicjax.drafters.static_tree import draft_levels
from magicjax.kv_cache.attend import AttendLevel, empty_nodes
from magicjax.trees.proposal import Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, DynamicTree, Tree
from magicjax.verification.sampling import warp
from sharding import collectives


@struct.dataclass
class _Candidates:
    """All tokens drafted so far, best first below each parent, depth after depth.

    Attributes:
      tokens: int32 [B, M].
      score: [B, M], the log-probability of the path; -inf: there is no such token.
      parent: int32 [B, M], the entry of the parent, which was run.
      slot: int32 [B, M], its own entry, if it was run itself, else `NOT_RUN`.
    """

    tokens: Int[Array, "B M"]
    score: Float[Array, "B M"]
    parent: Int[Array, "B M"]
    slot: Int[Array, "B M"]


def draft_tree(source: Source, tree: Tree) -> tuple[Proposal, Drafted]:
    """Returns (the tree with the model's tokens, what was run for it), static or dynamic."""
    if isinstance(tree, DynamicTree):
        return grow_tree(source, tree)
    return draft_levels(source, tree)


def grow_tree(source: Source, tree: DynamicTree) -> tuple[Proposal, Drafted]:
    """Returns (for each row its own tree, what was run for it).

    Entry 0 is the root, then come `width` for each depth, the candidates that were run there.
    """
    batch, width = source.root.shape[0], tree.width
    entries = 1 + (tree.depth - 1) * width
    slots = entries if source.lead is None else entries + source.lead.tokens.shape[1]
    candidates, drafted = _run_root(source, tree, entries, slots)
    sees = jnp.broadcast_to(
        jnp.eye(entries, dtype=bool).at[:, 0].set(True), (batch, entries, entries)
    )

    def run_depth(carry, depth):
        candidates, sees, drafted = carry
        newest = _newest(tree, depth)
        score = jax.lax.dynamic_slice_in_dim(candidates.score, newest, width**2, 1)
        best, chosen = jax.lax.top_k(score, width)
        chosen = newest + chosen
        places = 1 + (depth - 1) * width + jnp.arange(width)
        parent = jnp.take_along_axis(candidates.parent, chosen, 1)
        above = jnp.take_along_axis(sees, parent[..., None], 1)
        own = above | jnp.eye(entries, dtype=bool)[places]
        sees = sees.at[:, places].set(own)
        mask = own if source.lead is None else with_lead(source.lead, own)
        attend = AttendLevel(source.cache, drafted, places, mask, source.backend)
        fed = jnp.take_along_axis(candidates.tokens, chosen, 1)
        positions = jnp.broadcast_to(source.root_position[:, None] + depth, fed.shape)
        hidden, drafted = source.model(fed, positions, attend)
        rows = jnp.arange(batch)[:, None]
        candidates = dataclasses.replace(
            candidates, slot=candidates.slot.at[rows, chosen].set(places)
        )
        below = _newest(tree, depth + 1)
        return (_add(source, candidates, hidden, best, places, below, width), sees, drafted), None

    carry = candidates, sees, drafted
    (candidates, _, drafted), _ = jax.lax.scan(run_depth, carry, jnp.arange(1, tree.depth))
    return _choose(source, tree, candidates, entries, drafted)


def _newest(tree: DynamicTree, depth):
    """Returns where the candidates of a depth begin: those of depth 1 are padded to as many."""
    return (depth - 1) * tree.width**2


def _run_root(source: Source, tree: DynamicTree, entries: int, slots: int):
    """Returns (the candidates with the root's children, what was run)."""
    drafted = empty_nodes(source.cache, slots, source.model.dtype)
    if source.lead is None:
        mask = jnp.arange(entries) == 0
        attend = AttendLevel(
            source.cache, drafted, jnp.zeros(1, jnp.int32), mask[None], source.backend
        )
        hidden, drafted = source.model(source.root[:, None], source.root_position[:, None], attend)
    else:
        hidden, drafted = run_root_with_lead(source, drafted, entries)
    shape = (source.root.shape[0], tree.depth * tree.width**2)
    empty = _Candidates(
        tokens=jnp.zeros(shape, jnp.int32),
        score=jnp.full(shape, -jnp.inf, jnp.float32),
        parent=jnp.zeros(shape, jnp.int32),
        slot=jnp.full(shape, NOT_RUN, jnp.int32),
    )
    start = jnp.zeros((shape[0], 1), jnp.float32)
    return _add(source, empty, hidden, start, jnp.zeros(1, jnp.int32), 0, tree.width), drafted


def _add(
    source: Source,
    candidates: _Candidates,
    hidden: Float[Array, "B T E"],
    score: Float[Array, "B T"],
    places: Int[Array, "T"],
    at,
    width: int,
) -> _Candidates:
    """Returns the candidates with the most likely children of the nodes that were just run."""
    batch, count = score.shape
    logits, over = source.model.unembed(hidden), source.model.split.axes
    if source.sampling is None:
        logp = collectives.log_softmax(logits.astype(jnp.float32), over)
    else:
        # At most 0 in spite of rounding: a child must not look likelier than its parent.
        logp = jnp.minimum(jnp.log(warp(source.sampling, logits, over)), 0).astype(jnp.float32)
    best, tokens = collectives.top_k(logp, width, over)
    parent = jnp.broadcast_to(places[None, :, None], tokens.shape)

    def put(old, new):
        new = new.reshape(batch, count * width).astype(old.dtype)
        return jax.lax.dynamic_update_slice_in_dim(old, new, at, 1)

    return dataclasses.replace(
        candidates,
        tokens=put(candidates.tokens, tokens),
        score=put(candidates.score, score[..., None] + best),
        parent=put(candidates.parent, parent),
    )


def _choose(source, tree, candidates, entries, drafted) -> tuple[Proposal, Drafted]:
    """Returns the best candidates as a tree.

    A child's path is never more probable than its parent's, and comes after it, so of equals
    `top_k` takes the parent first: what is chosen is a tree.
    """
    batch = source.root.shape[0]
    score, chosen = jax.lax.top_k(candidates.score, tree.nodes - 1)
    order = jnp.argsort(chosen)  # parents first, siblings best first
    chosen, score = (jnp.take_along_axis(x, order, 1) for x in (chosen, score))
    real: Bool[Array, "B M"] = score > -jnp.inf

    def of_chosen(x):
        return jnp.take_along_axis(x, chosen, 1)

    slot, rows = of_chosen(candidates.slot), jnp.arange(batch)[:, None]
    number = jnp.arange(1, tree.nodes, dtype=jnp.int32)
    # Which node an entry is; the root is entry 0 and node 0. Nodes not run go beyond the end.
    node_of = jnp.zeros((batch, entries), jnp.int32)
    place = jnp.where(slot == NOT_RUN, entries, slot)
    node_of = node_of.at[rows, place].set(jnp.broadcast_to(number, slot.shape), mode="drop")
    parent = jnp.take_along_axis(node_of, of_chosen(candidates.parent), 1)
    parent = jnp.where(real, parent, NO_NODE).astype(jnp.int32)
    tokens = jnp.concatenate([source.root[:, None], of_chosen(candidates.tokens)], 1)
    first = jnp.zeros((batch, 1), jnp.int32)
    draws = None
    if source.sampling is not None:
        draws = deterministic_draws(parent, source.target.own_vocab)
    proposal = Proposal(tokens, jnp.concatenate([first + NO_NODE, parent], 1), draws)
    return proposal, Drafted(drafted, jnp.concatenate([first, slot], 1))
