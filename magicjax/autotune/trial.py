"""A short trial of a drafter on the user's own prompts: what is accepted, and how long rounds take.

All drafters try on the cache that one prefill made: each runs some rounds, then the lengths are set
back. Of a trial its counts are kept, and its text, on which look-ups are judged (`known_text`).
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from magicjax.autotune.known_text import KnownText, look_up_counts
from magicjax.autotune.to_come import slowest_rounds, slowest_tokens
from magicjax.decoding import runner
from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.decoding.request import Request
from magicjax.decoding.stats import acceptance
from magicjax.drafters import Drafter, LookUp
from magicjax.kv_cache.full_cache import KVCache
from magicjax.trees.token_tree import Tree
from magicjax.verification.sampling import Sampling

OF_TRIALS = 2**31 - 1  # no position is as high
ROUNDS = 8  # of a timed call; the first call loads the program, and its time does not count


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was measured of a drafter, or of plain decoding.

    A look-up's acceptance and tokens are those of chains on all text that is known; its seconds and
    rounds are its own.

    Attributes:
      name: of the drafter, as commands write it; "" of plain decoding.
      seconds: of a round of all rows; 0: no row had one.
      rounds: of each row, on average.
      acceptance: [depths, ranks], as `magicjax.optimal` takes it.
      tokens: of a round of a chain, by its depth from 1 on: of the row that needs most rounds.
      of_tree: the same of the tree that was tried: the trial's own rounds, and those that would
        follow to the end. 0 of plain decoding.
    """

    name: str
    seconds: float
    rounds: float
    acceptance: tuple[tuple[float, ...], ...] = ()
    tokens: tuple[float, ...] = ()
    of_tree: float = 0.0


@dataclasses.dataclass
class Behind:
    """What came of the prompts: every trial begins here, and leaves the cache as it was.

    Attributes:
      cache: the target's, whose memory trials take over and give back.
      prefilled: what else was made of the prompts.
      text: what trials came to.
    """

    cache: KVCache
    prefilled: Prefilled
    text: KnownText

    def state(self, request: Request) -> tuple[DecodeState, float]:
        """Returns (a request's state behind the prompts, seconds of compiling)."""
        state, _, compiling = runner.begin(request, self.cache, self.prefilled)
        return state, compiling

    def take_back(self, state: DecodeState, request: Request) -> None:
        """Takes the cache back from a state that is no longer needed."""
        lengths = jax.device_put(np.array(request.lengths), state.cache.lengths.sharding)
        self.cache = dataclasses.replace(state.cache, lengths=lengths)


def behind_prompts(request: Request, drafters: Sequence[Drafter]) -> tuple[Behind, float, float]:
    """Returns (what came of the prompts, for all drafters, seconds, seconds of compiling)."""
    settings = request.prefill_settings
    watch = settings.watch
    for drafter in drafters:
        watch |= dataclasses.replace(drafter.watch(), rounds=False)
    settings = dataclasses.replace(settings, watch=watch)
    (cache, prefilled), seconds, compiling = runner.prefill(request, settings)
    limits, first = jax.device_get((request.limits, prefilled.first))
    text = KnownText(request.prompts, limits, [*first[:, None]], [*map(int, limits)])
    return Behind(cache, prefilled, text), seconds, compiling


def run_trial(
    request: Request, name: str, behind: Behind, rounds: int, tree: Tree | None = None
) -> tuple[Trial, float]:
    """Returns (what was measured, seconds of compiling).

    Args:
      request: with the drafter.
      name: of the drafter.
      behind: the prompts.
      rounds: at most; of each row.
      tree: that it is tried with, no deeper than the request's; None: that one. `ROOT_ONLY`: the
        target is tried alone.
    """
    tree = tree or request.settings.tree
    if tree.num_nodes == 1:
        request = dataclasses.replace(request, drafter=None)
    settings = request.settings.with_tree(tree)
    request = dataclasses.replace(request, sampling=_own_numbers(request.sampling))
    state, compile_s = behind.state(request)
    times: list[float] = []
    while (before := _steps(state)) < rounds:
        wanted = min(ROUNDS, rounds - before)
        state, seconds, compiling = runner.run(request, settings, state, wanted)
        compile_s += compiling
        if _steps(state) == before:  # all rows have ended
            break
        times.append(seconds / (_steps(state) - before))
    counts = jax.device_get((state.emitted, state.histogram, state.ranks, state.nodes))
    output, ended = jax.device_get((state.output, state.ended))
    behind.text.learn(output, counts[0], ended)
    behind.take_back(state, request)
    seconds = statistics.median(times[1:] or times or [0.0])
    lengths = np.where(ended, counts[0], np.asarray(request.limits))
    found = _trial(name, tree, counts, lengths, seconds)
    found, compiling = counted_again(found, request, behind)
    return found, compile_s + compiling


def counted_again(found: Trial, request: Request, behind: Behind) -> tuple[Trial, float]:
    """Returns (a look-up's trial with what is accepted on all text that is known; another's as it
    is, seconds of compiling).

    Args:
      found: of plain decoding or any drafter.
      request: of it.
      behind: whose text.
    """
    if not found.name or not isinstance(request.drafter, LookUp):
        return found, 0.0
    depth = request.settings.shape.depth
    histogram, tokens, compile_s = look_up_counts(request.drafter, behind.text, depth)
    if histogram.any():
        at_least = histogram[::-1].cumsum()[::-1]
        rates = [(float(rate),) for rate in at_least[1:] / np.maximum(at_least[:-1], 1)]
        found = dataclasses.replace(found, acceptance=_reached(rates, histogram.tolist()))
    return dataclasses.replace(found, tokens=tokens or found.tokens), compile_s


def _own_numbers(sampling: Sampling | None) -> Sampling | None:
    """Returns other random numbers than those of the run: what it draws must not decide how."""
    if sampling is None:
        return None
    keys = jax.vmap(lambda key: jax.random.fold_in(key, OF_TRIALS))(sampling.keys)
    return dataclasses.replace(sampling, keys=jax.device_put(keys, sampling.keys.sharding))


def _steps(state: DecodeState) -> int:
    return int(np.asarray(state.histogram).sum(1).max())


def _trial(
    name: str,
    tree: Tree,
    counts: tuple[Any, ...],
    wanted: Int[np.ndarray, "B"],
    seconds: float,
) -> Trial:
    """Returns the trial; `wanted` are all tokens of each row, as far as is known."""
    emitted, histogram = counts[0], counts[1][:, : tree.depth + 1]
    rounds = histogram.sum(1)
    found = Trial(name, seconds, float(rounds.mean()))
    ran = rounds > 0
    if tree.num_nodes == 1 or not ran.any():
        return found
    counted = acceptance(*counts)
    steps = slowest_rounds(rounds[ran], (wanted - emitted)[ran], histogram[ran])
    chain_tokens = slowest_tokens(histogram[ran], wanted[ran] - 1) if tree.shape.width == 1 else ()
    return dataclasses.replace(
        found,
        acceptance=_reached(counted["acceptance_by_rank"], counted["histogram"]),
        tokens=chain_tokens,
        of_tree=float((wanted.max() - 1) / steps),
    )


def _reached(
    table: Sequence[Sequence[float]], histogram: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """Returns the depths that some round reached; the first in any case."""
    reached = [sum(histogram[depth:]) > 0 for depth in range(len(table))]
    return tuple(tuple(row) for row, some in zip(table, reached, strict=True) if some)
