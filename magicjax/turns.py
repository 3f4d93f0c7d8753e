"""Times several ways to decode in turns, on one target's cache.

Every variant runs a few rounds of the compiled loop in each turn, on the same state: the target's
cache is handed on from one to the next, only counters are set back. A busy moment of the machine
meets all variants of a turn, and what matters are their ratios.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magicjax import compilation
from magicjax.decode import DecodeState, Settings
from magicjax.execution import timed, with_rounds
from magicjax.request import Request

ROUNDS = 16  # of a timed call, of steps that are short
CALL_SECONDS = 0.1  # of longer steps as many rounds as take so long, at least 2


@dataclasses.dataclass
class Variant:
    """One of what is timed.

    Attributes:
      request: with the drafter, or without.
      settings: of the program.
      drafter: what the drafter holds; it is handed on from turn to turn.
      seconds: of a round, of each turn.
    """

    request: Request
    settings: Settings
    drafter: Any
    seconds: list[float] = dataclasses.field(default_factory=list)


def take_turns(
    variants: Sequence[Variant], state: DecodeState, turns: int, seconds: float = 0.0
) -> DecodeState:
    """Calls each variant once a turn, after a first turn that is not counted.

    Args:
      variants: what is timed; `seconds` of each is added to.
      state: as deep as the deepest variant, whose memory is taken over.
      turns: how many, at least.
      seconds: go on until so many have been spent.

    Returns:
      A state with the target's cache.
    """
    state = dataclasses.replace(state, drafter=None)
    counters, held = _counters(state), [_counters(variant.drafter) for variant in variants]
    rounds = [2] * len(variants)
    order = np.random.default_rng(0)
    turn, spent = 0, 0.0
    while turn <= turns or spent < seconds:
        for i in order.permutation(len(variants)):  # what runs before has a share in a time
            variant = variants[i]
            own = _set_back(variant.drafter, held[i])
            own = dataclasses.replace(_set_back(state, counters), drafter=own)
            state, took = _call(variant, with_rounds(own, rounds[i]))
            spent += took
            variant.drafter = state.drafter
            took /= rounds[i] - int(state.rounds_left)  # rows may all end before
            state = dataclasses.replace(state, drafter=None)
            if turn:
                variant.seconds.append(took)
            else:
                rounds[i] = max(2, min(ROUNDS, round(CALL_SECONDS / max(took, 1e-6))))
        turn += 1
    return state


def _call(variant: Variant, state: DecodeState) -> tuple[DecodeState, float]:
    arguments = variant.request.target, variant.request.drafter, state
    loop, _ = compilation.program("decode", variant.settings, *arguments)
    jax.block_until_ready(arguments)
    return timed(loop, *arguments)


def _counters(tree: Any) -> list[np.ndarray | None]:
    """Returns copies of lengths, texts and other small arrays: they are set back after each call.

    What stays as calls left it (keys, values, positions of a ring) decides about no time.
    """

    def counts(x: jax.Array) -> bool:
        return x.ndim < 3 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    return [np.array(x) if counts(x) else None for x in jax.tree.leaves(tree)]


def _set_back(tree: Any, counters: Sequence[np.ndarray | None]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [
        # A copy, because a program takes over its memory.
        x if count is None else jax.device_put(count.copy(), x.sharding)
        for x, count in zip(leaves, counters, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)
