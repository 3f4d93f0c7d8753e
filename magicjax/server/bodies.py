"""The bodies of requests: which fields there are and what they may be.

A field's description completes the error "FIELD=VALUE: it must be DESCRIPTION".
"""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from magicjax.engine.config import MAX_STOP_TOKENS
from magicjax.server.errors import ApiError
from magicjax.suggest import did_you_mean
from magicjax.verification.logprobs import MAX_ALTERNATIVES

MAX_N = 128
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256  # each piece of text is searched for all of them
MAX_REGEX_CHARACTERS = 512  # longer ones can take minutes to compile
WITH_PATHS = ("messages", "stream_options", "tools")  # errors say where in the field
SHOWN = 60  # characters of a wrong value in an error

# Fields that do not change the text.
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "service_tier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
# Fields that are not supported, with the values that change nothing; null is one of them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
}
NEUTRAL_COMPLETION = NEUTRAL | {"best_of": (1,), "suffix": ("",)}
NEUTRAL_CHAT = NEUTRAL | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}

REMEDIES = {"functions": "use tools", "function_call": "use tools and tool_choice"}
MAX_TOOLS = 128

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Fast = pydantic.FailFast()  # one error of a long list is enough


class _Object(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Object):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: counts so far in every event
    include_obfuscation: Literal[False] | None = None


class JsonSchema(_Object):
    name: str
    definition: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None  # a text always matches


class ResponseFormat(_Object):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, max_length=MAX_REGEX_CHARACTERS)

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        given = {"json_schema": self.json_schema, "regex": self.regex}
        if any((value is not None) != (name == self.type) for name, value in given.items()):
            raise ValueError
        return self


_PENALTY = "a number from -2 to 2"


class _Body(_Object):
    """The fields of both APIs."""

    model: str | None = Field(None, description="the name that /v1/models lists")
    n: int | None = Field(None, ge=1, le=MAX_N, description=f"a whole number from 1 to {MAX_N}")
    temperature: float | None = Field(None, ge=0, description="a number, 0 or more")
    top_p: float | None = Field(None, gt=0, le=1, description="above 0 and at most 1")
    top_k: int | None = Field(
        None, ge=-1, lt=2**31, description="a whole number; 0 or -1 for all tokens"
    )
    min_p: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float | None = Field(None, gt=0, description="a number above 0")
    frequency_penalty: float | None = Field(None, description=_PENALTY, ge=-2, le=2)
    presence_penalty: float | None = Field(None, description=_PENALTY, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="an object of token ids and numbers from -100 to 100"
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1), _Fast] | None = Field(
        None, description="a list of at least one token id"
    )
    bad_words: Annotated[list[StopString], Field(max_length=MAX_STOPS), _Fast] | None = Field(
        None,
        description=f"a list of at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} "
        "characters",
    )
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="a whole number, 0 or more")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="a whole number in the range of int64"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS), _Fast] | None = (
        Field(
            None,
            description=f"a string, or a list of at most {MAX_STOPS}, of 1 to "
            f"{MAX_STOP_CHARACTERS} characters each",
        )
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS), _Fast] | None = (
        Field(None, description=f"a list of at most {MAX_STOP_TOKENS} token ids")
    )
    max_tokens: int | None = Field(None, ge=0, description="a whole number, 0 or more")
    ignore_eos: bool | None = Field(None, description="true or false")
    speculative: bool | None = Field(None, description="true or false")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description='an object such as {"include_usage": true}'
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", '
        '"json_schema": {"name": ..., "schema": {...}}}, or {"type": "regex", "regex": ...} of at '
        f"most {MAX_REGEX_CHARACTERS} characters",
    )


class CompletionBody(_Body):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], _Fast]
        | Annotated[list[str], _Fast]
        | Annotated[list[Annotated[list[TokenId], _Fast]], _Fast]
    ) = Field(description="a text, a list of texts, token ids, or a list of lists of token ids")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description=f"a whole number from 0 to {MAX_ALTERNATIVES}",
    )

    echo: bool | None = Field(None, description="true or false")


