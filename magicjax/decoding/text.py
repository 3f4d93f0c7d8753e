"""The host's side of a row: its text as tokens arrive, why it ended, and its result."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int

from magicjax.decoding.counts import Counts
from magicjax.decoding.detokenizer import Detokenizer
from magicjax.decoding.reasoning import after_reasoning
from magicjax.grammars.matcher import Matcher
from magicjax.sampling_params import SamplingParams
from magicjax.verification.logprobs import LogProbs

# Why a text ended: an EOS token, its limit of new tokens, a stop string or token, its caller, its
# deadline, or an error: a grammar that exceeds its limits in the middle of the text, or NaN logits.
FINISH_REASONS = ("eos", "length", "stop", "cancelled", "deadline", "error")
ErrorKind = Literal["", "grammar", "nan"]


class TextError(ValueError, RuntimeError):
    """A text cannot continue: its grammar exceeds its limits, or the target's logits are NaN."""


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What a row has generated since the previous piece.

    Attributes:
      tokens: int32 [T].
      text: the new text; None without a tokenizer. It can lag behind the tokens.
      logprobs: log-probabilities of the tokens; None if they were not requested.
      reasoning: the new text before the answer that the model marks as reasoning.
    """

    tokens: Int[np.ndarray, "T"]
    text: str | None
    logprobs: LogProbs | None
    reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished text.

    Attributes:
      prompt: int32 [T].
      tokens: int32 [T], the new tokens, an EOS included; after a stop string, up to the token that
        completed it.
      text: the new text, which continues that of the prompt: without special tokens and the token
        that ended it, before the stop string. None without a tokenizer.
      logprobs: log-probabilities of the tokens; None if they were not requested.
      prompt_logprobs: log-probabilities of the prompt's tokens except for the first one; None if
        they were not requested, or if the request ended before.
      finish_reason: one of `FINISH_REASONS`.
      stats: its acceptance; of a request of an engine, the `RequestStats` with times.
      reasoning: the text before the answer that the model marks as reasoning.
      error: what went wrong, if the finish reason is "error".
      error_kind: "grammar" if the grammar exceeded its limits, "nan" if the logits were NaN; "" if
        nothing went wrong.
    """

    prompt: Int[np.ndarray, "T"]
    tokens: Int[np.ndarray, "T"]
    text: str | None
    logprobs: LogProbs | None
    prompt_logprobs: LogProbs | None
    finish_reason: str
    stats: Any
    reasoning: str = ""
    error: str = ""
    error_kind: ErrorKind = ""


