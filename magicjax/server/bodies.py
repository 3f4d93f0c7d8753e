"""The bodies of requests: which fields there are and what they may be.

A field's description completes the error "PATH=VALUE: it must be DESCRIPTION". An error of a field
without one is that of the field around it.
"""

import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import AfterValidator, Field
from pydantic.fields import FieldInfo

from magicjax.checks import TINY
from magicjax.engine.config import MAX_STOP_TOKENS
from magicjax.options import options_of
from magicjax.sampling_params import SamplingParams
from magicjax.server.errors import SHOWN, ApiError, shown
from magicjax.suggest import did_you_mean

MAX_N = 128
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256  # each piece of text is searched for all of them

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
TopK = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda k: max(k, 0))]
TopP = Annotated[float, Field(ge=0, le=1), AfterValidator(lambda p: max(p, TINY))]  # 0: the top
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**32)]
_Fast = Field(fail_fast=True)  # one error of a long list is enough
_MISSING = object()


class _Object(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Object):
    include_usage: bool | None = Field(None, description="true or false")
    continuous_usage_stats: bool | None = Field(  # vLLM's: counts so far in every event
        None, description="true or false"
    )
    include_obfuscation: Literal[False] | None = Field(None, description="false")


class JsonSchema(_Object):
    name: str = Field(description="a text")
    definition: dict[str, Any] = Field(alias="schema", description="a JSON schema")
    description: str | None = Field(None, description="a text")
    strict: bool | None = Field(  # a text always matches
        None, description="true or false"
    )


class ResponseFormat(_Object):
    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    lark: str | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        by_type = {"json_schema": self.json_schema, "regex": self.regex, "lark": self.lark}
        if any((value is not None) != (name == self.type) for name, value in by_type.items()):
            raise ValueError
        return self


PARAMETERS = options_of(SamplingParams)


def _parameter(name: str) -> Any:
    """Returns an optional field with the values of a parameter of a text."""
    return Field(None, description=PARAMETERS[name].values, **PARAMETERS[name].limits)


# The parameters that have the same name and values in both APIs; `_Body` has the others.
_fields: Any = {
    name: (option.annotation | None, _parameter(name))
    for name, option in PARAMETERS.items()
    if option.checkable and name not in ("logprobs", "prompt_logprobs")
}
_Parameters: Any = pydantic.create_model("_Parameters", __base__=_Object, **_fields)
_PENALTY = "a number from -2 to 2"


class _Body(_Parameters):
    """The fields of both APIs."""

    model: str | None = Field(None, description="the name that /v1/models lists")
    n: int | None = Field(None, ge=1, le=MAX_N, description=f"an integer from 1 to {MAX_N}")
    top_p: TopP | None = Field(None, description="a number from 0 to 1")
    top_k: TopK | None = Field(None, description="an integer; 0 or -1 for all tokens")
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
    seed: Seed | None = Field(None, description="an integer in the range of int64")
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
    max_tokens: int | None = _parameter("max_tokens")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description='an object such as {"include_usage": true}'
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", '
        '"json_schema": {"name": ..., "schema": {...}}}, {"type": "regex", "regex": ...} or '
        '{"type": "lark", "lark": ...}',
    )


class CompletionBody(_Body):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], _Fast]
        | Annotated[list[str], _Fast]
        | Annotated[list[Annotated[list[TokenId], _Fast]], _Fast]
    ) = Field(description="a text, a list of texts, token ids, or a list of lists of token ids")
    logprobs: int | None = _parameter("logprobs")
    echo: bool | None = Field(None, description="true or false")


class TextPart(_Object):
    type: Literal["text"] = Field(description="text")
    text: str = Field(description="a text")


class Function(_Object):
    name: str = Field(
        pattern="^[a-zA-Z0-9_-]{1,64}$", description="1 to 64 letters, digits, _ and -"
    )
    description: str | None = Field(None, description="a text")
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = Field(None, description="true or false")


class Tool(_Object):
    type: Literal["function"] = Field(description="function")
    function: Function = Field(description='an object such as {"name": "f", "parameters": {...}}')


class FunctionName(_Object):
    name: str


class NamedTool(_Object):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Object):
    name: str = Field(description="a text")
    arguments: str = Field(description="the JSON text of an object")


class ToolCall(_Object):
    index: int | None = Field(  # of a chunk of a stream, which clients send back
        None, description="an integer"
    )
    id: str = Field(description="a text")
    type: Literal["function"] = Field(description="function")
    function: CalledFunction = Field(
        description='an object such as {"name": "f", "arguments": "{}"}'
    )


