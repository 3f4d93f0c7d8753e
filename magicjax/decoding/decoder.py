"""The compiled programs of a request: prefill, insert, extract and decode.

::

    decoder = Decoder(request)
    state = decoder.start()
    state = decoder.decode(state)

`magicjax.generate`, `magicjax.stream` and an engine run all their programs here.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from magicjax.decoding import memory, program_cache
from magicjax.decoding.loop import ALL_ROUNDS, DecodeState, Prefilled
from magicjax.decoding.request import Request
from magicjax.decoding.rows import Rows
from magicjax.drafters import Drafter
from magicjax.drafters.base import Previous
from magicjax.grammars.matcher import Matcher, forced_tokens, tree_masks
from magicjax.kv_cache.full_cache import KVCache
from magicjax.settings import PrefillSettings, Settings, StatsSpec
from magicjax.verification.logprobs import LogProbs
from sharding import global_arrays

logger = logging.getLogger("magicjax")


@dataclasses.dataclass
class Clock:
    """The seconds of the programs that ran, without compilation.

    Attributes:
      prefill_s: seconds of prefill, init, insert and extract.
      decode_s: seconds of rounds.
      newest_s: seconds of the newest program.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    newest_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Runs the programs of a request's models and settings.

    States, caches and drafter states that are passed to a method are donated: use the returned
    ones. Every method waits until its program has ended.

    Attributes:
      request: the models, the settings and the rows.
      settings: the loop's settings; None: the request's. The shapes of states follow from the
        request's settings, so these may have another tree that is not deeper.
      without_drafter: whether the loop runs without the drafter, whose state stays as it is.
      clock: adds up the seconds.
      programs: the compiled programs of the loop, by name and settings. To find one by the shapes
        of all arguments takes a millisecond, so decoders of states of equal shapes share them.
    """

    request: Request
    settings: Settings | None = None
    without_drafter: bool = False
    clock: Clock = dataclasses.field(default_factory=Clock)
    programs: dict[Any, jax.stages.Compiled] = dataclasses.field(default_factory=dict)

    @property
    def loop_settings(self) -> Settings:
        """Static settings of the loop."""
        return self.settings or self.request.settings

    @property
    def drafter(self) -> Drafter | None:
        """The drafter that the loop runs."""
        return None if self.without_drafter else self.request.drafter

    def start(self) -> DecodeState:
        """Returns the state after prefill; nothing is compiled if it cannot fit the memory.

        Raises:
          OutOfMemoryError: weights and caches do not fit the free memory.
        """
        memory.check(self.request)
        return self.init(*self.prefill())

    def prefill(
        self,
        rows: Rows | None = None,
        settings: PrefillSettings | None = None,
        cache: KVCache | None = None,
        layer_inputs: dict[int, Any] | None = None,
    ) -> tuple[KVCache, Prefilled]:
        """Returns the target's cache of the prompts, and the other results of prefill.

        Args:
          rows: None: the request's.
          settings: None: the request's; or those of other statistics or another chunk.
          cache: holds the first tokens of each row; None: an empty one is made.
          layer_inputs: the result of earlier calls for the same prompts, as in `ModelStats`; None
            without earlier calls.
        """
        request = self.request
        return self._run(
            "prefill",
            settings or request.prefill_settings,
            request.target,
            rows or request.rows,
            cache,
            layer_inputs,
        )

    def init(
        self, cache: KVCache, prefilled: Prefilled, previous: Previous | None = None
    ) -> DecodeState:
        """Returns the initial state; `previous` is the drafter's state of an earlier text."""
        request = self.request
        return self._run(
            "init",
            request.settings,
            request.target,
            self.drafter,
            cache,
            prefilled,
            request.rows,
            previous,
        )

    def prompt_logprobs(self, cache: KVCache | None = None) -> list[LogProbs | None]:
        """Returns the log-probabilities of each prompt's tokens after the first, as numpy arrays.

        Rows that did not request them have None.

        Args:
          cache: without tokens; None: one is made.
        """
        request = self.request
        count = request.settings.logprobs or 0
        count = max(count, *(params.prompt_logprobs or 0 for params in request.params))
        outputs = StatsSpec(layer_inputs=(request.target.config.num_layers,))
        settings = dataclasses.replace(request.prefill_settings, logprobs=count, stats_spec=outputs)
        logprobs = self._run("prompt_logprobs", settings, request.target, request.rows, cache)
        logprobs = global_arrays.fetch(logprobs)
        return [
            None
            if params.prompt_logprobs is None
            else logprobs[row, : len(prompt) - 1].most_likely(params.prompt_logprobs)
            for row, (params, prompt) in enumerate(zip(request.params, request.prompts))
        ]

    def insert(self, state: DecodeState, row: DecodeState, slot: int) -> DecodeState:
        """Returns the state with a row replaced; `row` is not donated."""
        request, index = self.request, _scalar(slot, state.rounds.sharding)
        return self._run(
            "insert", request.settings, request.target, request.drafter, state, row, index
        )

    def extract(self, state: DecodeState, slot: int) -> tuple[KVCache, Any]:
        """Returns the target's cache and the drafter's state of one row; donates nothing."""
        request, index = self.request, _scalar(slot, state.rounds.sharding)
        return self._run("extract", request.settings, request.target, request.drafter, state, index)

    def decode(
        self,
        state: DecodeState,
        rounds: int = ALL_ROUNDS,
        *,
        until: Literal["all", "any"] = "all",
    ) -> DecodeState:
        """Returns the state after some rounds without grammars, whose number is its `rounds`.

        Args:
          state: the state of the request's rows.
          rounds: the most that run.
          until: they also end when "all" rows have ended, or when "any" row ends.
        """
        max_rounds = _scalar(rounds, state.rounds.sharding)
        with memory.explained(self.request):
            loop = self.loop(state, until)
            state = self._timed(loop, self.request.target, self.drafter, state, max_rounds)
        self.clock.decode_s += self.clock.newest_s
        return state

    def loop(self, state: DecodeState, until: Literal["all", "any"] = "all") -> Any:
        """Returns the compiled loop for a state, or for its shapes."""
        name = {"all": "decode", "any": "decode_until_row_ends"}[until]
        # `rounds` has the shape and sharding of the most rounds.
        return self._program(name, self.request.target, self.drafter, state, state.rounds)

    def decode_round(self, state: DecodeState, matchers: Sequence[Matcher | None]) -> DecodeState:
        """Returns the state after one round under grammars, whose masks the host computes.

        Args:
          state: the state of the request's rows.
          matchers: one per row, each at the end of its text; None for rows that have ended or have
            no grammar.
        """
        start = time.perf_counter() - program_cache.totals()[1]
        target, drafter, sharding = self.request.target, self.drafter, state.ended.sharding

        def call(name: str, *arguments: Any) -> Any:
            return self._program(name, *arguments)(*arguments)

        def forced(count: int) -> jax.Array:
            return global_arrays.put(forced_tokens(matchers, count), sharding)

        with memory.explained(self.request):
            if drafter is not None:
                drafter_state = drafter.with_forced(state.drafter, forced)
                state = dataclasses.replace(state, drafter=drafter_state)
            nodes, proposed = call("propose", target, drafter, state)
            scored = call("score", target, drafter, state, proposed)
            tokens, parents = global_arrays.fetch(nodes)  # while the device scores
            rows = matchers[: len(tokens)]
            masks = tree_masks(rows, tokens, parents, target.config.vocab_size)
            allowed = global_arrays.put(masks, sharding)
            state = call("verify", target, drafter, state, proposed, scored, allowed)
            jax.block_until_ready(state)
        self.clock.newest_s = time.perf_counter() - program_cache.totals()[1] - start
        self.clock.decode_s += self.clock.newest_s
        return state

    def state_shapes(self) -> DecodeState:
        """Returns the shapes of the initial state; runs and allocates nothing."""
        request = self.request
        cache, prefilled = program_cache.result_shapes(
            "prefill", request.prefill_settings, (request.target, request.rows)
        )
        arguments = request.target, self.drafter, cache, prefilled, request.rows
        return program_cache.result_shapes("init", request.settings, arguments)

    def _program(self, name: str, *arguments: Any) -> jax.stages.Compiled:
        """Returns a compiled program of the loop."""
        key = name, self.loop_settings, self.without_drafter
        if key not in self.programs:
            self.programs[key] = program_cache.program(name, self.loop_settings, *arguments)
        return self.programs[key]

    def _run(self, name: str, settings: Any, *arguments: Any) -> Any:
        """Runs a program before or between calls of the loop."""
        with memory.explained(self.request):
            program = program_cache.program(name, settings, *arguments)
            result = self._timed(program, *arguments)
        self.clock.prefill_s += self.clock.newest_s
        return result

    def _timed(self, program: jax.stages.Compiled, *arguments: Any) -> Any:
        before = time.perf_counter()
        result = jax.block_until_ready(program(*arguments))
        self.clock.newest_s = time.perf_counter() - before
        return result


@functools.lru_cache(maxsize=64)
def _scalar(value: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns an int32 array [], which no program donates; a transfer takes 0.3 ms."""
    return global_arrays.put(np.int32(value), sharding)
