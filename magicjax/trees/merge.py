"""Merging token trees: the union of their root-to-node sequences, each prefix scored once."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from magicjax.trees import token_tree
from magicjax.trees.proposal import ONE_HOT, Draws, Proposal
from magicjax.trees.token_tree import NO_NODE


def merge(
    proposals: Sequence[Proposal], depth: int
) -> tuple[Proposal, tuple[Int[Array, "B N_i"], ...]]:
    """Returns (one proposal of 1 + sum(N_i - 1) nodes, the merged node of each node given).

    Nodes with the same tokens from the root on become one node, the first of them; what that frees
    is padding at the end. No draw is dropped: they come in the order given, tree after tree, each
    with its own distribution, several perhaps naming one node. Source: SpecInfer, definition 3.2.

    Args:
      proposals: with the same root.
      depth: the most edges of a path in any of them.
    """
    batch = proposals[0].tokens.shape[0]
    tokens, parents, origin = _joined(proposals)
    count = tokens.shape[1]
    nodes = jnp.arange(count, dtype=jnp.int32)
    # The first node with the same path, for one depth after the other: padding stands for itself.
    first = jnp.broadcast_to(nodes, (batch, count))
    for _ in range(depth):
        above = jnp.take_along_axis(first, jnp.maximum(parents, 0), 1)
        above = jnp.where(parents == NO_NODE, -1 - nodes, above)  # like no other's
        same = (above[:, :, None] == above[:, None]) & (tokens[:, :, None] == tokens[:, None])
        first = same.argmax(-1).astype(jnp.int32)
    real = ~token_tree.padding(parents)
    unique = real & (first == nodes)
    number = jnp.cumsum(unique, -1, dtype=jnp.int32) - 1
    merged = jnp.where(real, jnp.take_along_axis(number, first, 1), NO_NODE)

    rows = jnp.arange(batch)[:, None]
    place = jnp.where(unique, number, count)
    above = jnp.take_along_axis(merged, jnp.maximum(parents, 0), 1)
    above = jnp.where(parents == NO_NODE, NO_NODE, above)
    new_tokens = jnp.zeros_like(tokens).at[rows, place].set(tokens, mode="drop")
    new_parents = (
        jnp.full((batch, count), NO_NODE, jnp.int32).at[rows, place].set(above, mode="drop")
    )
    node_of = tuple(
        jnp.take_along_axis(merged, jnp.broadcast_to(o, (batch, len(o))), 1) for o in origin
    )
    return Proposal(new_tokens, new_parents, _draws(proposals, node_of)), node_of


def _joined(proposals):
    """Returns (tokens, parents) of all nodes, one root, and which of them each tree's nodes are."""
    batch = proposals[0].tokens.shape[0]
    tokens, parents, origin = (
        [proposals[0].tokens[:, :1]],
        [jnp.full((batch, 1), NO_NODE, jnp.int32)],
        [],
    )
    begin = 1
    for proposal in proposals:
        own = jnp.broadcast_to(jnp.asarray(proposal.parents), proposal.tokens.shape)[:, 1:]
        place = jnp.concatenate(
            [jnp.zeros(1, jnp.int32), begin + jnp.arange(own.shape[1], dtype=jnp.int32)]
        )
        origin.append(place)
        tokens.append(proposal.tokens[:, 1:])
        parents.append(jnp.where(own == NO_NODE, NO_NODE, place[jnp.maximum(own, 0)]))
        begin += own.shape[1]
    return jnp.concatenate(tokens, 1), jnp.concatenate(parents, 1), origin


def _draws(proposals, node_of) -> Draws | None:
    """Returns all draws, tree after tree, in terms of the merged nodes."""
    if any(p.draws is None for p in proposals):
        return None
    at, node, q_of, begin = [], [], [], 0
    for proposal, merged in zip(proposals, node_of, strict=True):
        draws = proposal.draws
        none = draws.parent == NO_NODE
        at.append(
            jnp.where(none, NO_NODE, jnp.take_along_axis(merged, jnp.maximum(draws.parent, 0), 1))
        )
        node.append(jnp.take_along_axis(merged, draws.node, 1))
        q_of.append(jnp.where(draws.q_of == ONE_HOT, ONE_HOT, draws.q_of + begin))
        begin += draws.q.shape[1]
    return Draws(
        parent=jnp.concatenate(at, 1),
        node=jnp.concatenate(node, 1),
        q_of=jnp.concatenate(q_of, 1),
        q=jnp.concatenate([p.draws.q for p in proposals], 1),
        replacement=any(p.draws.replacement for p in proposals),
    )