class Message(_Object):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="system, developer, user, assistant or tool"
    )
    content: str | Annotated[list[TextPart], _Fast] | None = Field(
        None, description="a text, or a list of parts of type text"
    )
    name: str | None = Field(None, description="a text")
    reasoning_content: str | None = Field(None, description="a text")
    tool_calls: Annotated[list[ToolCall], _Fast] | None = Field(
        None,
        description='a list of calls such as {"id": "1", "type": "function", "function": '
        '{"name": "f", "arguments": "{}"}}',
    )
    tool_call_id: str | None = Field(None, description="a text")

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatBody(_Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], _Fast] = Field(
        min_length=1,
        description='a list of messages such as {"role": "user", "content": "Hello"}',
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), _Fast] | None = Field(
        None,
        description=f"a list of at most {MAX_TOOLS} tools such as "
        '{"type": "function", "function": {"name": "f", "parameters": {...}}}',
    )
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = Field(
        None,
        description='auto, none, required, or {"type": "function", "function": {"name": ...}}',
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    chat_template_kwargs: dict[str, Any] | None = Field(  # vLLM's
        None, description="an object of variables of the chat template"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="none, minimal, low, medium, high or xhigh"
    )
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = _parameter("logprobs")


def parse_completion(value: Any) -> CompletionBody:
    """Returns a valid body of /v1/completions; raises ApiError (400)."""
    return _parse(CompletionBody, value, NEUTRAL_COMPLETION)


def parse_chat(value: Any) -> ChatBody:
    """Returns a valid body of /v1/chat/completions; raises ApiError (400)."""
    if isinstance(value, dict) and isinstance(items := value.get("messages"), list):
        messages = [
            _without_neutral(message, NEUTRAL_MESSAGE, f"messages[{i}].")
            if isinstance(message, dict)
            else message
            for i, message in enumerate(items)
        ]
        value = value | {"messages": messages}
    return _parse(ChatBody, value, NEUTRAL_CHAT)


def _parse(body_class: Any, value: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = _without_neutral(value, neutral, "")
    fields = {name: field for name, field in fields.items() if name not in WITHOUT_EFFECT}
    try:
        return body_class.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _as_api_error(error, body_class, fields) from None


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
                f"{prefix}{name}={shown(value)} is not supported: "
                f"{REMEDIES.get(name, f'omit {name}')}",
                param=prefix + name,
                code="unsupported_parameter",
            )
    return others


class _Step(NamedTuple):
    """A field on the way to an error.

    Attributes:
      path: such as messages[0].name.
      name: the field's name.
      value: what it is; _MISSING without one.
      fields: the fields that there are beside it, and itself unless it is unknown.
    """

    path: str
    name: str
    value: Any
    fields: Mapping[str, FieldInfo]


def _as_api_error(
    error: pydantic.ValidationError, body_class: Any, body: dict[str, Any]
) -> ApiError:
    """Returns the error of the innermost field, of several the first one."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    steps = max((_steps(each["loc"], body_class, body) for each in errors), key=len)
    (path, name, value, fields), param = steps[-1], steps[0].name[:SHOWN]
    if name not in fields:
        hint = did_you_mean(name, fields) or f"; supported are {', '.join(fields)}"
        message = f"unknown field {shown(path)}{hint}"
        return ApiError(400, message, param=param, code="unknown_parameter")
    problem = f"{path} is missing" if value is _MISSING else f"{path}={shown(value)}"
    return ApiError(400, f"{problem}: it must be {fields[name].description}", param=param)


def _steps(location: Sequence[str | int], body_class: Any, value: Any) -> list[_Step]:
    """Returns the fields on the way to the location of an error that have a description.

    A location also has the names of the types of a union, which are no fields.
    """
    steps, path, fields = list[_Step](), "", _fields_of(body_class)
    for key in location:
        if isinstance(key, int):
            path, value = f"{path}[{key}]", value[key]
            if fields and not isinstance(value, dict):  # of a list of objects
                steps.append(_Step(path, "", value, {"": FieldInfo(description="an object")}))
        elif isinstance(value, dict) and (key in fields or key in value):
            path, value = f"{path}.{key}" if path else key, value.get(key, _MISSING)
            field = fields.get(key)
            if field is None or field.description:
                steps.append(_Step(path, key, value, fields))
            if not (fields := {} if field is None else _fields_of(field.annotation)):
                break
    return steps


def _fields_of(annotation: Any) -> dict[str, FieldInfo]:
    """Returns the fields of the objects that a type allows, by their names in bodies."""
    if isinstance(annotation, type) and issubclass(annotation, _Object):
        return {field.alias or name: field for name, field in annotation.model_fields.items()}
    members = map(_fields_of, typing.get_args(annotation))
    return {name: field for fields in members for name, field in fields.items()}
