"""Interleaved timing of several decode programs on one target cache.

In every repeat each variant runs a few rounds of the compiled loop from the same state, so a busy
moment of the machine affects all variants of a repeat. Compare ratios within repeats.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from magicjax.decoding import memory, program_cache, runner
from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.decoding.request import Request
from magicjax.decoding.runner import Output
from magicjax.drafters import Drafter
from magicjax.kv_cache.full_cache import KVCache
from magicjax.settings import Settings
from sharding import global_arrays

ROUNDS = 16  # most rounds of a timed call
CALL_SECONDS = 0.1  # a call of longer rounds runs as many as take this long, at least 2


@dataclasses.dataclass(frozen=True)
class PrefilledPrompts:
    """The target's cache after prefill, from which several runs start, one at a time.

    `start` donates the cache to a run. `reset` returns the object for the next run. JAX raises an
    error if a donated cache is used again. `seconds` is the time of prefill.
    """

    cache: KVCache
    prefilled: Prefilled
    lengths: Int[np.ndarray, "B"]
    seconds: float

    @classmethod
    def create(cls, request: Request, drafters: Sequence[Drafter]) -> "PrefilledPrompts":
        """Returns the prompts after prefill, with the attention statistics of all drafters.

        Raises:
          OutOfMemoryError: plain decoding does not fit the free memory.
        """
        memory.check(dataclasses.replace(request, drafter=None))
        settings = request.prefill_settings
        stats_spec = settings.stats_spec
        for drafter in drafters:
            stats_spec |= dataclasses.replace(drafter.stats_spec(), rounds=False)
        settings = dataclasses.replace(settings, stats_spec=stats_spec)
        results, seconds = runner.prefill(request, settings)
        return cls(*results, global_arrays.fetch(request.rows.lengths), seconds)

    def generate(self, request: Request) -> tuple[Output, "PrefilledPrompts"]:
        """Returns (the request's output, the prompts for the next run).

        Its time of prefill is that of `create`, plus the request's `init`.
        """
        compiled = program_cache.totals()
        state, init_s = self._init(request)
        state, decode_s = runner.run(request, request.settings, state)
        prefill_s = self.seconds + init_s
        output = runner.output_of(request, state, compiled, prefill_s=prefill_s, decode_s=decode_s)
        return output, self.reset(state)

    def start(self, request: Request) -> DecodeState:
        """Returns the request's state after prefill."""
        return self._init(request)[0]

    def _init(self, request: Request) -> tuple[DecodeState, float]:
        prefilled = self.prefilled
        if request.drafter is None:  # the program of plain decoding has no attention statistics
            stats = dataclasses.replace(prefilled.stats, queries=None, total=None)
            prefilled = dataclasses.replace(prefilled, stats=stats)
        return runner.init_state(request, self.cache, prefilled)

    def reset(self, state: DecodeState) -> "PrefilledPrompts":
        """Returns the prompts with the cache of a run's last state, cut back to the prompts."""
        # A copy: the array may share memory with NumPy's, and the next run donates it.
        lengths = global_arrays.put(self.lengths.copy(), state.cache.lengths.sharding)
        return dataclasses.replace(self, cache=dataclasses.replace(state.cache, lengths=lengths))


class Variant(NamedTuple):
    """A program to time: a request and the settings of its loop.

    Variants with the same drafter object share one drafter state: its address affects times.

    Attributes:
      request: with the models.
      settings: of the loop.
      program: the loop's name, "decode" or "decode_until_row_ends".
      without_drafter: whether the loop runs without the drafter, whose state stays as it is.
    """

    request: Request
    settings: Settings
    program: str = "decode"
    without_drafter: bool = False

    def compiled(self, state: DecodeState) -> jax.stages.Compiled:
        """Returns the loop for a state, or for its shapes."""
        return runner.compile_loop(self.running, self.settings, state, self.program)

    @property
    def running(self) -> Request:
        """The request that the loop runs."""
        if not self.without_drafter:
            return self.request
        return dataclasses.replace(self.request, drafter=None)


def time_variants(
    prefilled: PrefilledPrompts, variants: Sequence[Variant], repeats: int, min_seconds: float = 0.0
) -> tuple[list[list[float]], PrefilledPrompts]:
    """Returns (`time_interleaved` after prefill, the prompts for the next run).

    The requests of all variants have the same tree.
    """
    drafters: dict[int, Any] = {}
    state = None
    for variant in variants:
        key = id(variant.request.drafter)
        if state is None or key not in drafters:
            prefilled = prefilled if state is None else prefilled.reset(state)
            state = prefilled.start(variant.request)
            drafters[key] = state.drafter
        state = dataclasses.replace(state, drafter=drafters[key])
        variant.compiled(state)
    assert state is not None, "no variant to time"
    times, state = time_interleaved(variants, state, drafters, repeats, min_seconds)
    return times, prefilled.reset(state)


def time_interleaved(
    variants: Sequence[Variant],
    state: DecodeState,
    drafters: Mapping[int, Any],
    repeats: int,
    min_seconds: float = 0.0,
) -> tuple[list[list[float]], DecodeState]:
    """Returns (seconds per round of each variant in each repeat, the state after the last call).

    Args:
      variants: each is called once per repeat, in random order.
      state: as deep as the deepest variant; donated.
      drafters: the drafter states by `id` of the drafter; donated.
      repeats: at least this many, after one that is not counted.
      min_seconds: repeats continue until the calls have taken this long.
    """
    state, drafters = dataclasses.replace(state, drafter=None), dict(drafters)
    counters = _counters(state)
    drafter_counters = {key: _counters(drafter) for key, drafter in drafters.items()}
    rounds = [2] * len(variants)
    times: list[list[float]] = [[] for _ in variants]
    rng, repeat, spent = np.random.default_rng(0), 0, 0.0
    while repeat <= repeats or spent < min_seconds:
        for i in rng.permutation(len(variants)):
            key = id(variants[i].request.drafter)
            drafter = _restored(drafters[key], drafter_counters[key])
            state = dataclasses.replace(_restored(state, counters), drafter=drafter)
            state, seconds = _call(variants[i], runner.with_rounds(state, rounds[i]))
            spent += seconds
            seconds /= int(state.rounds)  # all rows may end before the others
            drafters[key], state = state.drafter, dataclasses.replace(state, drafter=None)
            if repeat:
                times[i].append(seconds)
            else:
                rounds[i] = max(2, min(ROUNDS, round(CALL_SECONDS / max(seconds, 1e-6))))
        repeat += 1
    return times, state


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the median over repeats of one variant's seconds divided by another's."""
    return statistics.median(np.divide(times, baseline))


def _call(variant: Variant, state: DecodeState) -> tuple[DecodeState, float]:
    arguments = variant.running.loop_arguments(state)
    loop = variant.compiled(state)
    jax.block_until_ready(arguments)
    return runner.timed(loop, *arguments)


def _counters(tree: Any) -> list[np.ndarray | None]:
    """Returns copies of the small arrays that a run changes, lengths and texts; None for others.

    Keys, values and ring positions stay as the run left them: times do not depend on them.
    """

    def is_counter(x: jax.Array) -> bool:
        return x.ndim < 3 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    return [np.array(x) if is_counter(x) else None for x in jax.tree.leaves(tree)]


def _restored(tree: Any, counters: Sequence[np.ndarray | None]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [
        # A copy: the next call donates it.
        x if counter is None else jax.device_put(counter.copy(), x.sharding)
        for x, counter in zip(leaves, counters, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)
