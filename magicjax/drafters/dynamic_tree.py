"""Drafts dynamic trees: one for each row and round.

A dynamic tree of depth D and width W grows by D passes. The first runs the root, every later one
the W most probable of the W * W newest candidates; each node that runs adds W candidates, its most
likely next tokens. The candidates of the highest path probability become the tree. A row whose
newest candidates are all less probable than `min_prob` runs no more of them, and passes end when no
row does. With D = 3 and W = 2:
    pass   runs entries   adds candidates
    0      0 (the root)   0 1 (and 2 3, which stay empty)
    1      1 2            4 5 6 7
    2      3 4            8 9 10 11
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.drafters.draft_pass import (
    NOT_RUN,
    DraftContext,
    DraftedKV,
    run_root,
    see_backlog,
)
from magicjax.drafters.static_tree import draft_static_tree
from magicjax.kv_cache.attend import AttendLevel, empty_nodes
from magicjax.trees.proposal import Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, DynamicTree, Tree
from magicjax.verification.sampling import warp
from sharding import collectives


@struct.dataclass
class _Candidates:
    """The tokens drafted so far, M = D * W * W, by depth, parent and falling probability.

    Attributes:
      tokens: int32 [B, M].
      score: [B, M], the log-probability of the path; -inf for an empty candidate.
      parent: int32 [B, M], the entry of the parent.
      entry: int32 [B, M], its own entry, or `NOT_RUN`.
    """

    tokens: Int[Array, "B M"]
    score: Float[Array, "B M"]
    parent: Int[Array, "B M"]
    entry: Int[Array, "B M"]


def draft_dynamic_tree(context: DraftContext, tree: DynamicTree) -> tuple[Proposal, DraftedKV]:
    """Returns a tree for each row, and the R = 1 + (D - 1) * W entries and those of the backlog."""
    batch, width = context.root.shape[0], tree.width
    min_score = np.log(tree.min_prob) if tree.min_prob else -np.inf
    entries = 1 + (tree.depth - 1) * width
    candidates, drafted, outputs = _run_root(context, tree, entries)
    identity = jnp.eye(entries, dtype=bool)
    # Which entries each entry sees: itself, its ancestors and so always the root.
    visible = jnp.broadcast_to(identity.at[:, 0].set(True), (batch, entries, entries))

    def newest_of(candidates, depth):
        """Returns the scores of the candidates of a depth, and which rows run some of them."""
        first = _first_candidate(tree, depth)
        score = jax.lax.dynamic_slice_in_dim(candidates.score, first, width**2, 1)
        return score, context.runs & (score.max(-1) >= min_score)

    def cond(carry):
        depth, candidates, *_ = carry
        depth = jnp.minimum(depth, tree.depth - 1)
        runs = newest_of(candidates, depth)[1].any() & (carry[0] < tree.depth)
        layout = context.model.layout  # stages of one group can round a score differently
        return layout.any_running(layout.broadcast_decision(runs.astype(jnp.int32)) > 0)

    def run_depth(carry):
        depth, candidates, visible, drafted, outputs = carry
        newest = _first_candidate(tree, depth)
        score, runs = newest_of(candidates, depth)
        if tree.min_prob:
            score = jnp.where(runs[:, None], score, -jnp.inf)
        score, chosen = jax.lax.top_k(score, width)
        chosen = newest + chosen
        entry = 1 + (depth - 1) * width + jnp.arange(width)
        parent = jnp.take_along_axis(candidates.parent, chosen, 1)
        mask = jnp.take_along_axis(visible, parent[..., None], 1) | identity[entry]
        visible = visible.at[:, entry].set(mask)
        mask = see_backlog(context.backlog, mask)
        tokens = jnp.take_along_axis(candidates.tokens, chosen, 1)
        positions = jnp.broadcast_to(context.root_position[:, None] + depth, tokens.shape)
        attend = AttendLevel(
            context.cache, drafted, entry, mask, context.backend, positions=positions
        )
        rows = jnp.arange(batch)[:, None]
        features = None if outputs is None else outputs[rows, parent]
        live = jnp.broadcast_to(runs[:, None], tokens.shape)
        hidden, drafted = context.run(tokens, positions, attend, features, live)
        if outputs is not None:
            outputs = outputs.at[:, entry].set(hidden)
        ran = jnp.where(runs[:, None], entry, NOT_RUN) if tree.min_prob else entry
        candidates = dataclasses.replace(
            candidates, entry=candidates.entry.at[rows, chosen].set(ran)
        )
        first = _first_candidate(tree, depth + 1)
        candidates = _add_children(context, candidates, hidden, score, entry, first, width)
        return depth + 1, candidates, visible, drafted, outputs

    carry = jnp.int32(1), candidates, visible, drafted, outputs
    if tree.min_prob:
        _, candidates, _, drafted, _ = jax.lax.while_loop(cond, run_depth, carry)
    else:
        _, candidates, _, drafted, _ = jax.lax.fori_loop(
            1, tree.depth, lambda _, carry: run_depth(carry), carry
        )
    proposal, node_entries = _most_probable_tree(context, tree, candidates, entries)
    return proposal, DraftedKV(drafted, node_entries)


def _first_candidate(tree: DynamicTree, depth):
    """Returns the index of a depth's first candidate; every depth has room for W * W."""
    return (depth - 1) * tree.width**2


