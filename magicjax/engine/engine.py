"""The engine: requests join a batch of fixed shape when a slot is free, and leave when they end.

An engine has one decoding state of `slots` rows. `magicjax.engine.scheduler` chooses which request
starts. It is prefilled in a cache of one row (`magicjax.engine.prefill`); the program `insert`
copies that row into a free slot; the loop decodes all slots. A row's tokens depend on its own
prompt and parameters only.
"""

import dataclasses
import itertools
import logging
import time
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from magicjax.checks import check_number
from magicjax.decoding import program_cache
from magicjax.decoding.controller import PROBE_ROUNDS, Probes
from magicjax.decoding.decoder import Clock, Decoder
from magicjax.decoding.loop import Prefilled
from magicjax.decoding.rounds import decode_texts
from magicjax.decoding.validation import check_params
from magicjax.drafters import Drafter
from magicjax.engine import submission
from magicjax.engine.config import EngineConfig
from magicjax.engine.handle import Handle
from magicjax.engine.loops import Loops, simulated_rounds
from magicjax.engine.prefill import PrefillRow
from magicjax.engine.prefix_store import Prefix, make_store
from magicjax.engine.scheduler import Scheduler
from magicjax.engine.setup import (
    empty_drafter,
    empty_layer_inputs,
    empty_row,
    empty_state,
    make_setup,
    row_request,
    with_drafter,
)
from magicjax.engine.stall import StallBudget
from magicjax.engine.stats import Counters, EngineStats
from magicjax.grammars.grammar import Grammar
from magicjax.grammars.matcher import Matcher
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.suggest import explain_unknown
from magicjax.trees.token_tree import Tree
from magicjax.verification.logprobs import LogProbs
from sharding import global_arrays

logger = logging.getLogger("magicjax")


