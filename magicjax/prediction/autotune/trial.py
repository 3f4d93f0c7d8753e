"""A short trial of one drafter on the user's prompts: acceptance and seconds per round.

A batch ends with its slowest row, so rates are counted per row. One row has few rounds, so a few
rounds of the whole batch are added to its counts.
"""

import dataclasses
import statistics

import jax
import numpy as np

from magicjax.decoding.controller import row_rates, row_tokens, tried_and_accepted
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.decoding.request import Request
from magicjax.decoding.stats import acceptance
from magicjax.trees.token_tree import Tree
from magicjax.verification.sampling import Sampling

TRIAL_KEYS = 2**31 - 1  # folded into the keys of trials; no position is as high
ROUNDS = 8  # of a timed call; the first call loads the program and is not counted


@dataclasses.dataclass(frozen=True)
class Trial:
    """Measurements of one drafter, or of plain decoding.

    Tokens per round are those of the row that needs the most rounds to its end.

    Attributes:
      name: the drafter as commands write it; "" for plain decoding.
      seconds: per round of the batch; 0 if no row ran a round.
      rounds: mean over rows.
      acceptance: [depths, ranks], the format of `magicjax.optimal`.
      chain_tokens: tokens per round of chains of depth 1, 2, ...; empty unless a chain ran.
      tree_tokens: tokens per round of the tree that ran.
    """

    name: str
    seconds: float
    rounds: float
    acceptance: tuple[tuple[float, ...], ...] = ()
    chain_tokens: tuple[float, ...] = ()
    tree_tokens: float = 0.0


def run_trial(
    request: Request, name: str, prefilled: PrefilledPrompts, rounds: int, tree: Tree | None = None
) -> tuple[Trial, PrefilledPrompts]:
    """Returns (the trial, the prompts for the next run).

    A sampled trial draws random numbers of its own. With those of the run, a drafter whose tokens
    happen to match would be chosen, and the text would be biased towards its drafts.

    Args:
      request: with the drafter.
      name: of the drafter.
      prefilled: the prompts; their cache is donated.
      rounds: of each row, at most.
      tree: no deeper than the request's; None: the request's. `ROOT_ONLY`: plain decoding.
    """
    tree = tree or request.settings.tree
    if tree.num_nodes == 1:
        request = dataclasses.replace(request, drafter=None)
    settings = request.settings.with_tree(tree)
    sampling = _fold_in_trial(request.rows.sampling)
    rows = dataclasses.replace(request.rows, sampling=sampling)
    request = dataclasses.replace(request, rows=rows)
    decoder = Decoder(request, settings)
    state = prefilled.start(decoder)
    times: list[float] = []
    while (before := _rounds(state)) < rounds:
        state = decoder.decode(state, min(ROUNDS, rounds - before))
        if _rounds(state) == before:  # all rows have ended
            break
        times.append(decoder.clock.newest_s / (_rounds(state) - before))
    trial = _measured(name, tree, state, statistics.median(times[1:] or times or [0.0]))
    return trial, prefilled.reset(state)


def _fold_in_trial(sampling: Sampling | None) -> Sampling | None:
    if sampling is None:
        return None
    keys = jax.vmap(lambda key: jax.random.fold_in(key, TRIAL_KEYS))(sampling.keys)
    return dataclasses.replace(sampling, keys=jax.device_put(keys, sampling.keys.sharding))


def _rounds(state: DecodeState) -> int:
    return int(np.asarray(state.histogram).sum(1).max())


def _measured(name: str, tree: Tree, state: DecodeState, seconds: float) -> Trial:
    names = ("emitted", "histogram", "ranks", "nodes")
    counts = jax.device_get([getattr(state, field) for field in names])
    limits, ended = jax.device_get((state.rows.limits, state.ended))
    emitted, histogram = counts[:2]
    rounds = histogram.sum(1)
    trial = Trial(name, seconds, float(rounds.mean()))
    ran = rounds > 0  # the other rows ended with prefill's token
    if tree.num_nodes == 1 or not ran.any():
        return trial
    lengths = np.where(ended, emitted, limits)[ran]
    tried, accepted = tried_and_accepted(histogram[ran], tree.depth, tree.depth)
    rates = row_rates(tried, accepted)

    def batch_tokens(steps: np.ndarray) -> float:
        return float((lengths.max() - 1) / steps.max())

    depths = range(1, tree.depth + 1) if tree.shape.width == 1 else ()
    left = lengths - emitted[ran]
    table = acceptance(*counts)["acceptance_by_rank"]
    reached = max(1, np.count_nonzero(tried.sum(0)))
    return dataclasses.replace(
        trial,
        acceptance=table[:reached],
        chain_tokens=tuple(batch_tokens((lengths - 1) / row_tokens(rates, d)) for d in depths),
        tree_tokens=batch_tokens(rounds[ran] + left / row_tokens(rates, tree.depth)),
    )