def _run_root(
    context: DraftContext, tree: DynamicTree, entries: int
) -> tuple[_Candidates, tuple, Float[Array, "B R E"] | None]:
    """Returns the candidates of depth 1, the entries with the root and the backlog, and outputs.

    Outputs are the hidden states of all entries, of which children's passes read their parent's;
    None for a model that is not a learned head.
    """
    drafted = empty_nodes(context.cache, entries + context.max_backlog, context.model.dtype)
    hidden, drafted = run_root(context, drafted, entries)
    shape = (context.root.shape[0], tree.depth * tree.width**2)
    empty = _Candidates(
        tokens=jnp.zeros(shape, jnp.int32),
        score=jnp.full(shape, -jnp.inf, jnp.float32),
        parent=jnp.zeros(shape, jnp.int32),
        entry=jnp.full(shape, NOT_RUN, jnp.int32),
    )
    score = jnp.zeros((shape[0], 1), jnp.float32)
    root = jnp.zeros(1, jnp.int32)
    outputs = None
    if context.feature is not None:
        outputs = jnp.zeros((shape[0], entries, hidden.shape[-1]), hidden.dtype)
        outputs = outputs.at[:, :1].set(hidden)
    return _add_children(context, empty, hidden, score, root, 0, tree.width), drafted, outputs


def _add_children(
    context: DraftContext,
    candidates: _Candidates,
    hidden: Float[Array, "B T E"],
    score: Float[Array, "B T"],
    parents: Int[Array, "T"],
    first,
    width: int,
) -> _Candidates:
    """Returns the candidates with the most likely children of T nodes, from index `first` on.

    The nodes have just run: `hidden`, `score` and `parents` are their hidden states, path
    log-probabilities and entries.
    """
    logits, axis_names = context.logits(hidden), context.model.split.axes
    if context.sampling is None:
        logp = collectives.log_softmax(logits.astype(jnp.float32), axis_names)
    else:
        # Rounding must not make a child more probable than its parent.
        p = warp(context.sampling, logits, axis_names)
        logp = jnp.minimum(jnp.log(p), 0).astype(jnp.float32)
    best, rows = collectives.top_k(logp, width, axis_names)
    tokens = context.model.draft_tokens(rows)

    def put(old, new):
        new = new.reshape(len(new), -1).astype(old.dtype)
        return jax.lax.dynamic_update_slice_in_dim(old, new, first, 1)

    return dataclasses.replace(
        candidates,
        tokens=put(candidates.tokens, tokens),
        score=put(candidates.score, score[..., None] + best),
        parent=put(candidates.parent, jnp.broadcast_to(parents[None, :, None], tokens.shape)),
    )


def _most_probable_tree(
    context: DraftContext, tree: DynamicTree, candidates: _Candidates, entries: int
) -> tuple[Proposal, Int[Array, "B N"]]:
    """Returns the N - 1 best candidates as a tree, and the entries of its nodes.

    A child's path is never more probable than its parent's, and comes after it. Among equals
    `top_k` takes the parent first, so the choice is always a tree.
    """
    batch = context.root.shape[0]
    score, chosen = jax.lax.top_k(candidates.score, tree.nodes - 1)
    order = jnp.argsort(chosen)  # parents first, siblings best first
    chosen, score = (jnp.take_along_axis(x, order, 1) for x in (chosen, score))
    exists: Bool[Array, "B N-1"] = (score > -jnp.inf) & context.runs[:, None]
    entry, parent, tokens = (
        jnp.take_along_axis(x, chosen, 1)
        for x in (candidates.entry, candidates.parent, candidates.tokens)
    )
    # Parents are known by entry; the tree needs node numbers. The root is entry 0 and node 0.
    rows, numbers = jnp.arange(batch)[:, None], jnp.arange(1, tree.nodes, dtype=jnp.int32)
    ran = jnp.where(entry == NOT_RUN, entries, entry)  # beyond the end: dropped
    node_at = jnp.zeros((batch, entries), jnp.int32)
    node_at = node_at.at[rows, ran].set(jnp.broadcast_to(numbers, entry.shape), mode="drop")
    parent = jnp.where(exists, jnp.take_along_axis(node_at, parent, 1), NO_NODE).astype(jnp.int32)
    root = jnp.zeros((batch, 1), jnp.int32)
    draws = None
    if context.sampling is not None:
        draws = deterministic_draws(parent, context.target.local_vocab)
    tokens = jnp.concatenate([context.root[:, None], tokens], 1)
    parents = jnp.concatenate([root + NO_NODE, parent], 1)
    return Proposal(tokens, parents, draws), jnp.concatenate([root, entry], 1)


def draft_tree(context: DraftContext, tree: Tree) -> tuple[Proposal, DraftedKV]:
    """Returns a static or dynamic tree with the draft model's tokens, and their keys and values."""
    if isinstance(tree, DynamicTree):
        return draft_dynamic_tree(context, tree)
    return draft_static_tree(context, tree)
