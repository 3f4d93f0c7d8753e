"""Drafting a static tree greedily, level by level, as one `scan`: a chain is levels of width one.

A level runs the nodes of one depth that have children. Their keys and values go to a small block
beside the committed cache, so nothing is committed and nothing needs to be rolled back.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from magicjax.attention import attend_level, empty_nodes
from magicjax.cache import DraftCache, KVCache
from magicjax.model import Model
from magicjax.tree import TokenTree


def top_tokens(logits: Float[Array, "B T V"], count: int) -> Int[Array, "B T C"]:
    """Returns the `count` most likely tokens, best first."""
    if count == 1:  # argmax reads the logits once; top_k sorts
        return logits.argmax(-1, keepdims=True).astype(jnp.int32)
    return jax.lax.top_k(logits, count)[1].astype(jnp.int32)


def draft_tree(
    model: Model,
    cache: KVCache | DraftCache,
    tree: TokenTree,
    root: Int[Array, "B"],
    root_position: Int[Array, "B"],
    backend: str | None,
    lead: tuple[Int[Array, "B"], Bool[Array, "B"]] | None = None,
) -> tuple[Int[Array, "B N"], tuple]:
    """Returns (the nodes' tokens, keys and values of every node that was run).

    A node's children get its most likely next tokens, in order.

    Args:
      model: the drafter's model.
      cache: its committed prefix.
      tree: static shape.
      root: the pending tokens.
      root_position: their positions in the text.
      backend: of the attention.
      lead: (token, whether a row needs it): a committed token whose keys and values the cache
        lacks. It is run together with the root; its entries are node N of the result.
    """
    n = tree.num_nodes
    slots = n if lead is None else n + 1
    table = np.concatenate([tree.children, np.full((1, tree.children.shape[1]), slots)])
    table = np.where(table < 0, slots, table)  # children by node; a row for padding; absent: slots
    levels = jnp.asarray(tree.levels)
    sees = jnp.concatenate([jnp.asarray(tree.mask), jnp.zeros((1, n), bool)])
    depth_of = jnp.concatenate([jnp.asarray(tree.node_depths), jnp.zeros(1, jnp.int32)])
    tokens = jnp.zeros((root.shape[0], n), jnp.int32).at[:, 0].set(root)

    def choose(tokens, hidden, nodes):
        best = top_tokens(model.unembed(hidden), tree.width)
        return tokens.at[:, jnp.asarray(table)[nodes]].set(best, mode="drop")

    def run_level(carry, nodes):
        tokens, drafted = carry
        mask = sees[nodes]
        if lead is not None:  # rows that lacked the lead see it, at node N
            shape = (root.shape[0], *mask.shape)
            seen = jnp.broadcast_to(lead[1][:, None, None], (*shape[:2], 1))
            mask = jnp.concatenate([jnp.broadcast_to(mask, shape), seen], -1)
        places = jnp.where(nodes < n, nodes, slots)
        attend = attend_level(cache, drafted, places, mask, backend)
        fed = jnp.take(tokens, nodes, axis=1, mode="clip")
        hidden, drafted = model(fed, root_position[:, None] + depth_of[nodes], attend)
        return (choose(tokens, hidden, nodes), drafted), None

    carry = tokens, empty_nodes(cache, slots)
    if lead is not None:
        carry = _run_root_with_lead(model, cache, carry, lead, root_position, choose, backend)
        levels = levels[1:]
    (tokens, drafted), _ = jax.lax.scan(run_level, carry, levels)
    return tokens, drafted


def _run_root_with_lead(model, cache, carry, lead, root_position, choose, backend):
    """Returns the carry behind the root, run together with the lead: two tokens in one pass."""
    tokens, drafted = carry
    lead_token, needed = lead
    n = tokens.shape[1]
    columns = jnp.arange(n + 1)
    sees_lead = jnp.broadcast_to(columns == n, (tokens.shape[0], n + 1))
    sees_root = (columns == 0) | (sees_lead & needed[:, None])
    mask = jnp.stack([sees_lead, sees_root], 1)
    fed = jnp.stack([lead_token, tokens[:, 0]], 1)
    positions = jnp.maximum(root_position[:, None] - jnp.array([1, 0]), 0)
    attend = attend_level(cache, drafted, jnp.array([n, 0]), mask, backend)
    hidden, drafted = model(fed, positions, attend)
    return choose(tokens, hidden[:, 1:], jnp.zeros(1, jnp.int32)), drafted
