"""Times steps of plain decoding, passes and rounds of drafts at batches and contexts, in turns."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from magicjax.benchmarks import bench
from magicjax.decoding.paired_timing import ROUNDS, Held, Variant, take_turns
from magicjax.decoding.request import Request
from magicjax.decoding.runner import state_shapes
from magicjax.drafters import Drafter
from magicjax.trees.token_tree import ROOT_ONLY, Tree, chain


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
    setup = dataclasses.replace(setup, new_tokens=new_tokens(deepest))
    request = bench.request_of(setup, batch, context, _free(batch), chain(deepest - 1))
    state = bench.state_of(request)
    variants: dict[int | str, Variant] = {1: _variant(request, None, Held(None), ROOT_ONLY)}
    free = Held(state.drafter)
    for n in sorted({*nodes, gamma + 1}):
        variants[n] = _variant(request, request.drafter, free, chain(n - 1))
    for name, drafter in drafters.items():
        own = bench.request_of(setup, batch, context, drafter, chain(deepest - 1))
        held = Held(bench.drafter_state_of(own, state_shapes(own)))
        variants[name] = _variant(own, drafter, held, chain(gamma))
    take_turns(list(variants.values()), state, turns)
    base = variants[gamma + 1].seconds
    return StepTimes(
        passes={n: statistics.median(v.seconds) for n, v in variants.items() if isinstance(n, int)},
        drafts={
            name: max(0.0, statistics.median(np.subtract(variants[name].seconds, base)) / gamma)
            for name in drafters
        },
        rounds={name: statistics.median(variants[name].seconds) for name in drafters},
    )


def new_tokens(nodes: int) -> int:
    """Returns how long outputs must be, so that no row ends in a call with so many nodes."""
    return ROUNDS * nodes + 1


def _free(batch: int) -> Drafter:
    """Returns a drafter that costs nothing."""
    return bench.Synthetic(None, jnp.zeros((batch, 1), jnp.int32), jnp.float32(1))


def _variant(request: Request, drafter: Drafter | None, held: Held, tree: Tree) -> Variant:
    request = dataclasses.replace(request, drafter=drafter)
    return Variant(request, request.settings.with_tree(tree), held)


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