class Text:
    """A row on the host, of `magicjax.generate`, `magicjax.stream` or an engine.

    Attributes:
      prompt: int32 [T].
      params: what was asked of the text.
      limit: the most new tokens.
      matcher: follows the tokens under the grammar; None without one, and at the end.
      emitted: the row's tokens so far, with those after a stop string.
      finish_reason: one of `FINISH_REASONS`; "" until the text ends.
      error, error_kind: what went wrong, as in `Result`; "" if nothing did.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Int[np.ndarray, "T"],
        params: SamplingParams,
        limit: int,
        eos: Sequence[int],
        matcher: Matcher | None = None,
    ):
        """Starts an empty text.

        Args:
          tokenizer: a tokenizer of transformers, or None.
          prompt, params: the row's prompt and sampling parameters.
          limit: the most new tokens.
          eos: tokens that end a text of the target.
          matcher: the grammar's matcher, before any text.
        """
        self.prompt, self.params, self.limit, self.matcher = prompt, params, limit, matcher
        self.emitted, self.finish_reason, self.error = 0, "", ""
        self.error_kind: ErrorKind = ""
        self._eos = frozenset(() if params.ignore_eos else eos)
        self._tokenizer, self._detokenizer = tokenizer, None
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                stop=params.stop,
                prompt=prompt.tolist(),
                ends=params.end_tokens(tuple(eos)),
                grammar=params.grammar,
            )
        self._tokens: list[int] = []
        self._logprobs = [_no_logprobs(params.logprobs)]  # of the pieces, the first one empty

    @property
    def tokens(self) -> Int[np.ndarray, "T"]:
        """The new tokens so far, int32 [T]."""
        return np.array(self._tokens, np.int32)

    @property
    def ended(self) -> bool:
        """Whether the text has ended."""
        return bool(self.finish_reason)

    @property
    def lengths(self) -> tuple[int, int]:
        """The row's tokens so far, and the new ones that may follow."""
        return len(self.prompt) + self.emitted, self.limit - self.emitted

    @property
    def nothing(self) -> NewTokens:
        """No new tokens."""
        text = None if self._detokenizer is None else ""
        return NewTokens(np.zeros(0, np.int32), text, self._logprobs[0])

    def push(
        self, tokens: Int[np.ndarray, "T"], logprobs: LogProbs | None, ended: bool
    ) -> NewTokens:
        """Returns what is new of a row, and ends the text if it has ended.

        Args:
          tokens: all that the row has emitted.
          logprobs: log-probabilities of these tokens; None if they are not computed.
          ended: whether the row has ended.
        """
        begin, self.emitted = self.emitted, len(tokens)
        new, text, reasoning = tokens[begin:], None, ""
        if self.matcher is not None:
            self.matcher.push(new.tolist())
        if self._detokenizer is not None:
            before = len(self._detokenizer.reasoning)
            count, text = self._detokenizer.push(new.tolist())
            new, reasoning = new[:count], self._detokenizer.reasoning[before:]
        self._tokens += new.tolist()
        requested = None
        if logprobs is not None and self.params.logprobs is not None:
            requested = logprobs[begin : begin + len(new)].most_likely(self.params.logprobs)
        self._logprobs.append(requested)
        piece = NewTokens(new, text, requested, reasoning)
        reason = self._reason(ended)
        return _joined(piece, self.finish(reason)) if reason else piece

    def _reason(self, ended: bool) -> str:
        """Returns why the text ends here; "" if it does not."""
        last = self._tokens[-1] if self._tokens else None
        if self.matcher is not None and (error := self.matcher.error):  # its masks allow EOS alone
            self.error, self.error_kind = f"the grammar cannot be followed: {error}", "grammar"
            return "error"
        if self._detokenizer is not None and self._detokenizer.stopped:
            return "stop"
        if not ended:
            return ""
        if last in self.params.stop_token_ids:
            return "stop"
        if last in self._eos:
            return "eos"
        if self.emitted >= self.limit:
            return "length"
        self.error_kind = "nan"
        self.error = (
            f"after {self.emitted} new tokens the target's logits are NaN: load it with "
            "dtype='float32' or 'bfloat16' if it has float16, which numbers above 65,504 exceed"
        )
        return "error"

    def finish(self, reason: str) -> NewTokens:
        """Ends the text, and returns what was held back of it."""
        assert reason in FINISH_REASONS and not self.finish_reason, (reason, self.finish_reason)
        rest, reasoning = None, ""
        if self._detokenizer is not None:
            before = len(self._detokenizer.reasoning)
            rest = self._detokenizer.finish()
            reasoning = self._detokenizer.reasoning[before:]
            if self._detokenizer.stopped and reason in ("eos", "length"):  # by what was held back
                reason = "stop"
        self.finish_reason = reason
        return NewTokens(np.zeros(0, np.int32), rest, self._logprobs[0], reasoning)

    def result(self, prompt_logprobs: LogProbs | None, stats: Counts) -> Result:
        """Returns the result of a text that has ended; arguments as in `Result`."""
        self.matcher = None  # not kept by those who keep texts
        text = reasoning = None
        if self._detokenizer is not None:
            text, reasoning = self._detokenizer.text, self._detokenizer.reasoning
        elif self._tokenizer is not None:  # without tokenizer.json
            text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        logprobs = jax.tree.map(lambda *pieces: np.concatenate(pieces), *self._logprobs)
        return Result(
            prompt=self.prompt,
            tokens=self.tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=self.finish_reason,
            error=self.error,
            error_kind=self.error_kind,
            stats=stats,
            reasoning=reasoning or "",
        )


def matcher_of(
    target: Any, prompt: Int[np.ndarray, "T"], params: SamplingParams, eos: Sequence[int]
) -> Matcher | None:
    """Returns what follows the empty text after a prompt; None for any text.

    Raises:
      ValueError: a target without tokenizer or EOS, or a grammar that is not supported.
    """
    grammar = after_reasoning(target.tokenizer, prompt.tolist(), params.grammar)
    return None if grammar is None else Matcher(target, grammar, eos, params.stop_token_ids)


def _joined(piece: NewTokens, rest: NewTokens) -> NewTokens:
    """Returns a piece with the rest of its text."""
    text = None if piece.text is None else piece.text + (rest.text or "")
    return dataclasses.replace(piece, text=text, reasoning=piece.reasoning + rest.reasoning)


def _no_logprobs(alternatives: int | None) -> LogProbs | None:
    """Returns the log-probabilities of no token; None if they were not requested."""
    if alternatives is None:
        return None
    shape = (0, alternatives)
    return LogProbs(np.zeros(0, np.float32), np.zeros(shape, np.float32), np.zeros(shape, np.int32))
