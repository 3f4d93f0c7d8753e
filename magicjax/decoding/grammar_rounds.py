"""Rounds of rows with grammars, in three programs: `propose`, `score` and `verify`.

While the device scores the nodes, the host computes their masks. Rounds without grammars run in the
compiled loop. With `settings.rows`, only the first slots of an engine are decoded.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from magicjax.decoding import loop, slots
from magicjax.decoding.loop import DecodeState
from magicjax.drafters.base import Drafter
from magicjax.grammars import masking
from magicjax.model import Model
from magicjax.placement import PerDevice
from magicjax.settings import Settings

Nodes = tuple[Int[Array, "B N"], Int[Array, "B N"]]


def propose(
    settings: Settings, target: Model, drafter: Drafter | None, state: DecodeState
) -> tuple[Nodes, PerDevice]:
    """Returns ((tokens, parents) of the nodes of a round, what the other programs need)."""
    proposed = loop.propose(settings, target, drafter, slots.first_rows(state, settings.rows))
    tokens = proposed.proposal.tokens
    parents = jnp.broadcast_to(jnp.asarray(proposed.proposal.parents, jnp.int32), tokens.shape)
    return (tokens, parents), PerDevice.pack(proposed)


def score(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    proposed: PerDevice,
) -> PerDevice:
    """Returns the target's logits of the nodes, not masked yet, and what `verify` needs besides."""
    selected = slots.first_rows(state, settings.rows)
    return PerDevice.pack(loop.score(settings, target, drafter, selected, proposed.unpack()))


def verify(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    proposed: PerDevice,
    scored: PerDevice,
    allowed: UInt32[Array, "B N W"],
) -> DecodeState:
    """Returns the state after the round, given the masks of the nodes."""
    scores: loop.Scored = scored.unpack()
    logits = masking.mask(scores.logits, allowed, target.config.vocab_size, target.split.axes)
    scores = scores.replace(logits=logits)  # type: ignore[attr-defined]
    selected = slots.first_rows(state, settings.rows)
    selected = dataclasses.replace(selected, rounds=jnp.zeros_like(selected.rounds))
    selected = loop.verify_and_commit(
        settings, target, drafter, selected, proposed.unpack(), scores
    )
    return slots.with_first_rows(state, selected)