class TextPart(_Object):
    type: Literal["text"]
    text: str


class Function(_Object):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Object):
    type: Literal["function"]
    function: Function


class FunctionName(_Object):
    name: str


class NamedTool(_Object):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Object):
    name: str
    arguments: str


class ToolCall(_Object):
    index: int | None = None  # of a chunk of a stream, which clients send back
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(_Object):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], _Fast] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], _Fast] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatBody(_Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], _Fast] = Field(
        min_length=1,
        description="a list of messages, each with a role (system, developer, user, "
        "assistant or tool) and a content (a text, or a list of parts of type text), of assistants "
        "also tool_calls and reasoning_content, and of tools a tool_call_id",
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), _Fast] | None = Field(
        None,
        description=f"a list of at most {MAX_TOOLS} tools such as "
        '{"type": "function", "function": {"name": "f", "parameters": {...}}}; names have 1 to 64 '
        "letters, digits, _ and -",
    )
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = Field(
        None,
        description='auto, none, required, or {"type": "function", "function": {"name": ...}}',
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    max_completion_tokens: int | None = Field(None, ge=1, description="a whole number, 1 or more")
    chat_template_kwargs: dict[str, Any] | None = Field(  # vLLM's
        None, description="an object of variables of the chat template"
    )
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description=f"a whole number from 0 to {MAX_ALTERNATIVES}",
    )


def parse_completion(value: Any) -> CompletionBody:
    """Returns a valid body of /v1/completions; raises ApiError (400)."""
    return _parse(CompletionBody, value, NEUTRAL_COMPLETION)


def parse_chat(value: Any) -> ChatBody:
    """Returns a valid body of /v1/chat/completions; raises ApiError (400)."""
    if isinstance(value, dict) and isinstance(given := value.get("messages"), list):
        messages = [
            _without_neutral(message, NEUTRAL_MESSAGE, f"messages[{i}].")
            if isinstance(message, dict)
            else message
            for i, message in enumerate(given)
        ]
        value = value | {"messages": messages}
    return _parse(ChatBody, value, NEUTRAL_CHAT)


def _parse(kind: Any, value: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = _without_neutral(value, neutral, "")
    fields = {name: field for name, field in fields.items() if name not in WITHOUT_EFFECT}
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _as_api_error(error, kind, fields) from None


def _without_neutral(
    fields: dict[str, Any], neutral: dict[str, tuple[Any, ...]], prefix: str
) -> dict[str, Any]:
    """Returns the fields that have an effect; raises ApiError for one that is not supported."""
    others = {}
    for name, value in fields.items():
        if name not in neutral:
            others[name] = value
        elif value is not None and value not in neutral[name]:
            raise ApiError(
                400,
                f"{prefix}{name}={_shown(value)} is not supported: "
                f"{REMEDIES.get(name, f'omit {name}')}",
                param=prefix + name,
                code="unsupported_parameter",
            )
    return others


def _as_api_error(error: pydantic.ValidationError, kind: Any, value: dict[str, Any]) -> ApiError:
    """Returns the first error; it names the field, the value and what it must be."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, *inner = (str(part) for part in first["loc"])
    fields = kind.model_fields
    if name not in fields:
        hint = did_you_mean(name, fields)
        return ApiError(
            400,
            f"unknown field {_shown(name)}{hint or '; supported are ' + ', '.join(fields)}",
            param=name[:SHOWN],
            code="unknown_parameter",
        )
    description = fields[name].description
    if first["type"] == "extra_forbidden":
        where = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in inner)
        message = f"unknown field {_shown(name + where)}: omit it"
        return ApiError(400, message, param=name, code="unknown_parameter")
    if first["type"] == "missing" and not inner:
        return ApiError(400, f"{name} is missing: it must be {description}", param=name)
    where = f" (at {'.'.join(inner)})" if name in WITH_PATHS and inner else ""
    message = f"{name}={_shown(value[name])}{where}: it must be {description}"
    return ApiError(400, message, param=name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
