"""Times plain steps, verify passes and draft rounds over batches and contexts, interleaved."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from magicjax.benchmarks import bench
from magicjax.decoding.paired_timing import ROUNDS, Variant, time_interleaved
from magicjax.decoding.runner import state_shapes
from magicjax.drafters import Drafter
from magicjax.trees.token_tree import ROOT_ONLY, chain


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds at one batch and context.

    Attributes:
      passes: by nodes: a plain step (1), and a round that verifies n nodes drafted at no cost.
      drafts: of one draft level, by the drafter's name.
      rounds: of a whole round, by the drafter's name.
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
    repeats: int,
) -> StepTimes:
    """Returns median times at one batch and context. Caches hold random numbers; no prefill runs.

    Args:
      setup: target and backend.
      batch, context: B, and the tokens of each row.
      nodes: of the passes, besides 1 and gamma + 1.
      drafters: by name.
      gamma: tokens drafted in a round.
      repeats: of all variants.
    """
    deepest = max(*nodes, gamma + 1)
    setup = dataclasses.replace(setup, new_tokens=new_tokens(deepest))
    free = bench.Synthetic(None, jnp.zeros((batch, 1), jnp.int32), jnp.float32(1))
    request = bench.synthetic_request(setup, batch, context, free, chain(deepest - 1))
    plain = dataclasses.replace(request, drafter=None)
    variants = {1: Variant(plain, request.settings.with_tree(ROOT_ONLY))}
    for n in sorted({*nodes, gamma + 1}):
        variants[n] = Variant(request, request.settings.with_tree(chain(n - 1)))
    state = bench.synthetic_state(request)
    drafter_states = {id(None): None, id(request.drafter): state.drafter}
    draft_variants = {}
    for name, drafter in drafters.items():
        request = bench.synthetic_request(setup, batch, context, drafter, chain(deepest - 1))
        draft_variants[name] = Variant(request, request.settings.with_tree(chain(gamma)))
        shapes = state_shapes(request)
        drafter_states[id(request.drafter)] = bench.synthetic_drafter_state(request, shapes)
    all_variants = [*variants.values(), *draft_variants.values()]
    times, _ = time_interleaved(all_variants, state, drafter_states, repeats)
    passes = dict(zip(variants, times[: len(variants)], strict=True))
    rounds = dict(zip(draft_variants, times[len(variants) :], strict=True))
    verify = passes[gamma + 1]
    levels = {name: np.subtract(seconds, verify) / gamma for name, seconds in rounds.items()}
    return StepTimes(
        passes={n: statistics.median(seconds) for n, seconds in passes.items()},
        drafts={name: max(0.0, float(np.median(seconds))) for name, seconds in levels.items()},
        rounds={name: statistics.median(seconds) for name, seconds in rounds.items()},
    )


def new_tokens(nodes: int) -> int:
    """Returns an output length that no row reaches in a timed call of rounds of so many nodes."""
    return ROUNDS * nodes + 1


def grid(
    setup: bench.Setup,
    batches: Sequence[int],
    contexts: Sequence[int],
    nodes: Sequence[int],
    drafters: Mapping[str, Drafter],
    gamma: int,
    repeats: int,
) -> Iterator[tuple[int, int, StepTimes]]:
    """Yields (batch, context, times) for every batch and context."""
    for batch in batches:
        for context in contexts:
            times = step_times(setup, batch, context, nodes, drafters, gamma, repeats)
            yield batch, context, times
