"""The engine: requests join a batch of fixed shape when a slot is free, and leave when they end.

An engine has one decoding state of `slots` rows. A request is prefilled in a cache of one row
(`magicjax.engine.prefill`); the program `insert` copies that row into a free slot; the loop decodes
all slots. A row's tokens depend on its own prompt, limits, sampling and seed only.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from magicjax.decoding import program_cache, runner
from magicjax.drafters import Drafter
from magicjax.engine import prefill, speculation, submission
from magicjax.engine.config import EngineConfig
from magicjax.engine.handle import FINISH_REASONS, Handle, QueueFullError
from magicjax.engine.prefill import Prefilling
from magicjax.engine.prefix_store import Prefix, make_store
from magicjax.engine.request import EngineRequest
from magicjax.engine.speculation import DepthChooser
from magicjax.engine.stats import EngineStats
from magicjax.engine.templates import (
    empty_row,
    empty_state,
    make_templates,
    row_of_request,
    with_grammar,
)
from magicjax.grammars.arena import CLASSES, Arena
from magicjax.grammars.masking import GrammarRows
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.trees.token_tree import Tree
from magicjax.verification.logprobs import LogProbs
from sharding import processes

AGING_S = 10.0  # waiting for this long raises a request's priority by 1


class Engine:
    """Decodes requests that come and go, in a batch of fixed shape (continuous batching).

    Greedy requests get the text of `magicjax.generate` for their prompt alone, sampled ones that of
    `generate` with their seed, whoever shares the batch. Both hold up to float32 rounding, which
    can decide ties. After `warm_up`, or after the first requests of each kind, nothing is compiled.

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
          drafter: as for `magicjax.generate`, except "auto"; None for plain decoding.
          tree: as for `magicjax.generate`.
          config: shapes, limits and features.
          mesh: of devices: `data` divides the slots, `model` each layer, and there are no stages;
            None for one device. All processes of a mesh create the engine, and call its methods in
            the same order with the same arguments.

        Raises:
          ValueError, TypeError: invalid arguments, as for `magicjax.generate`; a drafter whose
            state cannot be inserted row by row; a store of prefixes for a policy that reads all
            prompt tokens; adaptive_depth without a drafter, or with another verifier than naive;
            slots that do not divide over the mesh's `data`; slots, rows for prefill and prefixes
            that do not fit the free memory.
        """
        self._templates = make_templates(target, drafter, tree, config, mesh)
        config = self._templates.config
        self._arena = Arena(config.grammar_states * CLASSES)
        self._eos = set(processes.fetch(self._templates.row.eos).tolist())
        self._prefixes = make_store(self._templates)
        self._loops = speculation.loops(self._templates.slots, config.adaptive_depth)
        self._depths = DepthChooser.create(self._loops, config.slots)
        self._state = empty_state(self._templates)
        self._ended = np.ones(config.slots, bool)  # in the state, or by the host
        self._ended_by_host = False  # since the state was last changed
        self._delivered = np.zeros(config.slots, np.int32)  # tokens that handles have
        self._queue: list[Handle] = []
        self._prefilling: list[tuple[Handle, Prefilling]] = []  # the next one to advance first
        self._running: dict[int, Handle] = {}  # by slot
        self._filling = 0  # requests that may still start before the loop runs
        self._spare_rows: list[tuple[Any, Any]] = []  # buffers for prefill
        self._reset_stats()

    def submit(
        self,
        prompt: str | Sequence[int] | Int[np.ndarray, "T"],
        params: SamplingParams = SamplingParams(max_tokens=None),
        *,
        priority: float = 0,
        deadline_s: float | None = None,
    ) -> Handle:
        """Queues a request; runs nothing.

        Args:
          prompt: text, or token ids.
          params: how the tokens are chosen and where the text ends; the default is greedy decoding
            of as many tokens as fit. A temperature above 0, a grammar and log-probabilities require
            an engine that was created for them. A new grammar is compiled on the host in this call,
            and the request waits until it fits beside the grammars in use.
          priority: requests of larger priority start first; waiting for 10 s adds 1.
          deadline_s: seconds from now after which the request ends with the tokens so far.

        Raises:
          ValueError, TypeError: invalid arguments, a prompt without room for new tokens, params
            that the engine was not created for, a deadline in the past, or a deadline or priority
            on a mesh of several processes, whose clocks differ.
          QueueFullError: the queue is full. In all cases other requests go on.
        """
        self._check_queue(1)
        request = submission.validated(self._templates, prompt, params, priority, deadline_s)
        handle = Handle(self, request, self._templates.row.target.tokenizer)
        self._queue.append(handle)
        return handle

    def submit_samples(
        self,
        prompt: str | Sequence[int] | Int[np.ndarray, "T"],
        n: int,
        params: SamplingParams = SamplingParams(max_tokens=None),
        *,
        priority: float = 0,
        deadline_s: float | None = None,
    ) -> list[Handle]:
        """Queues n requests of one prompt, with the seeds `seed`, `seed` + 1, ... modulo 2**32.

        The prompt is prefilled once, if the engine stores prefixes; else n times.

        Args:
          prompt, priority, deadline_s: as for `submit`.
          n: the number of requests.
          params: of the first request; the others have the following seeds.

        Raises:
          ValueError, TypeError: as `submit`; n below 1; several greedy requests, whose texts would
            be equal; a queue without room for all of them.
        """
        submission.check_samples(n, params)
        self._check_queue(n)
        handles: list[Handle] = []
        for i in range(n):
            sample = dataclasses.replace(params, seed=(params.seed + i) % 2**32)
            handles.append(self.submit(prompt, sample, priority=priority, deadline_s=deadline_s))
            prompt = handles[0].request.prompt  # tokenized once
        return handles

    def step(self) -> None:
        """Decodes some rounds, prefills, and starts requests that wait; hands out new tokens.

        A request's first token follows its prefill. If nothing is decoded yet, the free slots are
        filled first, in one or several steps. Each call of a program synchronizes once.
        """
        if len(self._loops) > 1 and self._depths.times is None:
            self._time_rounds()
        begun, compiled_s = time.monotonic(), program_cache.totals()[1]
        for handle in self._unfinished():
            if (deadline_s := handle.request.deadline_s) is not None and deadline_s <= begun:
                self._end(handle, "deadline")
        self._end_rows()
        device_s = self._prefill_s + self._loop_s
        if not self._running:
            self._filling = len(self._ended)
        elif not self._filling:
            self._decode()
        self._admit()
        self._steps += 1
        device_s = self._prefill_s + self._loop_s - device_s
        compile_s = program_cache.totals()[1] - compiled_s
        self._host_s += time.monotonic() - begun - device_s - compile_s

    def run(self) -> None:
        """Runs steps until all requests have finished."""
        while self._unfinished():
            self.step()

    def warm_up(self) -> None:
        """Compiles all programs, by running short requests; then forgets their statistics.

        With `adaptive_depth`, rounds are timed too.

        Raises:
          RuntimeError: there are unfinished requests.
        """
        if self._unfinished():
            raise RuntimeError("warm_up with unfinished requests: call it before submit, or later")
        longest = min(self._templates.capacity - 1, self.config.prefill_chunk + 1)
        for _ in range(2):  # the second one starts from the prefix of the first
            self.submit(np.zeros(longest, np.int32), SamplingParams(max_tokens=1))
            self.run()
        self._decode()  # these requests end at their first token
        self._prefixes.clear()
        self._reset_stats()

    def forget_prefixes(self) -> None:
        """Empties the prefix store and its counts."""
        self._prefixes.clear()

    @property
    def config(self) -> EngineConfig:
        """The configuration; its capacity, limit, verifier and EOS are those that are used."""
        return self._templates.config

    @property
    def stats(self) -> EngineStats:
        """Counts and times so far."""
        seconds = self._loop_s + self._prefill_s + self._host_s
        store, waiting = self._prefixes, len(self._queue) + len(self._prefilling)
        return EngineStats(
            finished=dict(self._finished),
            waiting=waiting,
            running=len(self._running),
            new_tokens=self._new_tokens,
            steps=self._steps,
            loop_s=self._loop_s,
            prefill_s=self._prefill_s,
            host_s=self._host_s,
            tokens_per_s=self._new_tokens / seconds if seconds else 0.0,
            prefix_lookups=store.lookups,
            prefix_hits=store.hits,
            prefix_host_hits=store.host_hits,
            reused_tokens=store.reused_tokens,
            prefix_bytes=store.num_bytes,
            prefix_host_bytes=store.num_host_bytes,
            kv_bytes=self._templates.kv_bytes,
            rounds_by_depth=dict(self._rounds),
        )

    def cancel(self, handle: Handle) -> None:
        """Ends an unfinished request with the tokens so far; `Handle.cancel` calls it."""
        self._end(handle, "cancelled")

    # What follows runs inside `step` and `submit`.

    def _check_queue(self, new: int) -> None:
        limit = self.config.queue_limit
        if len(self._queue) + new > limit:
            raise QueueFullError(
                f"the queue has {len(self._queue)} requests, and with {new} more it exceeds "
                f"queue_limit={limit}: run engine.step() until some have started, or "
                "create the engine with a larger limit"
            )

    def _unfinished(self) -> list[Handle]:
        prefilling = [handle for handle, _ in self._prefilling]
        return [*self._running.values(), *prefilling, *self._queue]

    def _time_rounds(self) -> None:
        """Times the loop at each depth, before the first request."""
        times, self._state = speculation.time_rounds(self._templates, self._loops, self._state)
        self._depths = dataclasses.replace(self._depths, times=times)

    def _end_rows(self) -> None:
        """Ends the rows of requests that the host has ended."""
        if self._ended_by_host:
            ended = processes.put(self._ended, self._state.ended.sharding)
            self._state = dataclasses.replace(self._state, ended=ended)
            self._ended_by_host = False

    def _admit(self) -> None:
        """Prefills and inserts requests that wait while slots are free.

        At most `prefill_chunk` tokens are prefilled, or one piece. Prompts of several pieces take
        turns.
        """
        tokens = 0
        while True:
            self._start_prefills()
            if not self._prefilling:  # no slot is free, or no request waits
                self._filling = 0
                return
            handle, prefilling = self._prefilling[0]
            piece = prefilling.pieces[0]
            if tokens and tokens + piece.tokens > self.config.prefill_chunk:
                return
            tokens += piece.tokens
            prefilled, seconds = prefill.advance(prefilling)
            handle.prefilled_tokens += piece.end - piece.first
            self._prefill_s += seconds
            del self._prefilling[0]
            if prefilling.pieces:
                self._prefilling.append((handle, prefilling))
            else:
                self._insert(handle, prefilling, prefilled)

    def _start_prefills(self) -> None:
        """Starts the prefill of the first requests of the queue that have slots."""
        while (
            self._queue
            and len(self._prefilling) < self.config.prefill_rows
            and len(self._running) + len(self._prefilling) < len(self._ended)
        ):
            handle = min(self._queue, key=lambda handle: _due_s(handle.request))
            current = [other.request.prompt for other, _ in self._prefilling]
            if self._prefixes.is_worth_waiting(handle.request.prompt, current):
                return
            automaton = handle.request.grammar
            self._templates, grammar = with_grammar(self._templates, self._arena, automaton)
            if automaton is not None and grammar is None:
                return  # until the grammars of other requests leave
            self._queue.remove(handle)
            handle.started_s = time.monotonic()
            self._prefilling.append((handle, self._start(handle, grammar)))

    def _start(self, handle: Handle, grammar: GrammarRows | None) -> Prefilling:
        """Returns the prefill of a request, from the longest prefix that is stored."""
        templates, prompt = self._templates, handle.request.prompt
        request = row_of_request(templates, handle.request, grammar)
        row, reused = self._prefixes.copy_longest(prompt)
        spare = self._spare_rows.pop() if self._spare_rows else None  # dropped if there is a copy
        row = row or spare or empty_row(templates)
        prefilling = prefill.start(templates, request, row, reused)
        handle.reused_tokens = prefilling.reused
        return prefilling

    def _insert(self, handle: Handle, prefilling: Prefilling, prefilled: Any) -> None:
        """Copies a prefilled row into a free slot, and hands out its first token."""
        row, finish_s = prefill.finish(prefilling, prefilled)
        slot, self._filling = self._free_slot(), max(0, self._filling - 1)
        self._state, insert_s = runner.insert(self._templates.slots, self._state, row, slot)
        self._running[slot], self._delivered[slot] = handle, 0
        ended, first, logprobs = processes.fetch((row.ended, row.pending, row.logprobs))
        self._ended[slot] = ended[0]
        self._depths = self._depths.joined(slot)
        self._store_prefix(Prefix(handle.request.prompt, row.cache, row.drafter))
        self._prefill_s += finish_s + insert_s
        self._deliver(slot, first, logprobs and logprobs[0])

    def _free_slot(self) -> int:
        """Returns a free slot of the group of devices that has the fewest requests."""
        slots, groups = len(self._ended), self._templates.slots.settings.groups
        requests = collections.Counter(slot * groups // slots for slot in self._running)
        free = (slot for slot in range(slots) if slot not in self._running)
        return min(free, key=lambda slot: requests[slot * groups // slots])

    def _store_text(self, slot: int, tokens: Int[np.ndarray, "T"]) -> None:
        """Stores the row of a finished request as a prefix, for the next turn of a chat."""
        if self._prefixes.max_entries:
            row, seconds = runner.extract(self._templates.row, self._state, slot)
            self._store_prefix(Prefix(tokens, *row))
            self._prefill_s += seconds

    def _store_prefix(self, prefix: Prefix) -> None:
        if (unused := self._prefixes.add(prefix)) is not None:
            self._spare_buffers(unused)

    def _spare_buffers(self, row: tuple[Any, Any]) -> None:
        if len(self._spare_rows) + len(self._prefilling) < self.config.prefill_rows:
            self._spare_rows.append(row)

    def _decode(self) -> None:
        """Runs the loop, hands out new tokens and ends requests."""
        self._depths = self._depths.chosen(self._live_rows())
        depth, slots = self._depths.depth, self._templates.slots
        s, seconds = runner.run_until_row_ends(slots, self._loops[depth], self._state)
        self._state = s
        emitted, output, ended, histogram, nodes, rounds = processes.fetch(
            (s.emitted, s.output, s.ended, s.histogram, s.nodes, s.rounds)
        )
        asked = any(handle.request.params.logprobs is not None for handle in self._running.values())
        logprobs = processes.fetch(s.logprobs) if asked else None
        self._rounds[depth] += int(rounds)
        self._depths = self._depths.counted(histogram, int(rounds), seconds)
        self._loop_s += seconds
        self._ended = ended.copy()
        for slot, handle in list(self._running.items()):
            handle.histogram = tuple(histogram[slot].tolist())
            handle.drafted = int(nodes[slot])
            self._deliver(slot, output[slot, : emitted[slot]], logprobs and logprobs[slot])

    def _deliver(self, slot: int, tokens: Int[np.ndarray, "T"], logprobs: LogProbs | None) -> None:
        """Hands out the new ones of a row's tokens, and ends its request with the row."""
        handle, new = self._running[slot], slice(self._delivered[slot], len(tokens))
        self._delivered[slot] = handle.emitted = len(tokens)
        stopped = handle.deliver(tokens[new], logprobs and logprobs[new], time.monotonic())
        if stopped or self._ended[slot]:
            text = np.concatenate([handle.request.prompt, tokens])
            self._store_text(slot, text[:-1])  # the last token is pending
            is_eos = tokens[-1] in self._eos
            self._end(handle, "stop" if stopped else "eos" if is_eos else "length")

    def _live_rows(self) -> dict[int, tuple[int, int]]:
        """Returns, by slot, the tokens so far and the new ones that may follow."""
        rows = {}
        for slot, handle in self._running.items():
            new, request = int(self._delivered[slot]), handle.request
            rows[slot] = len(request.prompt) + new, request.max_tokens - new
        return rows

    def _end(self, handle: Handle, reason: str) -> None:
        """Ends a request, wherever it is."""
        slot = next((slot for slot, other in self._running.items() if other is handle), None)
        if slot is not None:
            del self._running[slot]
            self._ended_by_host |= not self._ended[slot]
            self._ended[slot] = True
        elif found := [pair for pair in self._prefilling if pair[0] is handle]:
            self._prefilling.remove(found[0])
            self._spare_buffers((found[0][1].cache, found[0][1].drafter_state))
        else:
            self._queue.remove(handle)
        if handle.request.grammar is not None and handle.started_s is not None:
            self._arena.release(handle.request.grammar)
        result = handle.finish(reason, time.monotonic())
        self._finished[reason] += 1
        self._new_tokens += len(result.tokens)

    def _reset_stats(self) -> None:
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._steps = self._new_tokens = 0
        self._rounds = dict.fromkeys(self._loops, 0)
        self._loop_s = self._prefill_s = self._host_s = 0.0


def _due_s(request: EngineRequest) -> float:
    """Returns when a request is due: of those that wait, the first one starts."""
    return request.submitted_s - AGING_S * request.priority
