"""Drafting a static tree level by level, as one `scan`; a chain has levels of width one.

A level is the nodes of one depth that have children. The tree [-1, 0, 0, 1, 1] has the levels [0]
and [1]: two passes, of one token each, choose the tokens of nodes 1, 2 and of nodes 3, 4.
"""

from collections.abc import Callable

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
from magicjax.kv_cache.attend import AttendLevel, empty_nodes
from magicjax.trees.proposal import Draws, Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, TokenTree
from magicjax.verification.sampling import draw, warp
from sharding import collectives
from sharding.collectives import AxisNames


def top_tokens(
    logits: Float[Array, "B T V"], count: int, axis_names: AxisNames
) -> Int[Array, "B T C"]:
    """Returns the `count` most likely tokens, best first; `axis_names` shards the vocabulary."""
    if count == 1:  # argmax reads the logits once; top_k sorts
        return collectives.argmax(logits, axis_names)[..., None]
    return collectives.top_k(logits, count, axis_names)[1].astype(jnp.int32)


@struct.dataclass
class _Nodes:
    """The nodes drafted so far.

    Attributes:
      tokens: int32 [B, N].
      live: bool [B, N], False where no token was left to draw.
      q: [B, Q, V], the distributions that the children of the Q inner nodes are drawn from; None
        if nothing is drawn at random.
    """

    tokens: Int[Array, "B N"]
    live: Bool[Array, "B N"]
    q: Float[Array, "B Q V"] | None


def draft_static_tree(context: DraftContext, tree: TokenTree) -> tuple[Proposal, DraftedKV]:
    """Returns the tree with the draft model's tokens, and their keys and values.

    A node's children get its most likely next tokens, or tokens drawn from its distribution.
    """
    batch, n = context.root.shape[0], tree.num_nodes
    size = n + context.max_backlog
    # Levels are padded with node n, which sees nothing and has depth 0.
    visible = jnp.concatenate([jnp.asarray(tree.mask), jnp.zeros((1, n), bool)])
    node_depths = jnp.concatenate([jnp.asarray(tree.node_depths), jnp.zeros(1, jnp.int32)])
    choose = _child_chooser(context, tree)
    parent_of = jnp.asarray(np.maximum([*tree.parents, NO_NODE], 0))
    is_head = context.feature is not None
    root_first = is_head or context.backlog is not None or context.root_pass is not None

    def run_level(carry, level):
        nodes, drafted, outputs = carry
        mask = see_backlog(context.backlog, visible[level])
        entries = jnp.where(level < n, level, size)  # padding is dropped
        tokens = jnp.take(nodes.tokens, level, axis=1, mode="clip")
        positions = context.root_position[:, None] + node_depths[level]
        attend = AttendLevel(
            context.cache, drafted, entries, mask, context.backend, positions=positions
        )
        features = outputs[:, parent_of[level]] if is_head else None
        live = jnp.broadcast_to(level < n, tokens.shape)
        hidden, drafted = context.run(tokens, positions, attend, features, live)
        if is_head:
            outputs = outputs.at[:, level].set(hidden, mode="drop")
        return (choose(nodes, hidden, level), drafted, outputs), None

    nodes, drafted = (
        _root_only(context, tree),
        empty_nodes(context.cache, size, context.model.dtype),
    )
    levels, outputs = jnp.asarray(tree.levels), None  # [B, N, E], of the nodes of a learned head
    if root_first:
        hidden, drafted = run_root(context, drafted, n)
        if is_head:
            outputs = jnp.zeros((batch, n, hidden.shape[-1]), hidden.dtype).at[:, :1].set(hidden)
        nodes, levels = choose(nodes, hidden, jnp.zeros(1, jnp.int32)), levels[1:]
    if len(levels):  # there is none in a tree of only the root
        (nodes, drafted, _), _ = jax.lax.scan(run_level, (nodes, drafted, outputs), levels)
    has_run = np.isin(np.arange(n), tree.inner)
    has_run[0] |= root_first  # even in a tree of only the root
    entries = jnp.asarray(np.where(has_run, np.arange(n), NOT_RUN).astype(np.int32))
    proposal = Proposal(nodes.tokens, tree.array, _draws(context, tree, nodes))
    return proposal, DraftedKV(drafted, jnp.broadcast_to(entries, (batch, n)))


def _root_only(context: DraftContext, tree: TokenTree) -> _Nodes:
    shape = (context.root.shape[0], tree.num_nodes)
    tokens = jnp.zeros(shape, jnp.int32).at[:, 0].set(context.root)
    q = None
    if context.draws:
        dtype = jnp.promote_types(context.model.dtype, jnp.float32)
        q = jnp.zeros((shape[0], len(tree.inner), context.target.local_vocab), dtype)
    return _Nodes(tokens, jnp.ones(shape, bool), q)


def _child_chooser(context: DraftContext, tree: TokenTree) -> Callable[..., _Nodes]:
    """Returns a function (nodes, hidden, level) that sets the tokens of the level's children."""
    n, width = tree.num_nodes, max(1, tree.width)
    # [N + 1, width]; absent children, and those of padding, are n, beyond the end: dropped.
    table = np.concatenate([tree.children, np.full((1, width), NO_NODE)])
    children_of = jnp.asarray(np.where(table < 0, n, table))
    index = np.full(n + 1, len(tree.inner))
    index[list(tree.inner)] = np.arange(len(tree.inner))
    q_index = jnp.asarray(index)

    def choose(nodes: _Nodes, hidden: Float[Array, "B T E"], level: Int[Array, "T"]) -> _Nodes:
        model, axis_names = context.model, context.model.split.axes
        children = children_of[level]
        if nodes.q is None:
            best = top_tokens(context.logits(hidden), width, axis_names)
            tokens = nodes.tokens.at[:, children].set(model.draft_tokens(best), mode="drop")
            return _Nodes(tokens, nodes.live, nodes.q)
        assert context.sampling is not None
        q = warp(context.sampling, context.logits(hidden), axis_names)
        rows, live = draw(
            context.sampling,
            q,
            width,
            context.draw_method == "with_replacement",
            context.root_position,
            level * width,
            context.drafter_index,
            axis_names,
        )
        return _Nodes(
            nodes.tokens.at[:, children].set(model.draft_tokens(rows), mode="drop"),
            nodes.live.at[:, children].set(live, mode="drop"),
            nodes.q.at[:, q_index[level]].set(context.over_target(q), mode="drop"),
        )

    return choose


def _draws(context: DraftContext, tree: TokenTree, nodes: _Nodes) -> Draws | None:
    """Returns one draw for each node but the root, in order; None in greedy decoding."""
    if context.sampling is None:
        return None
    shape = (context.root.shape[0], tree.num_nodes - 1)
    parent = jnp.broadcast_to(jnp.asarray(tree.array[1:]), shape)
    draws = deterministic_draws(parent, context.target.local_vocab)
    if nodes.q is None:
        return draws
    q_index = np.searchsorted(tree.inner, tree.array[1:]).astype(np.int32)
    return Draws(
        parent=jnp.where(nodes.live[:, 1:], parent, NO_NODE),
        node=draws.node,
        q_index=jnp.broadcast_to(jnp.asarray(q_index), shape),
        q=nodes.q,
        replacement=context.draw_method == "with_replacement",
    )
