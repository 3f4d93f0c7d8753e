"""Times plain steps, verify passes and draft rounds at one batch and context, interleaved."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from magicjax.benchmarks import synthetic
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.paired_timing import ROUNDS, time_interleaved
from magicjax.drafters import Drafter
from magicjax.trees.token_tree import ROOT_ONLY, chain


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds at one batch and context.

    Attributes:
      passes: seconds by number of nodes: a plain step (1), and a round that verifies n nodes
        drafted at no cost.
      drafts: seconds of one draft level, by the drafter's key; a noisy difference of two times,
        which can be negative.
      rounds: seconds of a whole round, by the drafter's key.
    """

    passes: dict[int, float]
    drafts: dict[Any, float]
    rounds: dict[Any, float]


def step_times(
    setup: synthetic.Setup,
    batch: int,
    context: int,
    nodes: Sequence[int],
    drafters: Mapping[Any, tuple[Drafter, int]],
    repeats: int,
) -> StepTimes:
    """Returns median times at one batch and context. Caches hold random numbers; no prefill runs.

    Args:
      setup: target and backend.
      batch, context: B, and the tokens of each row.
      nodes: numbers of nodes to time, in addition to 1 and those of the drafters' rounds.
      drafters: drafters by any key, each with gamma, the tokens that it drafts in a round.
      repeats: how often each time is measured.
    """
    nodes = sorted({*nodes, *(gamma + 1 for _, gamma in drafters.values())})
    deepest = chain(nodes[-1] - 1)
    setup = dataclasses.replace(setup, new_tokens=new_tokens(nodes[-1]))
    free_drafter = synthetic.Synthetic(None, jnp.zeros((batch, 1), jnp.int32), jnp.float32(1))
    request = synthetic.synthetic_request(setup, batch, context, free_drafter, deepest)
    plain = dataclasses.replace(request, drafter=None)
    decoders: dict[Any, Decoder] = {1: Decoder(plain, request.settings.with_tree(ROOT_ONLY))}
    decoders |= {n: Decoder(request, request.settings.with_tree(chain(n - 1))) for n in nodes}
    state = synthetic.synthetic_state(request)
    drafter_states = {id(None): None, id(request.drafter): state.drafter}
    for key, (drafter, gamma) in drafters.items():
        request = synthetic.synthetic_request(setup, batch, context, drafter, deepest)
        decoders["draft", key] = Decoder(request, request.settings.with_tree(chain(gamma)))
        shapes = Decoder(request).state_shapes().drafter
        drafter_states[id(request.drafter)] = synthetic.filled(request, shapes)
    measured, _ = time_interleaved([*decoders.values()], state, drafter_states, repeats)
    times = dict(zip(decoders, measured, strict=True))
    rounds = {key: times["draft", key] for key in drafters}
    level_times = {
        key: np.subtract(rounds[key], times[gamma + 1]) / gamma
        for key, (_, gamma) in drafters.items()
    }
    return StepTimes(
        passes={n: statistics.median(times[n]) for n in (1, *nodes)},
        drafts={key: float(np.median(seconds)) for key, seconds in level_times.items()},
        rounds={key: statistics.median(seconds) for key, seconds in rounds.items()},
    )


def new_tokens(nodes: int) -> int:
    """Returns an output length that no row reaches in a timed call of rounds of so many nodes."""
    return ROUNDS * nodes + 1
