"""A submitted request: its new text and tokens as they arrive, and its result."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Protocol

import jax
import numpy as np
from jaxtyping import Int

from magicjax.decoding.text_stream import TextStream
from magicjax.engine.request import EngineRequest
from magicjax.verification.logprobs import LogProbs

# Why a request ended: an EOS token, its limit of new tokens, a stop string or token,
# `Handle.cancel`, its deadline, or a grammar that exceeds its limits in the middle of the text.
FINISH_REASONS = ("eos", "length", "stop", "cancelled", "deadline", "error")


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What a request has generated since the previous piece.

    Attributes:
      tokens: int32 [T].
      text: the new text; None without a tokenizer. It can lag behind the tokens.
      logprobs: of the tokens; None if they were not requested.
      reasoning: the new text before the answer that the model marks as reasoning.
    """

    tokens: Int[np.ndarray, "T"]
    text: str | None
    logprobs: LogProbs | None
    reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class RequestStats:
    """Statistics of one finished request; times are seconds of the wall clock.

    Attributes:
      finish_reason: one of `FINISH_REASONS`.
      prompt_tokens: tokens of the prompt.
      new_tokens: tokens of the result.
      reused_tokens: prompt tokens whose keys and values were stored by another request.
      prefilled_tokens: prompt tokens that ran, repeated ones included, without padding.
      rounds: of the loop, in which the request emitted tokens.
      tau: mean acceptance length: tokens that the loop emitted per round, without prefill's, and
        with those after a stop string.
      histogram: number of rounds that accepted 0, 1, … drafted tokens; empty without rounds.
      drafted: proposed nodes without roots and padding.
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
    rounds: int
    tau: float
    histogram: tuple[int, ...]
    drafted: int
    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    total_s: float

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens, those after the end of the text included."""
        return sum(count * rounds for count, rounds in enumerate(self.histogram))


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished request.

    Attributes:
      tokens: int32 [T], the new tokens, an EOS included; after a stop string, up to the token that
        completed it.
      text: the new text, which continues that of the prompt: without special tokens and the token
        that ended it, before the stop string. None without a tokenizer.
      logprobs: of the tokens; None if they were not requested.
      prompt_logprobs: of the prompt's tokens except for the first one; None if they were not
        requested, or if the request ended before.
      finish_reason: one of `FINISH_REASONS`.
      stats: times and counts.
      reasoning: the text before the answer that the model marks as reasoning.
    """

    tokens: Int[np.ndarray, "T"]
    text: str | None
    logprobs: LogProbs | None
    prompt_logprobs: LogProbs | None
    finish_reason: str
    stats: RequestStats
    reasoning: str = ""


class _Engine(Protocol):
    def step(self) -> None: ...
    def cancel(self, handle: "Handle") -> None: ...


class Handle:
    """A request in an engine. Iterating over it runs the engine's steps.

    ::

        for new in engine.submit("def main("):
            print(new.text, end="")

    Attributes:
      request: the prompt and its parameters.
    """

    def __init__(self, engine: _Engine, request: EngineRequest, text: TextStream | None):
        """Only `Engine.submit` makes handles; the text is empty, None without a tokenizer."""
        self.request = request
        self._engine = engine
        self._text = text
        self._tokens: list[int] = []
        # Of the pieces, the first one empty.
        self._logprobs = [_no_logprobs(request.params.logprobs)]
        self._waiting: collections.deque[NewTokens] = collections.deque()
        self._result: Result | None = None
        # Counters that the engine updates.
        self.started_s: float | None = None
        self.first_s: float | None = None
        self.first_tokens = self.reused_tokens = self.prefilled_tokens = 0
        self.prompt_logprobs: LogProbs | None = None
        self.histogram: tuple[int, ...] = ()
        self.drafted = self.emitted = 0
        self._newest_s = 0.0
        self._itl_s: list[float] = []

    @property
    def rounds(self) -> int:
        """Rounds of the loop so far."""
        return sum(self.histogram)

    @property
    def tokens(self) -> Int[np.ndarray, "T"]:
        """The new tokens so far."""
        return np.array(self._tokens, np.int32)

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

    def deliver(self, tokens: Int[np.ndarray, "T"], logprobs: LogProbs | None, now: float) -> bool:
        """Adds new tokens; returns whether a stop string has ended the text. For the engine."""
        text, reasoning = None, ""
        if self._text is not None:
            before = len(self._text.reasoning)
            count, text = self._text.push(tokens.tolist())
            tokens, reasoning = tokens[:count], self._text.reasoning[before:]
        if len(tokens):
            if self.first_s is None:
                self.first_s, self.first_tokens = now, len(tokens)
            else:
                self._itl_s.append(now - self._newest_s)
            self._newest_s = now
        self._tokens += tokens.tolist()
        requested = _requested(logprobs, len(tokens), self.request.params.logprobs)
        self._logprobs.append(requested)
        if len(tokens):
            self._waiting.append(NewTokens(tokens, text, requested, reasoning))
        return self._text is not None and self._text.stopped

    def finish(self, reason: str, now: float) -> Result:
        """Ends the request; returns the result. For the engine."""
        text, reasoning = None, ""
        if self._text is not None:
            before = len(self._text.reasoning)
            rest = self._text.finish()
            text, reasoning = self._text.text, self._text.reasoning
            if rest or reasoning[before:]:
                none = np.zeros(0, np.int32), rest, self._logprobs[0]
                self._waiting.append(NewTokens(*none, reasoning[before:]))
        logprobs = jax.tree.map(lambda *pieces: np.concatenate(pieces), *self._logprobs)
        logs = logprobs, self.prompt_logprobs
        stats = self._stats(reason, now)
        self._result = Result(self.tokens, text, *logs, reason, stats, reasoning)
        return self._result

    def _stats(self, reason: str, now: float) -> RequestStats:
        request, new = self.request, len(self._tokens)
        ttft_s = tpot_s = None
        if self.first_s is not None:
            ttft_s = self.first_s - request.submitted_s
            if new > self.first_tokens:
                tpot_s = (now - self.first_s) / (new - self.first_tokens)
        return RequestStats(
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            new_tokens=new,
            reused_tokens=self.reused_tokens,
            prefilled_tokens=self.prefilled_tokens,
            rounds=self.rounds,
            tau=(self.emitted - 1) / self.rounds if self.rounds else 0.0,
            histogram=self.histogram,
            drafted=self.drafted,
            queue_s=(now if self.started_s is None else self.started_s) - request.submitted_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            itl_s=tuple(self._itl_s),
            total_s=now - request.submitted_s,
        )


def _no_logprobs(alternatives: int | None) -> LogProbs | None:
    """Returns the log-probabilities of no token; None if they were not requested."""
    if alternatives is None:
        return None
    shape = (0, alternatives)
    return LogProbs(np.zeros(0, np.float32), np.zeros(shape, np.float32), np.zeros(shape, np.int32))


def _requested(logprobs: LogProbs | None, tokens: int, alternatives: int | None) -> LogProbs | None:
    """Returns the log-probabilities of the first tokens with fewer alternatives."""
    if logprobs is None or alternatives is None:
        return None
    return logprobs[:tokens].most_likely(alternatives)
