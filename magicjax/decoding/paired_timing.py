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

from magicjax.autotune.trial import Behind
from magicjax.decoding import program_cache
from magicjax.decoding.loop import DecodeState, Settings
from magicjax.decoding.request import Request
from magicjax.decoding.runner import compile_loop, timed, with_rounds
from magicjax.trees.token_tree import Tree

ROUNDS = 16  # of a timed call, of steps that are short
CALL_SECONDS = 0.1  # of longer steps as many rounds as take so long, at least 2


@dataclasses.dataclass
class Held:
    """What a drafter holds; it is handed on from turn to turn, among all variants that have it."""

    state: Any


@dataclasses.dataclass
class Variant:
    """One of what is timed.

    Attributes:
      request: with the drafter, or without.
      settings: of the program.
      held: by the drafter.
      seconds: of a round, of each turn.
    """

    request: Request
    settings: Settings
    held: Held
    seconds: list[float] = dataclasses.field(default_factory=list)


def variants_of(
    behind: Behind, ways: Sequence[tuple[Request, Tree]]
) -> tuple[list[Variant], DecodeState, float]:
    """Returns (the variants, compiled, a state for all of them, seconds of compiling).

    Variants of one drafter share what it holds: it is there once, and where in memory it lies makes
    no difference between them.

    Args:
      behind: the prompts, whose cache is in the state until it is taken back.
      ways: requests for the same tree's shape, each with the tree of its own that it runs; the same
        object drafts in all variants of a drafter.
    """
    held: dict[int, Held] = {}
    variants, compile_s, state = [], 0.0, None
    for request, tree in ways:
        drafter = id(request.drafter)
        if drafter not in held:
            if state is not None:
                behind.take_back(state, request)
            state, compiling = behind.state(request)
            held[drafter] = Held(state.drafter)
            compile_s += compiling
        assert state is not None
        state = dataclasses.replace(state, drafter=held[drafter].state)
        settings = request.settings.with_tree(tree)
        compile_s += compile_loop(request, settings, state)
        variants.append(Variant(request, settings, held[drafter]))
    assert state is not None, "no way to decode"
    return variants, state, compile_s


def take_turns(
    variants: Sequence[Variant], state: DecodeState, turns: int, seconds: float = 0.0
) -> DecodeState:
    """Calls each variant once a turn, after a first turn that is not counted.

    Args:
      variants: what is timed; `seconds` of each is added to, and what drafters hold is set back.
      state: as deep as the deepest variant, whose memory is taken over.
      turns: how many, at least.
      seconds: go on until so many have been spent.

    Returns:
      The state as it was, with the target's cache, for more turns.
    """
    state = dataclasses.replace(state, drafter=None)
    counters, of_held = _counters(state), [_counters(variant.held.state) for variant in variants]
    rounds = [2] * len(variants)
    order = np.random.default_rng(0)
    turn, spent = 0, 0.0
    while turn <= turns or spent < seconds:
        for i in order.permutation(len(variants)):  # what runs before has a share in a time
            variant = variants[i]
            own = _set_back(variant.held.state, of_held[i])
            own = dataclasses.replace(_set_back(state, counters), drafter=own)
            state, took = _call(variant, with_rounds(own, rounds[i]))
            spent += took
            variant.held.state = state.drafter
            took /= rounds[i] - int(state.rounds_left)  # rows may all end before
            state = dataclasses.replace(state, drafter=None)
            if turn:
                variant.seconds.append(took)
            else:
                rounds[i] = max(2, min(ROUNDS, round(CALL_SECONDS / max(took, 1e-6))))
        turn += 1
    for variant, back in zip(variants, of_held, strict=True):
        variant.held.state = _set_back(variant.held.state, back)
    return _set_back(state, counters)


def _call(variant: Variant, state: DecodeState) -> tuple[DecodeState, float]:
    arguments = variant.request.target, variant.request.drafter, state
    loop, _ = program_cache.program("decode", variant.settings, *arguments)
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
