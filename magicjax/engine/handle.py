"""A submitted request: its new text and tokens as they arrive, and its result."""

import collections
import dataclasses
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from jaxtyping import Int

from magicjax.decoding.counts import Counts, by_row
from magicjax.decoding.text import NewTokens, Result, Text
from magicjax.verification.logprobs import LogProbs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestStats(Counts):
    """Statistics of one finished request, with the counts and rates of `Counts`.

    Times are seconds of the wall clock. Counts include tokens after a stop string.

    Attributes:
      finish_reason: one of `FINISH_REASONS`.
      prompt_tokens: tokens of the prompt.
      new_tokens: tokens of the result.
      reused_tokens: prompt tokens whose keys and values were stored, as in `EngineStats`.
      prefilled_tokens: prompt tokens that ran, repeated ones included, without padding.
      queue_s: from `submit` to the start of prefill.
      ttft_s: time to first token, from `submit`; None if there was none.
      tpot_s: time per output token after the first ones that arrived; None if no others did.
      itl_s: inter-token latencies: seconds between two arrivals of new tokens, one or several.
      total_s: from `submit` to the end.
    """

    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    total_s: float

    @property
    def rounds(self) -> int:
        """Rounds of the loop, in which the request emitted tokens."""
        return self.target_passes


class _Engine(Protocol):
    def step(self) -> None: ...
    def cancel(self, handle: "Handle") -> None: ...


class Handle:
    """A request in an engine. Iterating over it runs the engine's steps.

    ::

        for new in engine.submit("def main("):
            print(new.text, end="")

    Attributes:
      text: prompt, parameters, and the new tokens and their text so far.
      priority: requests of larger priority start first.
      submitted_at: when it was submitted, on the engine's clock.
      deadline_at: when it ends at the latest, on the same clock; None for no deadline.
    """

    def __init__(self, engine: _Engine, text: Text, priority: float, deadline_s: float | None):
        """Only `Engine.submit` makes handles; the text is empty, `deadline_s` are from now."""
        self.text, self.priority, self.submitted_at = text, priority, time.monotonic()
        self.deadline_at = None if deadline_s is None else self.submitted_at + deadline_s
        self._engine = engine
        self._waiting: collections.deque[NewTokens] = collections.deque()
        self._result: Result | None = None
        # Counters that the engine updates.
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.first_tokens = self.reused_tokens = self.prefilled_tokens = 0
        self.prompt_logprobs: LogProbs | None = None
        self._drafted = 0
        self._histogram = np.zeros(1, int)  # rounds that accepted 0, 1, ... drafted tokens
        self._by_depth: dict[int, np.ndarray] = {}  # the same by the depth of the tree
        self._newest_at = 0.0
        self._itl_s: list[float] = []

    @property
    def prompt(self) -> Int[np.ndarray, "T"]:
        """The tokens of the prompt, int32 [T]."""
        return self.text.prompt

    @property
    def rounds(self) -> int:
        """Rounds of the loop so far."""
        return int(self._histogram.sum())

    @property
    def tokens(self) -> Int[np.ndarray, "T"]:
        """The new tokens so far."""
        return self.text.tokens

    @property
    def finished(self) -> bool:
        """Whether the result is available without another step."""
        return self._result is not None

    def __iter__(self) -> Iterator[NewTokens]:
        """Yields new tokens as they arrive; runs the engine's steps until the request is finished.

        Every piece is yielded once.
        """
        while not self.finished:
            yield from self.arrived()
            if not self.finished:  # the caller may have cancelled it
                self._engine.step()
        yield from self.arrived()

    def arrived(self) -> list[NewTokens]:
        """Returns what has arrived and was not returned before; runs nothing."""
        arrived = list(self._waiting)
        self._waiting.clear()
        return arrived

    def result(self) -> Result:
        """Returns the result; runs the engine's steps until the request is finished."""
        while self._result is None:
            self._engine.step()
        return self._result

    def cancel(self) -> None:
        """Ends the request with the tokens so far; does nothing if it is finished."""
        self._engine.cancel(self)

    def deliver(
        self, tokens: Int[np.ndarray, "T"], logprobs: LogProbs | None, ended: bool, now: float
    ) -> None:
        """Adds new tokens, as `Text.push`. For the engine."""
        piece = self.text.push(tokens, logprobs, ended)
        if len(piece.tokens):
            if self.first_at is None:
                self.first_at, self.first_tokens = now, len(piece.tokens)
            else:
                self._itl_s.append(now - self._newest_at)
            self._newest_at = now
        self._add(piece)

    def count(self, depth: int, histogram: Int[np.ndarray, "A"], drafted: int) -> None:
        """Counts a call of the loop with a tree of some depth. For the engine.

        Args:
          depth: of the tree.
          histogram: number of rounds so far that accepted 0, 1, ... drafted tokens.
          drafted: nodes proposed so far.
        """
        of_call = histogram - self._histogram
        self._by_depth[depth] = self._by_depth.get(depth, 0) + of_call
        self._histogram, self._drafted = histogram, drafted

    def finish(self, reason: str, now: float) -> Result:
        """Ends the request, unless its text has ended; returns the result. For the engine."""
        if not self.text.finish_reason:
            self._add(self.text.finish(reason))
        self._result = self.text.result(self.prompt_logprobs, self._stats(now))
        return self._result

    def _add(self, piece: NewTokens) -> None:
        if len(piece.tokens) or piece.text or piece.reasoning:
            self._waiting.append(piece)

    def _stats(self, now: float) -> RequestStats:
        new = len(self.tokens)
        counts = Counts()
        if self.rounds:
            rows = (np.array(x)[None] for x in (self.text.emitted, self._histogram, self._drafted))
            emitted, histogram, drafted = rows
            ranks = np.zeros((*histogram.shape, 0), int)  # engines do not count tries
            calls = [(depth, of_calls[None]) for depth, of_calls in self._by_depth.items()]
            (counts,) = by_row(emitted, histogram, ranks, drafted, calls)
        ttft_s = tpot_s = None
        if self.first_at is not None:
            ttft_s = self.first_at - self.submitted_at
            if new > self.first_tokens:
                tpot_s = (now - self.first_at) / (new - self.first_tokens)
        return RequestStats(
            finish_reason=self.text.finish_reason,
            prompt_tokens=len(self.prompt),
            new_tokens=new,
            reused_tokens=self.reused_tokens,
            prefilled_tokens=self.prefilled_tokens,
            **vars(counts),
            queue_s=(now if self.started_at is None else self.started_at) - self.submitted_at,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            itl_s=tuple(self._itl_s),
            total_s=now - self.submitted_at,
        )
