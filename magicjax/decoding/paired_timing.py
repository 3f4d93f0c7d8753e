"""Interleaved timing of several decode programs on one target cache.

In every repeat each decoder runs a few rounds of the compiled loop from the same state, so a busy
moment of the machine affects all of a repeat. Compare ratios within repeats.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from magicjax.decoding import memory, program_cache
from magicjax.decoding.decoder import Clock, Decoder
from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.decoding.output import Output, output_of, texts_of
from magicjax.decoding.request import Request
from magicjax.decoding.rounds import Show, run_to_end
from magicjax.drafters import Drafter
from magicjax.kv_cache.full_cache import KVCache
from magicjax.settings import PrefillSettings
from sharding import global_arrays

ROUNDS = 16  # most rounds of a timed call
CALL_SECONDS = 0.1  # a call of longer rounds runs as many as take this long, at least 2


@dataclasses.dataclass(frozen=True)
class PrefilledPrompts:
    """The target's cache after prefill, from which several runs start, one at a time.

    `start` donates the cache to a run. `reset` returns the object for the next run. JAX raises an
    error if a donated cache is used again. `seconds` is the time of prefill by `decoder` with
    `settings`.
    """

    decoder: Decoder
    settings: PrefillSettings
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
        decoder = Decoder(request)
        cache, prefilled = decoder.prefill(settings=settings)
        lengths = global_arrays.fetch(request.rows.lengths)
        return cls(decoder, settings, cache, prefilled, lengths, decoder.clock.prefill_s)

    def generate(
        self, request: Request, show: Show | None = None
    ) -> tuple[Output, "PrefilledPrompts"]:
        """Returns (the request's output, the prompts for the next run).

        Its time of prefill is that of `create`, plus the request's `init`. `show` is that of
        `run_to_end`.
        """
        compiled = program_cache.totals()
        decoder, texts = Decoder(request, clock=Clock(prefill_s=self.seconds)), texts_of(request)
        state = run_to_end(decoder, self.start(decoder), texts, show)
        return output_of(decoder, state, texts, compiled), self.reset(state)

    def start(self, decoder: Decoder) -> DecodeState:
        """Returns the state after prefill of the decoder's request."""
        prefilled = self.prefilled
        if decoder.request.drafter is None:  # without attention statistics
            stats = dataclasses.replace(prefilled.stats, queries=None, total=None)
            prefilled = dataclasses.replace(prefilled, stats=stats)
        return decoder.init(self.cache, prefilled)

    def reset(self, state: DecodeState) -> "PrefilledPrompts":
        """Returns the prompts with the cache of a run's last state, cut back to the prompts.

        With rings, whose oldest entries a run overwrites, or states, the prompts are prefilled
        again.
        """
        slots = {keys.shape[2] for keys in jax.tree.leaves(state.cache.k) if keys.ndim == 4}
        if state.cache.states or min(slots) < self.settings.capacity:
            cache, prefilled = self.decoder.prefill(settings=self.settings)
            return dataclasses.replace(self, cache=cache, prefilled=prefilled)
        # A copy: the array may share memory with NumPy's, and the next run donates it.
        lengths = global_arrays.put(self.lengths.copy(), state.cache.lengths.sharding)
        return dataclasses.replace(self, cache=dataclasses.replace(state.cache, lengths=lengths))


def time_decoders(
    prefilled: PrefilledPrompts, decoders: Sequence[Decoder], repeats: int, min_seconds: float = 0.0
) -> tuple[list[list[float]], PrefilledPrompts]:
    """Returns (`time_interleaved` after prefill, the prompts for the next run).

    The requests of all decoders have the same tree.
    """
    drafters: dict[int, Any] = {}
    state = None
    for decoder in decoders:
        key = id(decoder.request.drafter)
        if state is None or key not in drafters:
            prefilled = prefilled if state is None else prefilled.reset(state)
            state = prefilled.start(decoder)
            drafters[key] = state.drafter
        state = dataclasses.replace(state, drafter=drafters[key])
        decoder.loop(state)
    assert state is not None, "nothing to time"
    times, state = time_interleaved(decoders, state, drafters, repeats, min_seconds)
    return times, prefilled.reset(state)


def time_interleaved(
    decoders: Sequence[Decoder],
    state: DecodeState,
    drafters: Mapping[int, Any],
    repeats: int,
    min_seconds: float = 0.0,
    until: Literal["all", "any"] = "all",
) -> tuple[list[list[float]], DecodeState]:
    """Returns (seconds per round of each decoder in each repeat, the state after the last call).

    Decoders with the same drafter object share one drafter state: its address affects times.

    Args:
      decoders: each is called once per repeat, in random order.
      state: as deep as the deepest tree; donated.
      drafters: the drafter states by `id` of the drafter; donated.
      repeats: at least this many, after one that is not counted.
      min_seconds: repeats continue until the calls have taken this long.
      until: rounds end when "all" rows have ended, or when "any" row ends.
    """
    state, drafters = dataclasses.replace(state, drafter=None), dict(drafters)
    counters = _counters(state)
    drafter_counters = {key: _counters(drafter) for key, drafter in drafters.items()}
    rounds = [2] * len(decoders)
    times: list[list[float]] = [[] for _ in decoders]
    rng, repeat, spent = np.random.default_rng(0), 0, 0.0
    while repeat <= repeats or spent < min_seconds:
        for i in rng.permutation(len(decoders)):
            key = id(decoders[i].request.drafter)
            drafter = _restored(drafters[key], drafter_counters[key])
            state = dataclasses.replace(_restored(state, counters), drafter=drafter)
            jax.block_until_ready(state)
            state = decoders[i].decode(state, rounds[i], until=until)
            spent += decoders[i].clock.newest_s
            seconds = decoders[i].clock.newest_s / int(state.rounds)  # rows may end before
            drafters[key], state = state.drafter, dataclasses.replace(state, drafter=None)
            if repeat:
                times[i].append(seconds)
            else:
                rounds[i] = max(2, min(ROUNDS, round(CALL_SECONDS / max(seconds, 1e-6))))
        repeat += 1
    return times, state


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the median over repeats of one decoder's seconds divided by another's."""
    return statistics.median(np.divide(times, baseline))


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
