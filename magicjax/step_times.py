"""Times steps of plain decoding, passes and rounds of drafts, taking turns on one target's cache.

Every variant runs a few rounds of the compiled loop in each turn, on the same state: the target's
cache is handed on from one to the next, only counters are set back. A busy moment of the machine
meets all variants of a turn, and what matters are their ratios.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magicjax import bench, compilation
from magicjax.decode import DecodeState, Settings
from magicjax.drafters import Drafter
from magicjax.execution import state_shapes, timed, with_rounds
from magicjax.request import Request
from magicjax.tree import ROOT_ONLY, Tree, chain

ROUNDS = 8  # of a timed call, of steps that are short
CALL_SECONDS = 0.05  # of longer steps as many rounds as take so long, at least 2


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds at one batch and context.

    Attributes:
      passes: of a plain step (1) and a round that verifies n nodes that cost nothing to draft.
      drafts: of one level of a draft, by the drafter's name.
      rounds: of a whole round with each drafter.
    """

    passes: dict[int, float]
    drafts: dict[str, float]
    rounds: dict[str, float]


@dataclasses.dataclass
class _Variant:
    """One of what is timed: its program, and what its drafter holds between turns."""

    request: Request
    settings: Settings
    drafter: Any
    seconds: list[float] = dataclasses.field(default_factory=list)


def step_times(
    setup: bench.Setup,
    batch: int,
    context: int,
    nodes: Sequence[int],
    drafters: Mapping[str, Drafter],
    gamma: int,
    turns: int,
) -> StepTimes:
    """Returns times at one batch and context; nothing is read first, caches hold random numbers.

    Args:
      setup: target and backend.
      batch, context: B, and the tokens of each row.
      nodes: of the passes, beside 1 and gamma + 1.
      drafters: by name.
      gamma: tokens that they draft in a round.
      turns: in which each variant is called once; medians are returned.
    """
    deepest = max(*nodes, gamma + 1)
    setup = dataclasses.replace(setup, new_tokens=2 * ROUNDS * deepest)  # rows never end
    request = bench.request_of(setup, batch, context, _free(batch), chain(deepest - 1))
    state = bench.state_of(request)
    variants: dict[int | str, _Variant] = {1: _variant(request, None, None, ROOT_ONLY)}
    for n in sorted({*nodes, gamma + 1}):
        variants[n] = _variant(request, request.drafter, state.drafter, chain(n - 1))
    for name, drafter in drafters.items():
        own = bench.request_of(setup, batch, context, drafter, chain(deepest - 1))
        held = bench.drafter_state_of(own, state_shapes(own))
        variants[name] = _variant(own, drafter, held, chain(gamma))
    _run_turns(list(variants.values()), state, turns)
    base = variants[gamma + 1].seconds
    return StepTimes(
        passes={n: statistics.median(v.seconds) for n, v in variants.items() if isinstance(n, int)},
        drafts={
            name: statistics.median(np.subtract(variants[name].seconds, base)) / gamma
            for name in drafters
        },
        rounds={name: statistics.median(variants[name].seconds) for name in drafters},
    )


def _free(batch: int) -> Drafter:
    """Returns a drafter that costs nothing."""
    return bench.Synthetic(None, jnp.zeros((batch, 1), jnp.int32), jnp.float32(1))


def _variant(request: Request, drafter: Drafter | None, held: Any, tree: Tree) -> _Variant:
    request = dataclasses.replace(request, drafter=drafter)
    return _Variant(request, request.settings.with_tree(tree), held)


def _run_turns(variants: Sequence[_Variant], state: DecodeState, turns: int) -> None:
    """Calls each variant once a turn, after a first turn that is not counted."""
    state = dataclasses.replace(state, drafter=None)
    counters, held = _counters(state), [_counters(variant.drafter) for variant in variants]
    rounds = [2] * len(variants)
    for turn in range(turns + 1):
        for i, variant in enumerate(variants):
            own = _set_back(variant.drafter, held[i])
            own = dataclasses.replace(_set_back(state, counters), drafter=own)
            state, seconds = _call(variant, with_rounds(own, rounds[i]))
            variant.drafter = state.drafter
            state = dataclasses.replace(state, drafter=None)
            if turn:
                variant.seconds.append(seconds / rounds[i])
            else:
                seconds = max(seconds / rounds[i], 1e-6)
                rounds[i] = max(2, min(ROUNDS, round(CALL_SECONDS / seconds)))


def _call(variant: _Variant, state: DecodeState) -> tuple[DecodeState, float]:
    arguments = variant.request.target, variant.request.drafter, state
    loop, _ = compilation.program("decode", variant.settings, *arguments)
    jax.block_until_ready(arguments)
    return timed(loop, *arguments)


def _counters(tree: Any) -> list[np.ndarray | None]:
    """Returns copies of all that is not keys, values or text: it is set back after each call."""
    return [np.asarray(x) if x.ndim < 3 else None for x in jax.tree.leaves(tree)]


def _set_back(tree: Any, counters: Sequence[np.ndarray | None]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [x if c is None else jnp.array(c) for x, c in zip(leaves, counters, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def grid(
    setup: bench.Setup,
    batches: Sequence[int],
    contexts: Sequence[int],
    nodes: Sequence[int],
    drafters: Mapping[str, Drafter],
    gamma: int,
    turns: int,
) -> Iterator[tuple[int, int, StepTimes]]:
    """Yields (batch, context, times) of every batch with every context."""
    for batch in batches:
        for context in contexts:
            yield (
                batch,
                context,
                step_times(setup, batch, context, nodes, drafters, gamma, turns),
            )
