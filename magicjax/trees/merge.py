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
    """Returns the union of several trees, and the merged node of each tree's nodes.

    Nodes with the same tokens from the root on become one node, the first of them. The merged tree
    has 1 + sum(N_i - 1) nodes, the unused ones at the end as padding. All draws are kept, tree
    after tree, each with its own distribution; several can name one node. Source: SpecInfer,
    definition 3.2.

    Below a common root, the tokens 5 6 (a chain) and 5 7 (a chain) merge to parents
    [-1, 0, 1, 1, -1] and tokens 5 6 7; the second tree's nodes 0 1 2 become 0 1 3.

    Args:
      proposals: with the same root.
      depth: the longest path in any of them, in edges.
    """
    tokens, parents, indices = _concatenated(proposals)
    batch, count = tokens.shape
    nodes = jnp.arange(count, dtype=jnp.int32)
    # Maps each node to the first node with the same path; iteration d is right up to depth d.
    first = jnp.broadcast_to(nodes, (batch, count))
    for _ in range(depth):
        parent = jnp.take_along_axis(first, jnp.maximum(parents, 0), 1)
        parent = jnp.where(parents == NO_NODE, -1 - nodes, parent)  # padding equals no other node
        same = (parent[:, :, None] == parent[:, None]) & (tokens[:, :, None] == tokens[:, None])
        first = same.argmax(-1).astype(jnp.int32)
    exists = ~token_tree.padding(parents)
    unique = exists & (first == nodes)
    number = jnp.cumsum(unique, -1, dtype=jnp.int32) - 1
    merged = jnp.where(exists, jnp.take_along_axis(number, first, 1), NO_NODE)

    rows = jnp.arange(batch)[:, None]
    index = jnp.where(unique, number, count)  # duplicates are dropped
    merged_parents = jnp.take_along_axis(merged, jnp.maximum(parents, 0), 1)
    merged_parents = jnp.where(parents == NO_NODE, NO_NODE, merged_parents)
    new_tokens = jnp.zeros_like(tokens).at[rows, index].set(tokens, mode="drop")
    new_parents = jnp.full((batch, count), NO_NODE, jnp.int32)
    new_parents = new_parents.at[rows, index].set(merged_parents, mode="drop")
    node_of = tuple(merged[:, i] for i in indices)
    return Proposal(new_tokens, new_parents, _merged_draws(proposals, node_of)), node_of


def _concatenated(
    proposals: Sequence[Proposal],
) -> tuple[Int[Array, "B N"], Int[Array, "B N"], list[Int[Array, "N_i"]]]:
    """Returns all nodes below one root: tokens, parents, and the indices of each tree's nodes."""
    batch = proposals[0].tokens.shape[0]
    tokens, indices = [proposals[0].tokens[:, :1]], []
    parents = [jnp.full((batch, 1), NO_NODE, jnp.int32)]
    begin = 1
    for proposal in proposals:
        tree_parents = jnp.broadcast_to(jnp.asarray(proposal.parents), proposal.tokens.shape)[:, 1:]
        count = tree_parents.shape[1]
        index = jnp.concatenate(
            [jnp.zeros(1, jnp.int32), begin + jnp.arange(count, dtype=jnp.int32)]
        )
        indices.append(index)
        tokens.append(proposal.tokens[:, 1:])
        merged_parents = index[jnp.maximum(tree_parents, 0)]
        parents.append(jnp.where(tree_parents == NO_NODE, NO_NODE, merged_parents))
        begin += count
    return jnp.concatenate(tokens, 1), jnp.concatenate(parents, 1), indices


def _merged_draws(
    proposals: Sequence[Proposal], node_of: Sequence[Int[Array, "B N_i"]]
) -> Draws | None:
    """Returns the draws of all trees, in order, with the numbers of merged nodes."""
    parents, nodes, q_indices, qs = [], [], [], []
    begin = 0
    for proposal, merged in zip(proposals, node_of, strict=True):
        draws = proposal.draws
        if draws is None:
            return None
        parent = jnp.take_along_axis(merged, jnp.maximum(draws.parent, 0), 1)
        parents.append(jnp.where(draws.parent == NO_NODE, NO_NODE, parent))
        nodes.append(jnp.take_along_axis(merged, draws.node, 1))
        q_indices.append(jnp.where(draws.q_index == ONE_HOT, ONE_HOT, draws.q_index + begin))
        qs.append(draws.q)
        begin += draws.q.shape[1]
    return Draws(
        parent=jnp.concatenate(parents, 1),
        node=jnp.concatenate(nodes, 1),
        q_index=jnp.concatenate(q_indices, 1),
        q=jnp.concatenate(qs, 1),
        replacement=any(p.draws is not None and p.draws.replacement for p in proposals),
    )
