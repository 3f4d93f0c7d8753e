"""Requests as OpenAI's clients send them, as prompts and parameters for the engine."""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from pydantic_core import from_json

from magicjax.decoding.detokenizer import Detokenizer
from magicjax.decoding.prompts import (
    chat_tokens,
    check_template_kwargs,
    reads_variable,
    token_ids,
)
from magicjax.engine.config import EngineConfig
from magicjax.grammars.grammar import Grammar
from magicjax.model import Model
from magicjax.options import options_of
from magicjax.sampling_params import UNCONSTRAINED, SamplingParams
from magicjax.server import bodies, tool_calls
from magicjax.server.bodies import ChatBody, CompletionBody
from magicjax.server.errors import ApiError, refused
from magicjax.server.tool_calls import ToolFormat, Tools

EFFORT = "reasoning_effort"
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that the server serves.

    Attributes:
      name: the model's name, for clients.
      target: the engine's.
      config: the engine's, of `Engine.config`.
      tool_format: how the model writes tool calls; None: as its chat template does.
    """

    name: str
    target: Model
    config: EngineConfig
    tool_format: ToolFormat | None = None

    @property
    def capacity(self) -> int:
        """The most tokens of a request, prompt and new ones."""
        assert self.config.capacity is not None
        return self.config.capacity

    @functools.cached_property
    def max_characters(self) -> int:
        """The most characters of a prompt: longer ones exceed the capacity in any tokens."""
        return self.capacity * max(map(len, self.target.tokenizer.get_vocab()))

    @property
    def eos(self) -> Sequence[int]:
        """The tokens that end a text."""
        assert isinstance(self.config.eos_token_id, tuple)
        return self.config.eos_token_id


@dataclasses.dataclass(frozen=True)
class Generation:
    """A valid request.

    Attributes:
      served: the model that answers.
      chat: whether it came to /v1/chat/completions.
      prompts: int32 [T] each.
      n: samples of each prompt.
      params: of all prompts and samples; seeds are consecutive.
      stream: whether text is sent as it arrives.
      include_usage: whether a stream ends with the counts of tokens.
      continuous_usage: whether every event of the stream has the counts so far.
      echo: the text before the answer, one per prompt; None without.
      fields: the body's fields for parameters of other names.
      tools: that the texts may call; None: all text is content.
    """

    served: Served
    chat: bool
    prompts: list[Int[np.ndarray, "T"]]
    n: int
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: list[str] | None
    fields: Mapping[str, str]
    tools: Tools | None = None


def parse_completion(data: bytes, served: Served) -> Generation:
    """Returns the request that a body of /v1/completions makes.

    Args:
      data: the body.
      served: the model.

    Raises:
      ApiError: 400 or 404.
    """
    body = bodies.parse_completion(_json(data))
    check_model(body.model, served)
    prompt: Any = body.prompt
    if prompt == []:
        raise ApiError(400, "prompt=[]: give at least one text or token", param="prompt")
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    n = _validated_samples(body, len(prompt), served.config)
    for text in prompt:
        if isinstance(text, str):
            _check_characters(len(text), "prompt", served)
    prompts = _tokens(lambda: token_ids(served.target, prompt), "prompt")
    limit = body.max_tokens
    if limit == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 requires echo=true", param="max_tokens")
    if limit is None:  # the client's choice can be refused, the default cannot
        room = served.capacity - max(map(len, prompts))
        limit = max(1, min(COMPLETION_TOKENS, served.config.max_tokens, room))
    params = _params(body, served, {}, limit, body.logprobs, body.logprobs if body.echo else None)
    generation = _generation(body, served, prompts, n, params, {})
    if not body.echo:
        return generation
    if body.stream:
        raise ApiError(400, "echo=true with stream=true is not supported: omit one", param="echo")
    texts = [text if isinstance(text, str) else _text(served, text) for text in prompt]
    return dataclasses.replace(generation, echo=texts)


def _text(served: Served, tokens: Sequence[int]) -> str:
    """Returns the text of a prompt; the answer begins with its incomplete character."""
    text = Detokenizer(served.target.tokenizer, split=False)
    text.push(tokens)
    return text.text


def parse_chat(data: bytes, served: Served) -> Generation:
    """Returns the request that a body of /v1/chat/completions makes.

    Arguments and errors are those of `parse_completion`.
    """
    body = bodies.parse_chat(_json(data))
    check_model(body.model, served)
    if not served.target.tokenizer.chat_template:
        raise ApiError(400, "the model has no chat template: use /v1/completions")
    n = _validated_samples(body, 1, served.config)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if body.max_tokens not in (None, getattr(body, field)):
        raise ApiError(
            400,
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} "
            "differ: give one",
            param="max_tokens",
        )
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs=true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if (limit := getattr(body, field)) == 0:
        raise ApiError(400, f"{field}=0: it must be 1 or more", param=field)
    fields = {"max_tokens": field, "logprobs": "top_logprobs", "prompt": "messages"}
    tokenizer, kwargs = served.target.tokenizer, _template_kwargs(body, served)
    messages = tool_calls.template_messages(body.messages)
    tools = tool_calls.tools_of(body, tokenizer, served.tool_format)
    definitions = None if tools is None else tools.definitions
    params = _params(body, served, fields, limit, logprobs, tools=tools)
    texts = [message["content"] or "" for message in messages]
    texts += map(str, [*kwargs.values(), *(definitions or ())])
    _check_characters(sum(map(len, texts)), "messages", served)
    try:
        check_template_kwargs(tokenizer, kwargs)
    except ValueError as error:
        raise ApiError(
            400, str(error), param="chat_template_kwargs", code="unsupported_parameter"
        ) from error

    def prompts() -> list[Int[np.ndarray, "T"]]:
        tokens = chat_tokens(tokenizer, messages, kwargs, definitions)
        if definitions and tokens == chat_tokens(tokenizer, messages, kwargs):
            raise ApiError(400, tool_calls.IGNORED, param="tools")
        return token_ids(served.target, [tokens])

    generation = _generation(body, served, _tokens(prompts, "messages"), n, params, fields)
    return dataclasses.replace(generation, tools=tools)


def _template_kwargs(body: ChatBody, served: Served) -> dict[str, Any]:
    """Returns variables of the chat template; `chat_template_kwargs` have precedence."""
    kwargs = body.chat_template_kwargs or {}
    if body.reasoning_effort is None:
        return kwargs
    if not reads_variable(served.target.tokenizer, EFFORT):
        raise ApiError(
            400,
            f"{EFFORT}={body.reasoning_effort!r}: the chat template does not read it: omit it",
            param=EFFORT,
            code="unsupported_parameter",
        )
    return {EFFORT: body.reasoning_effort} | kwargs


def _generation(
    body: CompletionBody | ChatBody,
    served: Served,
    prompts: list[Int[np.ndarray, "T"]],
    n: int,
    params: SamplingParams,
    fields: Mapping[str, str],
) -> Generation:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options requires stream=true", param="stream_options")
    stream_options = body.stream_options or bodies.StreamOptions()
    return Generation(
        served=served,
        chat=isinstance(body, ChatBody),
        prompts=prompts,
        n=n,
        params=params,
        stream=bool(body.stream),
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.continuous_usage_stats),
        echo=None,
        fields=fields,
    )


def _json(data: bytes) -> Any:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def check_model(name: str | None, served: Served) -> None:
    """Raises ApiError (404) if a request names another model."""
    if name not in (None, served.name):
        raise ApiError(
            404,
            f"the model {name[:100]!r} is not served here: use {served.name!r}",
            param="model",
            code="model_not_found",
        )


def _validated_samples(body: CompletionBody | ChatBody, prompts: int, config: EngineConfig) -> int:
    """Returns the number of samples of each prompt."""
    n = body.n or 1
    if prompts * n > config.queue_limit:
        requests = f"{prompts} prompts with n={n} are" if prompts > 1 else f"n={n} is"
        raise ApiError(
            400,
            f"{requests} {prompts * n} requests, and the queue holds {config.queue_limit}: send "
            "fewer at once",
            param="prompt" if prompts > 1 else "n",
        )
    return n


def _check_characters(count: int, field: str, served: Served) -> None:
    """Raises ApiError for a text that would take long to tokenize and cannot fit."""
    if count > served.max_characters:
        raise ApiError(
            400,
            f"{field}: {count:,} characters exceed the {served.capacity:,} tokens of --capacity, "
            f"which have at most {served.max_characters:,}: shorten the text",
            param=field,
            code="context_length_exceeded",
        )


def _params(
    body: CompletionBody | ChatBody,
    served: Served,
    fields: Mapping[str, str],
    limit: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    tools: Tools | None = None,
) -> SamplingParams:
    """Returns the parameters of a request, which the engine accepts."""
    config = served.config
    grammar = _grammar(body, config)
    if tools is not None:
        grammar = _grammar_of_tools(tools, grammar, body, config)
    values: dict[str, Any] = {
        name: getattr(body, name, None) for name in options_of(SamplingParams)
    }
    values = {name: value for name, value in values.items() if value is not None}
    values.setdefault("temperature", 1.0 if config.sampling else 0.0)
    values |= {
        "logit_bias": _bias(body.logit_bias or {}),
        "seed": secrets.randbits(32) if body.seed is None else body.seed,
        "max_tokens": limit,
        "grammar": grammar,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    try:
        params = SamplingParams(**values)
        config.check_params(params)
    except (ValueError, TypeError) as error:
        raise refused(error, fields) from error
    return params


def _bias(biases: Mapping[str, float]) -> dict[int, float]:
    """Returns the bias of tokens, whose ids JSON has as names."""
    if wrong := next((name for name in biases if not name.isdecimal()), None):
        raise ApiError(
            400,
            f"logit_bias has the name {wrong[:60]!r}: it must be a token id",
            param="logit_bias",
        )
    return {int(name): value for name, value in biases.items()}


def _grammar(body: CompletionBody | ChatBody, config: EngineConfig) -> Grammar | None:
    """Returns the grammar of a request."""
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return None
    _check_grammars(config, "response_format")
    try:
        if response_format.json_schema is not None:
            return Grammar.json_schema(response_format.json_schema.definition, untrusted=True)
        if response_format.regex is not None:
            return Grammar.regex(response_format.regex, untrusted=True)
        if response_format.lark is not None:
            return Grammar.lark(response_format.lark, untrusted=True)
        return Grammar.json_object()
    except (ValueError, TypeError, ImportError) as error:
        raise ApiError(400, str(error), param="response_format") from error


def _grammar_of_tools(
    tools: Tools,
    content: Grammar | None,
    body: CompletionBody | ChatBody,
    config: EngineConfig,
) -> Grammar | None:
    """Returns the grammar of texts that may call tools; None: it is not supported or required."""
    # No grammar can have these, so calls of tools that need not follow are not constrained.
    excluded = next((name for name in UNCONSTRAINED if getattr(body, name)), None)
    must_match = tools.must_match or content is not None
    if must_match:
        _check_grammars(config, "tools")
    elif excluded or not config.grammars:
        return None
    if excluded:
        raise ApiError(
            400,
            f"{excluded} may leave no token, as the tools constrain the text (tool_choice, strict "
            f"or response_format): omit {excluded}",
            param=excluded,
        )
    try:
        return tools.grammar(content)
    except (ValueError, ImportError) as error:
        if not must_match:
            return None
        raise ApiError(400, str(error), param="tools") from error


def _check_grammars(config: EngineConfig, field: str) -> None:
    """Raises ApiError if the server has no grammars."""
    if not config.grammars:
        raise ApiError(400, f"{field}: the server has no grammars", param=field)


def _tokens(make: Callable[[], list[np.ndarray]], field: str) -> list[np.ndarray]:
    """Returns token ids; text that has none is an ApiError."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param=field) from error