@explain_unknown
class Engine:
    """Decodes requests that come and go, in a batch of fixed shape (continuous batching).

    Greedy requests get the text of `magicjax.generate` for their prompt alone, sampled ones that of
    `generate` with their seed, whoever shares the batch. Both hold up to float32 rounding, which
    can decide ties. Nothing is compiled after `warm_up`; without it, programs are compiled at their
    first use, those of the loop for 1, 4, 16, ... slots.

    ::

        config = magicjax.EngineConfig(slots=8)
        engine = magicjax.Engine(target, "self:streaming:256", "chain:4", config)
        handles = [engine.submit(prompt) for prompt in prompts]
        engine.run()
        texts = [handle.result().text for handle in handles]

    Use an engine from one thread.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | str | None = None,
        tree: Tree | str | None = None,
        config: EngineConfig = EngineConfig(),
        *,
        mesh: Mesh | None = None,
    ):
        """Validates the configuration and allocates the caches; compiles nothing.

        Args:
          target: a model from `magicjax.load`.
          drafter: a drafter or its text, see `magicjax.generate`, but not "auto"; None for plain
            decoding.
          tree: the drafter's tree or its text; None for its default.
          config: shapes, limits and features.
          mesh: a mesh whose axis `data` divides the slots and `model` each layer, without stages;
            None for one device. All processes of a mesh create the engine, and call its methods in
            the same order with the same arguments.

        Raises:
          ValueError, TypeError: invalid arguments, see `magicjax.generate`; a drafter whose
            state cannot be inserted row by row; a store of prefixes for a policy that reads all
            prompt tokens; adaptive without a drafter; another verifier than naive if adaptive, or
            with a drafter that remembers texts;
            slots that do not divide over the mesh's `data`; slots, rows for prefill and prefixes
            that do not fit the free memory.
        """
        if not isinstance(config, EngineConfig):
            raise TypeError(
                f"config has type {type(config).__name__}: pass magicjax.EngineConfig(...)"
            )
        self._setup = make_setup(target, drafter, tree, config, mesh)
        self._first_drafter = self._setup.row.drafter  # remembers no requests
        config, slots = self._setup.config, self._setup.slots
        self._prefixes = make_store(self._setup)
        self._scheduler = Scheduler[Handle](
            config.slots,
            rule=self._setup.prefill_rule,
            groups=slots.settings.groups,
            queue_limit=config.queue_limit,
            prefill_rows=config.prefill_rows,
            fill_first=config.max_stall_ms is None,
            min_shared=self._prefixes.min_shared if self._prefixes.max_entries else None,
        )
        self._clock = Clock()
        self._loops = Loops(slots, config.adaptive)
        self._counters = Counters(self._loops.settings)
        self._state = empty_state(self._setup)
        stall_ms = config.max_stall_ms
        self._stall = StallBudget(None if stall_ms is None else stall_ms / 1e3)
        self._ended = np.ones(config.slots, bool)  # in the state, or by the host
        self._ended_by_host = False  # since the state was last changed
        self._rows: dict[Handle, PrefillRow] = {}  # of the requests in prefill
        self._spare_rows: list[tuple[Any, Any]] = []  # buffers for prefill

    @explain_unknown
    def submit(
        self,
        prompt: Any,
        params: SamplingParams = SamplingParams(max_tokens=None),
        *,
        priority: float = 0,
        deadline_s: float | None = None,
    ) -> Handle:
        """Queues a request; runs nothing.

        Args:
          prompt: text, token ids, what the tokenizer returned for one text, or messages of a chat,
            which the chat template renders.
          params: how the tokens are chosen and where the text ends; the default is greedy decoding
            of as many tokens as fit. A temperature above 0, a grammar and log-probabilities require
            an engine that was created for them.
          priority: requests of larger priority start first; waiting for 10 s adds 1.
          deadline_s: seconds from now after which the request ends with the tokens so far.

        Raises:
          ValueError, TypeError: invalid arguments, a prompt without room for new tokens, params
            that the engine was not created for, a deadline in the past, or a deadline or priority
            on a mesh of several processes, whose clocks differ.
          QueueFullError: the queue is full. In all cases other requests go on.
        """
        self._scheduler.check_room(1)
        text = submission.validated_text(self._setup, prompt, params, priority, deadline_s)
        handle = Handle(self, text, priority, deadline_s)
        self._scheduler.add(handle)
        return handle

    @explain_unknown
    def submit_samples(
        self,
        prompt: Any,
        n: int,
        params: SamplingParams = SamplingParams(max_tokens=None),
        *,
        priority: float = 0,
        deadline_s: float | None = None,
    ) -> list[Handle]:
        """Queues n requests of one prompt, with the seeds `seed`, `seed` + 1, ... modulo 2**32.

        The prompt is prefilled once, if the engine stores prefixes; else n times.

        Args:
          prompt, priority, deadline_s: arguments of `submit`.
          n: the number of requests.
          params: parameters of the first request; the others have the following seeds.

        Raises:
          ValueError, TypeError: as `submit`; n below 1; a queue without room for all of them.
        """
        check_params(params)
        check_number("n", n, ge=1)
        self._scheduler.check_room(n)
        handles: list[Handle] = []
        for i in range(n):
            sample = dataclasses.replace(params, seed=(params.seed + i) % 2**32)
            handles.append(self.submit(prompt, sample, priority=priority, deadline_s=deadline_s))
            prompt = handles[0].prompt  # tokenized once
        return handles

    def step(self) -> None:
        """Decodes some rounds, prefills, and starts requests that wait; hands out new tokens.

        A request's first token follows its prefill. If nothing is decoded yet, the free slots are
        filled first, in one or several steps. Each call of a program synchronizes once.
        """
        if self._loops.untimed:
            self._state = self._loops.time_rounds(self._setup, self._state)
        counters, begin, compiled_s = self._counters, time.monotonic(), program_cache.totals()[1]
        device_s = self._device_s
        for handle in self._scheduler.expired(begin):
            self._end(handle, "deadline")
        if self._scheduler.begin_step():
            self._decode()
        self._prefill()
        counters.steps += 1
        device_s = self._device_s - device_s
        compile_s = program_cache.totals()[1] - compiled_s
        counters.host_s += time.monotonic() - begin - device_s - compile_s

    def run(self) -> None:
        """Runs steps until all requests have finished."""
        while self.unfinished:
            self.step()

    def warm_up(self) -> None:
        """Compiles all programs, by running short requests; then forgets their statistics.

        With `adaptive`, rounds are timed too.

        Raises:
          RuntimeError: there are unfinished requests.
        """
        if self.unfinished:
            raise RuntimeError("warm_up with unfinished requests: call it before submit, or later")
        target, longest = self._setup.row.target, self._longest_warm_up
        params = SamplingParams(max_tokens=1, prompt_logprobs=self.config.logprobs)
        # These requests draft, whatever the timed rounds are: another program makes their state.
        loops = self._loops
        can_be_disabled = loops.controller.can_be_disabled
        loops.controller = dataclasses.replace(loops.controller, can_be_disabled=False)
        for _ in range(2):  # the second one starts from the prefix of the first
            self.submit(np.zeros(longest, np.int32), params)
            self.run()
        self._decode()  # these requests end at their first token
        drafter = self._setup.row.drafter
        if drafter is not None and drafter.can_be_disabled:
            self.submit(
                np.zeros(longest, np.int32), SamplingParams(max_tokens=1, speculative=False)
            )
            self.run()
        request, clock = self._setup.slots, self._clock
        for mode, rows in itertools.product(loops.settings, loops.sizes):
            loops.decoder(request, clock, mode, rows).loop(self._state, "any")
        if self.config.grammars:
            if target.tokenizer is not None and self._setup.row.eos:
                Matcher(target, Grammar.json_object(), self._setup.row.eos)  # reads the tokenizer
            no_matchers = [None] * self.config.slots
            for mode, rows in itertools.product(loops.settings, loops.grammar_sizes):
                decoder = loops.decoder(request, clock, mode, rows)
                self._state = decoder.decode_round(self._state, no_matchers)
        self._prefixes.clear()
        self.forget_texts()
        self._counters, self._clock = Counters(loops.settings), Clock()
        loops.controller = dataclasses.replace(
            loops.controller, probes=Probes(), can_be_disabled=can_be_disabled
        )

    @property
    def num_programs(self) -> int:
        """The number of programs that `warm_up` compiles, besides those that the process has."""
        drafter, config = self._setup.row.drafter, self.config
        prefill = len(self._setup.prefill_rule.chunks(self._longest_warm_up))
        init = 1 + (drafter is not None and drafter.can_be_disabled)
        rows = prefill + init + 1  # one inserts the row
        rows += bool(self._prefixes.max_entries)  # extracts it
        rows += config.logprobs is not None  # computes those of a prompt
        return rows + self._loops.num_programs(config.grammars)

    @property
    def _longest_warm_up(self) -> int:
        """The tokens of a prompt with all kinds of pieces, if the capacity allows it."""
        rule = self._setup.prefill_rule
        return min(self._setup.capacity - 1, rule.largest + max(rule.window, 1 + rule.overlap))

    def forget_texts(self) -> None:
        """Forgets the texts of finished requests that the drafter remembers."""
        self._setup = with_drafter(self._setup, self._first_drafter)

    @property
    def config(self) -> EngineConfig:
        """The configuration; its capacity, limit, verifier and EOS are those that are used."""
        return self._setup.config

    @property
    def stats(self) -> EngineStats:
        """Counts and times so far."""
        kv_bytes, probes = self._setup.kv_bytes, self._loops.controller.probes
        return self._counters.stats(self._scheduler, self._prefixes, self._clock, kv_bytes, probes)

    @property
    def unfinished(self) -> list[Handle]:
        """The requests that wait, are prefilled, or run."""
        return self._scheduler.unfinished

    def cancel(self, handle: Handle) -> None:
        """Ends a request with the tokens so far; does nothing if it is finished."""
        if not isinstance(handle, Handle):
            raise TypeError(f"handle={handle!r}: pass the handle that submit returned")
        if not handle.finished:
            self._end(handle, "cancelled")

    # What follows runs inside `step` and `cancel`.

    def _decode(self) -> None:
        """Runs the loop, hands out new tokens and ends requests."""
        if self._ended_by_host:
            ended = global_arrays.put(self._ended, self._state.ended.sharding)
            self._state = dataclasses.replace(self._state, ended=ended)
            self._ended_by_host = False
        running, slots = self._scheduler.running, self._setup.slots
        live = {slot: handle.text.lengths for slot, handle in running.items()}
        texts = [running[i].text if i in running else None for i in range(self.config.slots)]
        has_grammars = any(text is not None and text.matcher for text in texts)
        decoder = self._loops.choose(slots, self._clock, live, has_grammars)
        controller = self._loops.controller
        prompts_wait = bool(self._scheduler.prefilling or self._scheduler.waiting)
        rounds = self._stall.rounds(self.config.rounds_per_step, prompts_wait)
        rounds = min(rounds, PROBE_ROUNDS) if controller.is_probe else rounds
        state = decode_texts(decoder, self._state, texts, rounds, until="any")
        seconds = self._clock.newest_s
        simulated = {}
        if len(self._loops.settings) > 1 and slots.drafter is not None:
            simulated = simulated_rounds(slots.drafter, state.drafter)
        results = (
            state.rounds,
            state.emitted,
            state.output,
            state.ended,
            state.histogram,
            state.nodes,
            simulated,
        )
        results = global_arrays.fetch(results)
        rounds_run, emitted, output, ended, histogram, nodes, simulated = results
        rounds = int(rounds_run)
        self._state = state
        self._stall.count_rounds(rounds, seconds)
        chunk = self._setup.prefill_rule.chunk
        self._scheduler.limit_prefill(self._stall.prompt_tokens(rounds, chunk))
        wants_logprobs = any(handle.text.params.logprobs is not None for handle in running.values())
        logprobs = global_arrays.fetch(state.logprobs) if wants_logprobs else None
        self._counters.rounds_by_arm[controller.mode] += rounds
        self._loops.controller = controller.counted(histogram, rounds, seconds, simulated)
        self._ended = ended.copy()
        for slot, handle in list(running.items()):
            drafts = handle.text.params.speculative and slot not in controller.disabled
            depth = controller.mode.depth if drafts else 0
            handle.count(depth, histogram[slot], int(nodes[slot]))
            tokens = output[slot, : emitted[slot]]
            self._deliver(handle, tokens, logprobs and logprobs[slot], ended[slot])

    @property
    def _device_s(self) -> float:
        return self._clock.prefill_s + self._clock.decode_s

    def _prefill(self) -> None:
        """Prefills and inserts requests that wait while slots are free."""
        while True:
            self._start_requests()
            if (next_piece := self._scheduler.next_piece()) is None:
                return
            handle, piece = next_piece
            prefilled = self._rows[handle].advance(piece)
            if piece.chunk == self._setup.prefill_rule.chunk:
                self._stall.count_tokens(piece.tokens, self._clock.newest_s)
            handle.prefilled_tokens += piece.end - piece.first
            if piece.end == len(handle.prompt):
                self._insert(handle, prefilled)

    def _start_requests(self) -> None:
        """Starts the prefill of the requests that may start now."""
        while (handle := self._scheduler.next_to_start(self._prefixes.match)) is not None:
            handle.started_at = time.monotonic()
            decoder = Decoder(row_request(self._setup, handle.text), clock=self._clock)
            prompt = handle.prompt
            if self._spare_rows and self._prefixes.match(prompt):
                del self._spare_rows[-1]  # before its place is taken by a copy
            row, reused = self._prefixes.copy_longest(prompt)
            if row is None:
                row = self._spare_rows.pop() if self._spare_rows else empty_row(self._setup)
            handle.reused_tokens, inputs = reused, empty_layer_inputs(self._setup)
            self._rows[handle] = PrefillRow(decoder, *row, reused, inputs)
            shared, rule = 0, self._setup.prefill_rule
            if rule.keeps_states:
                shared = self._prefixes.shared(prompt)
                if reused:
                    self._rows[handle].keep_states(rule.first(reused))
            self._scheduler.start(handle, reused, shared)

    def _insert(self, handle: Handle, prefilled: Prefilled) -> None:
        """Copies a prefilled row into a free slot, and hands out its first token."""
        prefilling = self._rows.pop(handle)
        if handle.text.params.prompt_logprobs is not None:
            cache, _ = empty_row(self._setup)
            (handle.prompt_logprobs,) = prefilling.decoder.prompt_logprobs(cache)
        disabled = not handle.text.params.speculative or self._would_disable(handle)
        slot = self._scheduler.insert(handle)
        drafter = self._setup.row.drafter
        without_drafter = disabled and drafter is not None and drafter.can_be_disabled
        row = prefilling.finish(prefilled, without_drafter)
        if without_drafter:
            row = dataclasses.replace(row, drafter=empty_drafter(self._setup))
        decoder = Decoder(self._setup.slots, clock=self._clock)
        self._state = decoder.insert(self._state, row, slot)
        self._loops.controller = self._loops.controller.joined(slot, disabled)
        results = row.ended, row.pending, row.logprobs, row.emitted
        ended, first_tokens, logprobs, emitted = global_arrays.fetch(results)
        if emitted[0]:  # else the cache has NaN
            self._store_prefix(Prefix(handle.prompt, row.cache, row.drafter, prefilling.snapshots))
        self._ended[slot] = ended[0]
        # None, if the prompt alone is evaluated.
        first_tokens = first_tokens[: min(emitted[0], handle.text.limit)]
        self._deliver(handle, first_tokens, logprobs and logprobs[0], ended[0])

    def _would_disable(self, handle: Handle) -> bool:
        """Returns whether to disable speculation for a request, given the others until it ends."""
        running, prefilling = self._scheduler.running, self._scheduler.prefilling
        live = {slot: other.text.lengths for slot, other in running.items()}
        prefilling_others = (other for other, *_ in prefilling if other is not handle)
        upcoming = itertools.chain([handle], prefilling_others, self._scheduler.waiting)
        free = (slot for slot in range(self.config.slots) if slot not in running)
        joining = dict(zip(free, (other.text.lengths for other in upcoming), strict=False))
        return self._loops.controller.would_disable(live, joining)

    def _deliver(
        self, handle: Handle, tokens: Int[np.ndarray, "T"], logprobs: LogProbs | None, ended: bool
    ) -> None:
        """Hands out the new ones of a row's tokens, and ends its request with the row."""
        handle.deliver(tokens, logprobs, ended, time.monotonic())
        if reason := handle.text.finish_reason:
            if reason == "error":
                logger.warning("a request ends: %s", handle.text.error)
            self._end(handle, reason)

    def _end(self, handle: Handle, reason: str) -> None:
        """Ends a request, wherever it is; stores the text of a row, for the next turn of a chat.

        The drafter remembers texts that were not cut short.
        """
        slot, prompt = self._scheduler.remove(handle), handle.prompt
        text = np.concatenate([prompt, handle.tokens])
        if slot is not None:
            self._ended_by_host |= not self._ended[slot]
            self._ended[slot] = True
            if self._prefixes.max_entries and reason != "error":  # it may have NaN
                decoder = Decoder(self._setup.row, clock=self._clock)
                cached = decoder.extract(self._state, slot)
                self._store_prefix(Prefix(text[:-1], *cached))  # the last token is pending
        elif (row := self._rows.pop(handle, None)) is not None:
            self._keep_buffers((row.cache, row.drafter_state))
        drafter = self._setup.row.drafter
        if drafter is not None and drafter.remembers and reason in ("eos", "length", "stop"):
            updated_drafter = drafter.remember(text, len(prompt))
            self._setup = with_drafter(self._setup, updated_drafter)
        self._counters.count(handle.finish(reason, time.monotonic()))

    def _store_prefix(self, prefix: Prefix) -> None:
        if (buffers := self._prefixes.add(prefix)) is not None:
            self._keep_buffers(buffers)

    def _keep_buffers(self, row: tuple[Any, Any]) -> None:
        """Keeps buffers for later prompts, as many as can be prefilled at once."""
        if len(self._spare_rows) + len(self._rows) < self.config.prefill_rows:
            self._spare_rows.append(row)
