"""Drafting a static tree level by level, as one `scan`: a chain is levels of width one.

A level runs the nodes of one depth that have children. Their keys and values go to a small block
beside the committed cache, so nothing is committed and nothing needs to be rolled back.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.drafters.draft_pass import NOT_RUN, Drafted, Source, run_root_with_lead, with_lead
from magicjax.kv_cache.attend import AttendLevel, empty_nodes
from magicjax.trees.proposal import Draws, Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, TokenTree
from magicjax.verification.sampling import draw, warp
from sharding import collectives
from sharding.collectives import Over


def top_tokens(logits: Float[Array, "B T V"], count: int, over: Over) -> Int[Array, "B T C"]:
    """Returns the `count` most likely tokens, best first; `over` divides the vocabulary."""
    if count == 1:  # argmax reads the logits once; top_k sorts
        return collectives.argmax(logits, over)[..., None]
    return collectives.top_k(logits, count, over)[1].astype(jnp.int32)


@struct.dataclass
class _Nodes:
    """The nodes so far: tokens [B, N], which could be drawn [B, N], and q [B, Q, V] or None."""

    tokens: Int[Array, "B N"]
    live: Bool[Array, "B N"]
    q: Float[Array, "B Q V"] | None


def draft_levels(source: Source, tree: TokenTree) -> tuple[Proposal, Drafted]:
    """Returns (the tree with the model's tokens, what was run for it).

    A node's children get its most likely next tokens, or tokens drawn from its distribution.
    """
    batch, n = source.root.shape[0], tree.num_nodes
    slots = n if source.lead is None else n + source.lead.tokens.shape[1]
    sees = jnp.concatenate([jnp.asarray(tree.mask), jnp.zeros((1, n), bool)])
    depth_of = jnp.concatenate([jnp.asarray(tree.node_depths), jnp.zeros(1, jnp.int32)])
    choose = _chooser(source, tree)

    def run_level(carry, nodes):
        drawn, drafted = carry
        mask = sees[nodes]
        if source.lead is not None:
            mask = with_lead(source.lead, jnp.broadcast_to(mask, (batch, *mask.shape)))
        places = jnp.where(nodes < n, nodes, slots)
        attend = AttendLevel(source.cache, drafted, places, mask, source.backend)
        fed = jnp.take(drawn.tokens, nodes, axis=1, mode="clip")
        positions = source.root_position[:, None] + depth_of[nodes]
        hidden, drafted = source.model(fed, positions, attend)
        return (choose(drawn, hidden, nodes), drafted), None

    carry = _begin(source, tree), empty_nodes(source.cache, slots, source.model.dtype)
    levels = jnp.asarray(tree.levels)
    if source.lead is not None:
        hidden, drafted = run_root_with_lead(source, carry[1], n)
        carry = choose(carry[0], hidden, jnp.zeros(1, jnp.int32)), drafted
        levels = levels[1:]
    (drawn, drafted), _ = jax.lax.scan(run_level, carry, levels)
    has_run = np.isin(np.arange(n), tree.inner)
    has_run[0] |= source.lead is not None  # of a tree without children too
    node_slots = jnp.asarray(np.where(has_run, np.arange(n), NOT_RUN).astype(np.int32))
    proposal = Proposal(drawn.tokens, tree.array, _draws(source, tree, drawn))
    return proposal, Drafted(drafted, jnp.broadcast_to(node_slots, (batch, n)))


def _begin(source: Source, tree: TokenTree) -> _Nodes:
    shape = (source.root.shape[0], tree.num_nodes)
    tokens = jnp.zeros(shape, jnp.int32).at[:, 0].set(source.root)
    q = None
    if source.draws:
        dtype = jnp.promote_types(source.model.dtype, jnp.float32)
        q = jnp.zeros((shape[0], len(tree.inner), source.target.own_vocab), dtype)
    return _Nodes(tokens, jnp.ones(shape, bool), q)


def _chooser(source: Source, tree: TokenTree):
    """Returns the function that gives nodes' children their tokens."""
    n, width = tree.num_nodes, max(1, tree.width)
    # Children by node, with a row for padding; absent ones are n, beyond the end: dropped.
    table = np.concatenate([tree.children, np.full((1, width), NO_NODE)])
    children = jnp.asarray(np.where(table < 0, n, table))
    place = np.full(n + 1, len(tree.inner))  # of a node's distribution
    place[list(tree.inner)] = np.arange(len(tree.inner))
    of_node = jnp.asarray(place)

    def choose(drawn: _Nodes, hidden: Float[Array, "B T E"], nodes: Int[Array, "T"]) -> _Nodes:
        logits, over = source.model.unembed(hidden), source.model.split.axes
        below = children[nodes]
        if drawn.q is None:
            best = top_tokens(logits, width, over)
            tokens = drawn.tokens.at[:, below].set(best, mode="drop")
            return _Nodes(tokens, drawn.live, drawn.q)
        assert source.sampling is not None
        q = warp(source.sampling, logits, over)
        tokens, live = draw(
            source.sampling,
            q,
            width,
            source.drawing == "with_replacement",
            source.root_position,
            nodes * width,
            source.index,
            over,
        )
        q = collectives.narrowed(q, over, source.target.split.axes)
        return _Nodes(
            drawn.tokens.at[:, below].set(tokens, mode="drop"),
            drawn.live.at[:, below].set(live, mode="drop"),
            drawn.q.at[:, of_node[nodes]].set(q, mode="drop"),
        )

    return choose


def _draws(source: Source, tree: TokenTree, drawn: _Nodes) -> Draws | None:
    """Returns the draws of a static tree: one for each node but the root, in order."""
    if source.sampling is None:
        return None
    shape = (source.root.shape[0], tree.num_nodes - 1)
    parent = jnp.broadcast_to(jnp.asarray(tree.array[1:]), shape)
    draws = deterministic_draws(parent, source.target.own_vocab)
    if drawn.q is None:
        return draws
    q_of = np.searchsorted(tree.inner, tree.array[1:]).astype(np.int32)
    return Draws(
        parent=jnp.where(drawn.live[:, 1:], parent, NO_NODE),
        node=draws.node,
        q_of=jnp.broadcast_to(jnp.asarray(q_of), shape),
        q=drawn.q,
        replacement=source.drawing == "with_replacement",
    )
