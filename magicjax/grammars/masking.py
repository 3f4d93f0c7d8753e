"""Masks of the target's logits at every node of a token tree; traced into the loop.

All live grammars share one table of transitions. A state is the index of its first entry there, and
the entry at (state + class of a token) is the state after the token, or -1 if the grammar does not
allow it. Entry 0 is the state 0 of rows without a grammar, in which all tokens have class 0.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax.trees.token_tree import Parents
from sharding import collectives
from sharding.collectives import AxisNames

NOT_ALLOWED = -1
Transitions = Any  # int32 [M], of all grammars; None without grammars


@struct.dataclass
class GrammarRows:
    """The grammar of each row.

    Attributes:
      state: int32 [B], after the pending token; 0 without a grammar.
      classes: int32 [B, V], the class of each token; zeros without a grammar.
    """

    state: Int[Any, "B"]
    classes: Int[Any, "B V"]


def advance(
    transitions: Transitions,
    rows: GrammarRows,
    states: Int[Array, "*B"],
    tokens: Int[Array, "*B"],
) -> Int[Array, "*B"]:
    """Returns the states after one more token each; -1 after a token that is not allowed.

    Args:
      transitions: the table of all grammars.
      rows: B of them; `rows.state` is not read.
      states: [B] or [B, N].
      tokens: of the same shape.
    """
    tokens = tokens.reshape(len(rows.state), -1)
    classes = jnp.take_along_axis(rows.classes, tokens, -1, mode="clip").reshape(states.shape)
    after = transitions.at[jnp.maximum(states, 0) + classes].get(mode="clip")
    return jnp.where(states < 0, NOT_ALLOWED, after)


def node_states(
    transitions: Transitions,
    rows: GrammarRows,
    tokens: Int[Array, "B N"],
    parents: Parents,
    depth: int,
) -> Int[Array, "B N"]:
    """Returns the state after each node of the rows' trees, level by level.

    Args:
      transitions: the table of all grammars.
      rows: with the states after the roots.
      tokens: of the nodes.
      parents: [N] or [B, N].
      depth: of the deepest tree, in edges.
    """
    parents = jnp.maximum(jnp.broadcast_to(jnp.asarray(parents), tokens.shape), 0)
    is_root = jnp.arange(tokens.shape[1]) == 0
    first = jnp.broadcast_to(rows.state[:, None], tokens.shape)

    def level(_, states):
        before = jnp.take_along_axis(states, parents, 1)
        return jnp.where(is_root, first, advance(transitions, rows, before, tokens))

    return jax.lax.fori_loop(0, depth, level, first)


def mask(
    transitions: Transitions,
    rows: GrammarRows,
    states: Int[Array, "B N"],
    logits: Float[Array, "B N V"],
    axis_names: AxisNames = (),
) -> Float[Array, "B N V"]:
    """Returns the logits with -inf for tokens that the grammar does not allow.

    Those of a node in the state -1, which no verifier accepts, are unchanged.

    Args:
      transitions: the table of all grammars.
      rows: B of them; `rows.state` is not read.
      states: of the nodes.
      logits: of all tokens, or this device's shard.
      axis_names: the mesh axes that shard the vocabulary.
    """
    classes = collectives.local_slice(rows.classes, (), axis_names)
    states = states[..., None]
    after = transitions.at[jnp.maximum(states, 0) + classes[:, None]].get(mode="clip")
    return jnp.where((after >= 0) | (states < 0), logits, -jnp.inf)


def after_path(
    transitions: Transitions,
    rows: GrammarRows,
    states: Int[Array, "B N"],
    path: Int[Array, "B A"],
    committed: Int[Array, "B"],
    last: Int[Array, "B"],
) -> GrammarRows:
    """Returns the rows after a round.

    Args:
      transitions: the table of all grammars.
      rows: before the round.
      states: of the nodes.
      path: the accepted nodes, the root first.
      committed: the number of new tokens; the i-th was chosen at the i-th node of the path.
      last: the last new token.
    """
    node = jnp.take_along_axis(path, jnp.maximum(committed - 1, 0)[:, None], 1)
    before = jnp.take_along_axis(states, node, 1)[:, 0]
    after = advance(transitions, rows, before, last)
    return dataclasses.replace(rows, state=jnp.where(committed > 0, after, rows.state))
