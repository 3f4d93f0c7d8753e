"""Results of the engine in the shapes of OpenAI's API."""

import codecs
import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from magicjax.decoding.detokenizer import TokenTexts
from magicjax.decoding.text import NewTokens, Result
from magicjax.server.protocol import Generation, Served
from magicjax.server.tool_calls import CallParser, Tools, message
from magicjax.verification.logprobs import LogProbs

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}  # others are errors
LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclasses.dataclass
class ChoiceBuilder:
    """Makes the choices of one answer, or of the chunks of one stream.

    Attributes:
      chat: whether it is an answer of /v1/chat/completions.
      stream: whether chunks are made.
      token_texts: returns the text of a token.
      tools: that the texts may call; None: all text is content.
      offsets: characters of each choice so far.
      decoders: UTF-8 decoders of the choices so far, by index.
      parsers: parsers of tool calls in the choices, by index.
    """

    chat: bool
    stream: bool
    token_texts: TokenTexts
    tools: Tools | None = None
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)
    decoders: dict[int, Any] = dataclasses.field(default_factory=dict)
    parsers: dict[int, CallParser] = dataclasses.field(default_factory=dict)

    def choices(self, index: int, new: NewTokens, reason: str | None) -> list[dict[str, Any]]:
        """Returns the choice of an answer, or those of the next chunks of a stream.

        A chunk has content or a piece of one call.

        Args:
          index: index of the choice.
          new: all of its text, or the next piece.
          reason: why the text has ended; None while it continues.
        """
        choices = self._choices(index, new, reason)
        if new.reasoning:
            choices = choices or [self._choice(index, dataclasses.replace(new, text=""), None)]
            key = "delta" if self.stream else "message"
            fields = choices[0][key] if self.chat else choices[0]
            fields["reasoning_content"] = new.reasoning
        return choices

    def _choices(self, index: int, new: NewTokens, reason: str | None) -> list[dict[str, Any]]:
        if self.tools is None:
            return [self._choice(index, new, reason)]
        parser = self.parsers.setdefault(index, CallParser(self.tools.format, self.tools.parallel))
        deltas = parser.push(new.text or "")
        if reason is not None:
            deltas += parser.finish(complete=reason != "length")
        choice = self._choice(index, dataclasses.replace(new, text=""), reason)
        if choice["finish_reason"] == "stop" and parser.num_calls and not parser.open:
            choice["finish_reason"] = "tool_calls"
        if not self.stream:
            return [choice | {"message": message(deltas)}]
        if not deltas:
            return [choice] if reason or new.logprobs is not None else []
        chunks = [choice | dict(delta=x, logprobs=None, finish_reason=None) for x in deltas]
        chunks[0]["logprobs"] = choice["logprobs"]
        # Clients may skip the content of the chunk that has the reason.
        return chunks + [choice | dict(delta={}, logprobs=None)] * (reason is not None)

    def _choice(self, index: int, new: NewTokens, reason: str | None) -> dict[str, Any]:
        text, finish_reason = new.text or "", None if reason is None else FINISH_REASONS[reason]
        shared: dict[str, Any] = dict(index=index, logprobs=None, finish_reason=finish_reason)
        if new.logprobs is not None:
            format_logprobs = self._chat_logprobs if self.chat else self._completion_logprobs
            shared["logprobs"] = format_logprobs(index, new.tokens.tolist(), new.logprobs)
        if not self.chat:
            return shared | {"text": text}
        if not self.stream:
            return shared | {"message": {"role": "assistant", "content": text}}
        return shared | {"delta": {"content": text} if text else {}}

    def echo(self, index: int, generation: Generation, result: Result) -> dict[str, Any]:
        """Returns a choice with the text of the prompt, whose first token has no probability."""
        assert generation.echo is not None
        prompt, logprobs = generation.prompts[index // generation.n], result.prompt_logprobs
        if logprobs is not None:
            none = [np.zeros((1, *x.shape[1:]), x.dtype) for x in jax.tree.leaves(logprobs)]
            logprobs = jax.tree.map(
                lambda first, x: np.concatenate([first, x]), LogProbs(*none), logprobs
            )
        text = generation.echo[index // generation.n]
        choice = self._choice(index, NewTokens(prompt, text, logprobs), None)
        if logprobs is not None:
            for name in ("token_logprobs", "top_logprobs"):
                choice["logprobs"][name][0] = None
        return choice

    def _chat_logprobs(self, _: int, tokens: list[int], logprobs: LogProbs) -> dict[str, Any]:
        def described(token: int, log: float) -> dict[str, Any]:
            name, encoded = self.token_texts(token)
            log = max(float(log), LEAST_LOGPROB)
            return dict(token=name, logprob=log, bytes=list(encoded or name.encode()))

        content = [
            described(token, log) | {"top_logprobs": [*map(described, tops, logs)]}
            for token, log, tops, logs in _rows(tokens, logprobs)
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(
        self, index: int, tokens: list[int], logprobs: LogProbs
    ) -> dict[str, Any]:
        texts, offsets, chosen, top = [], [], [], []
        end = self.offsets.get(index, 0)
        decoder = self.decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        for token, log, tops, logs in _rows(tokens, logprobs):
            name, encoded = self.token_texts(token)
            texts.append(name)
            before, end = end, end + len(decoder.decode(encoded))
            offsets.append(end - len(name) if name.encode() == encoded else before)
            chosen.append(max(float(log), LEAST_LOGPROB))
            alternatives: dict[str, float] = {}
            for other, other_log in zip(tops, logs, strict=True):
                name = self.token_texts(other).name
                alternatives.setdefault(name, max(other_log, LEAST_LOGPROB))
            top.append(alternatives | {texts[-1]: chosen[-1]})
        self.offsets[index] = end
        return dict(tokens=texts, token_logprobs=chosen, top_logprobs=top, text_offset=offsets)


def _rows(tokens: Sequence[int], logprobs: LogProbs) -> Any:
    """Returns (token, its log-probability, alternatives, theirs) by token."""
    tops, logs = logprobs.top_tokens.tolist(), logprobs.top.tolist()
    return zip(tokens, logprobs.chosen.tolist(), tops, logs, strict=True)


def envelope(generation: Generation) -> dict[str, Any]:
    """Returns what an answer, and every chunk of a stream, begins with."""
    if not generation.chat:
        object_type, prefix = "text_completion", "cmpl"
    else:
        object_type, prefix = "chat.completion" + ".chunk" * generation.stream, "chatcmpl"
    identifier = f"{prefix}-{uuid.uuid4().hex}"
    model = generation.served.name
    return dict(id=identifier, object=object_type, created=int(time.time()), model=model)


def usage(results: Sequence[Result], n: int) -> dict[str, Any]:
    """Returns the counts of tokens of an answer; the prompt of n samples counts once.

    Accepted tokens are those of the answer without one for prefill and one for each round. So
    clients get the number of rounds, and tau, also if a round drafted beyond the end.
    """
    stats = [result.stats for result in results]
    prompt = sum(request.prompt_tokens for request in stats[::n])
    reused = sum(request.reused_tokens for request in stats[::n])
    new = sum(request.new_tokens for request in stats)
    accepted = sum(max(0, request.new_tokens - 1 - request.rounds) for request in stats)
    details = dict(
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=sum(request.drafted for request in stats) - accepted,
    )
    return dict(
        prompt_tokens=prompt,
        completion_tokens=new,
        total_tokens=prompt + new,
        prompt_tokens_details={"cached_tokens": reused},
        completion_tokens_details=details,
    )


def answer(generation: Generation, texts: TokenTexts, results: Sequence[Result]) -> dict[str, Any]:
    """Returns the answer to a request without a stream."""
    builder = ChoiceBuilder(generation.chat, generation.stream, texts, generation.tools)
    choices = []
    for index, r in enumerate(results):
        before = None if generation.echo is None else builder.echo(index, generation, r)
        new = NewTokens(r.tokens, r.text, r.logprobs, r.reasoning)
        for choice in builder.choices(index, new, r.finish_reason):
            choices.append(choice if before is None else _concatenated(before, choice))
    counts = usage(results, generation.n)
    return envelope(generation) | {"choices": choices, "usage": counts}


def _concatenated(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Returns a choice of completions whose text begins with another one's."""
    logprobs = then["logprobs"]
    if logprobs is not None:
        logprobs = {name: first["logprobs"][name] + values for name, values in logprobs.items()}
    return then | dict(text=first["text"] + then["text"], logprobs=logprobs)


def model_list(served: Served, created: int) -> dict[str, Any]:
    """Returns the answer of /v1/models."""
    return {"object": "list", "data": [model_card(served, created)]}


def model_card(served: Served, created: int) -> dict[str, Any]:
    """Returns the description of a model."""
    card = dict(id=served.name, object="model", created=created, owned_by="magicjax")
    return card | {"max_model_len": served.capacity}
