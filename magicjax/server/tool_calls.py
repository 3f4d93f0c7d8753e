r"""Calls of tools: their formats as grammars, and as deltas of OpenAI's API.

hermes    I look.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>
llama3    {"name": "f", "parameters": {"x": 1}}
"""

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pydantic_core import from_json

from magicjax.decoding.prompts import reads_variable
from magicjax.decoding.reasoning import chat_template, overlap
from magicjax.grammars.grammar import Grammar, inline, of_rules, terminal
from magicjax.server.bodies import ChatBody, Function, Message, NamedTool
from magicjax.server.errors import ApiError, shown

IGNORED = (
    "tools: the chat template ignores them: use a model whose template has tools, or start the "
    "server with such a --tokenizer"
)
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
PYTHON_TAG = "<|python_tag|>"  # may precede a call of Llama 3; most tokenizers have it as special
NAME = re.compile(r'"(?:[^"\\]|\\.)*"')
# Text that a Llama 3 template reads as no call: it does not begin with { or <|.
NO_CALL = r"[ \t\r\n]*(?:[^ \t\r\n{<](?s:.)*|<(?:[^|](?s:.)*)?)?"
SPACES = (" ", "\t", "\r", "\n")

Delta = dict[str, Any]  # of OpenAI's streams: {"content": ...} or {"tool_calls": [...]}


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: a JSON object of a name and arguments.

    Attributes:
      name: value of `--tool-format`.
      field: the JSON key of the arguments.
      begin, end: the markers around each of several calls, after which text may follow; "": the
        whole text is one call.
    """

    name: str
    field: str
    begin: str = ""
    end: str = ""


HERMES = ToolFormat("hermes", "arguments", "<tool_call>", "</tool_call>")
LLAMA3 = ToolFormat("llama3", "parameters")
FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3)}


def detected(template: str) -> ToolFormat | None:
    """Returns the format of the calls in a chat template; None: no known one."""
    if HERMES.begin in template and re.search(r'"arguments\\?"', template):
        return HERMES
    if PYTHON_TAG in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA3
    return None


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
      format: how the model writes calls.
      definitions: all tools, as chat templates read them.
      functions: those that the text may call.
      required: whether the text must call one.
      parallel: whether it may have several calls.
    """

    format: ToolFormat
    definitions: Sequence[dict[str, Any]]
    functions: Sequence[Function]
    required: bool
    parallel: bool

    @property
    def must_match(self) -> bool:
        """Whether calls that their schemas do not constrain are an error."""
        return self.required or any(function.strict for function in self.functions)

    def grammar(self, content: Grammar | None = None) -> Grammar:
        """Returns the grammar of the texts.

        Args:
          content: what a text without calls matches; None: any text, also before calls.

        Raises:
          ValueError: the parameters of a function are not supported.
        """
        content = None if self.required else content
        try:
            grammar = of_rules(self._rules(content is not None), untrusted=True, answer=content)
        except ValueError:
            for function in self.functions:
                _check_parameters(function)  # with an error that names the function
            raise
        has_free_text = not self.required and content is None and self.format.end
        free_until = self.format.begin if has_free_text else ""
        return dataclasses.replace(grammar, free_until=free_until)

    def _rules(self, has_answer: bool) -> str:
        """Returns the rules of the grammar; with `has_answer`, those of other texts are given."""
        call = "call: " + " | ".join(
            f"{self._header(function.name, has_answer)} {_parameters(function)} {_quoted('}')}"
            for function in self.functions
        )
        begin, end = _quoted(f"{self.format.begin}\n"), _quoted(f"\n{self.format.end}")
        if not self.format.end:
            others = "answer" if has_answer else terminal(NO_CALL)
            start = "call" if self.required else f"{others} | call"
            return f"start: {start}\n{call}"
        more = f' ("\\n" {begin} call {end})*' if self.parallel else ""
        rules = [f"calls: call {end}{more}", call]
        if self.required or has_answer:
            others = "answer | " if has_answer else ""
            return "\n".join([f"start: {others}{begin} calls", *rules])
        # Free text up to the first marker; lazy, so that nothing else can follow a marker.
        head = f"head[lazy]: /(?s:.*)/ {_quoted(self.format.begin)}"
        start = r'start: TEXT | head "\n" calls'
        return "\n".join([start, "TEXT: /(?s:.*)/", head, *rules])

    def _header(self, name: str, has_answer: bool) -> str:
        """Returns what precedes the arguments of a call."""
        if self.format.begin or not has_answer:
            return _quoted(f'{{"name": "{name}", "{self.format.field}": ')
        # An answer may begin with the same tokens of JSON: llguidance takes the longest one.
        tokens = "{", '"name"', ":", f'"{name}"', ",", f'"{self.format.field}"', ":"
        return ' " "? '.join(map(_quoted, tokens)) + ' " "?'


def tools_of(body: ChatBody, tokenizer: Any, tool_format: ToolFormat | None) -> Tools | None:
    """Returns the tools of a body; None: the text is content.

    Args:
      body: the body of a request.
      tokenizer: with a chat template.
      tool_format: the format of calls; None: that of the chat template.

    Raises:
      ApiError: 400.
    """
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("auto", "none"):
            _refuse("tool_choice requires tools: add them, or omit tool_choice", "tool_choice")
        return None
    functions = [tool.function for tool in body.tools]
    names = [function.name for function in functions]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        _refuse(f"tools has two functions {repeated!r}: names must differ")
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            _refuse(
                f"tool_choice names the function {choice.function.name!r}, which tools does not "
                f"have: use one of {', '.join(names)}",
                "tool_choice",
            )
    if choice == "none":
        return None
    tool_format = tool_format or detected(chat_template(tokenizer))
    if tool_format is None and not reads_variable(tokenizer, "tools"):
        _refuse(IGNORED)
    if tool_format is None:
        _refuse(
            "tools: the chat template has no known format of calls: use a model with one, or start "
            f"the server with --tool-format {' or '.join(FORMATS)}"
        )
    for marker in filter(None, (tool_format.begin, tool_format.end)):
        if _is_special(tokenizer, marker):
            _refuse(
                f"tools: the tokenizer omits {marker} from texts, as a special token: set its "
                '"special" to false in tokenizer.json and tokenizer_config.json'
            )
    return Tools(
        format=tool_format,
        definitions=[_definition(tool.function) for tool in body.tools],
        functions=functions,
        required=choice != "auto",
        parallel=body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates read them.

    Raises:
      ApiError: 400, for calls and results that do not belong together.
    """
    rendered, called = [], dict[str, str]()  # names of functions by the ids of calls
    for i, message in enumerate(messages):
        where, role = f"messages[{i}]", message.role
        fields: dict[str, Any] = dict(role=role, content=message.text)
        if role == "developer":
            fields["role"] = "system"
        for name in ("name", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                fields[name] = value
        if message.content is None and not message.tool_calls:
            _refuse(f"{where} has no content: it must be a text, or parts of type text", "messages")
        if message.tool_calls:
            if role != "assistant":
                _refuse(f"{where} of role {role} has tool_calls: only assistants have", "messages")
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _parsed(call.function.arguments, f"{where}.tool_calls[{j}]"),
                    },
                }
                for j, call in enumerate(message.tool_calls)
            ]
            called |= {call.id: call.function.name for call in message.tool_calls}
        if role == "tool":
            if message.tool_call_id not in called:
                _refuse(
                    f"{where}.tool_call_id={message.tool_call_id!r}: it must be the id of a call "
                    "in an earlier message",
                    "messages",
                )
            fields |= dict(tool_call_id=message.tool_call_id, name=called[message.tool_call_id])
        elif message.tool_call_id is not None:
            _refuse(f"{where} of role {role} has a tool_call_id: only tools have", "messages")
        rendered.append(fields)
    return rendered


class CallParser:
    """Splits one text into content and calls while it arrives.

    A call begins when its name and the first character of its arguments have arrived. What may
    become a call is held back, as is the space before it.

    Attributes:
      num_calls: those that have begun.
      open: whether the arguments of the last one have not ended.
    """

    def __init__(self, tool_format: ToolFormat, parallel: bool = True):
        """Starts an empty text; without `parallel`, nothing follows the first call."""
        self.num_calls, self.open = 0, False
        self._format, self._parallel = tool_format, parallel
        self._held, self._rest = "", ""  # space and a marker before a call; what is to be read
        first_step = self._content if tool_format.begin else self._header
        self._step: Callable[[list[Delta]], bool] = first_step
        self._depth, self._in_string, self._escaped = 0, False, False  # of the arguments

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that new text makes, each with content or with one call."""
        self._rest += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self, complete: bool) -> list[Delta]:
        """Returns the deltas of what was held back.

        Args:
          complete: whether the text has ended with EOS, or a stop token or string. If it was cut,
            what may have become a call is omitted.
        """
        rest = self._held + self._rest
        if not complete or self._step == self._tail or (self.num_calls and not rest.strip()):
            return []
        return _text_delta(rest)

    # Each step reads some of the rest, and returns whether the next one can go on.

    def _content(self, deltas: list[Delta]) -> bool:
        """Reads text up to a marker."""
        begin, text = self._format.begin, self._rest
        if not begin:
            deltas += _text_delta(text)
            self._rest = ""
            return False
        start = text.find(begin)
        has_call = start >= 0
        if not has_call:
            start = len(text) - overlap(text, begin)
        end = len(text[:start].rstrip())
        deltas += _text_delta(text[:end])
        self._rest = text[end:]
        if has_call:
            self._held, self._rest = text[end : start + len(begin)], text[start + len(begin) :]
            self._step = self._header
        return has_call

    def _header(self, deltas: list[Delta]) -> bool:
        """Reads `{"name": "f", "arguments": ` up to the arguments; other text is content."""
        name, position = self._name_and_arguments()
        if position is None:
            return False
        deltas += _text_delta("" if name else self._held)
        self._held = ""
        if name is None:
            self._step = self._content
            return True
        function = dict(name=name, arguments="")
        identifier = f"call_{uuid.uuid4().hex[:24]}"
        call = dict(index=self.num_calls, id=identifier, type="function", function=function)
        deltas.append({"tool_calls": [call]})
        self.num_calls, self.open = self.num_calls + 1, True
        self._rest, self._step = self._rest[position:], self._arguments
        return True

    def _name_and_arguments(self) -> tuple[str | None, int | None]:
        """Returns a call's name and where its arguments begin.

        The position is None while text is incomplete. The name is None for text other than a call.
        """
        text, position, name = self._rest, 0, ""
        if not self._format.begin:
            if text and PYTHON_TAG.startswith(text):
                return None, None
            position = len(PYTHON_TAG) if text.startswith(PYTHON_TAG) else 0
        for piece in ("{", '"name"', ":", NAME, ",", f'"{self._format.field}"', ":", "{"):
            while text[position : position + 1] in SPACES:
                position += 1
            if isinstance(piece, str):
                matches = text.startswith(piece, position)
                is_incomplete = piece.startswith(text[position:])
                end = position + len(piece)
            else:
                match = piece.match(text, position)
                matches = match is not None
                is_incomplete = text[position : position + 1] in ("", '"')
                name, end = (match[0], match.end()) if match else ("", position)
            if not matches:
                return None, None if is_incomplete else 0
            position = end
        called = _json(name)
        return called or None, position - 1

    def _arguments(self, deltas: list[Delta]) -> bool:
        """Reads a JSON object."""
        end = len(self._rest)
        for i, char in enumerate(self._rest):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{}[]":
                self._depth += 1 if char in "{[" else -1
                if not self._depth:
                    end, self.open, self._step = i + 1, False, self._tail
                    break
        if end:
            function = dict(arguments=self._rest[:end])
            deltas.append({"tool_calls": [dict(index=self.num_calls - 1, function=function)]})
        self._rest = self._rest[end:]
        return not self.open

    def _tail(self, _: list[Delta]) -> bool:
        """Skips what is left of a call, up to the marker at its end or the next one."""
        begin, end = self._format.begin, self._format.end
        several = self._parallel and end
        marker = re.search(f"{begin}|{end}", self._rest) if several else None
        if marker is None:
            return False
        used = marker.end() if marker[0] == end else marker.start()
        self._rest, self._step = self._rest[used:], self._content
        return True


def message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Returns the message that deltas add up to."""
    content, calls = "", list[dict[str, Any]]()
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                fields = {name: value for name, value in call.items() if name != "index"}
                calls.append(fields | {"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    result: dict[str, Any] = {"role": "assistant", "content": content or None}
    return result | ({"tool_calls": calls} if calls else {})


def _definition(function: Function) -> dict[str, Any]:
    """Returns a tool as chat templates read it; some of them require a description."""
    parameters = function.parameters or NO_PARAMETERS
    described = dict(name=function.name, description=function.description or "")
    return {"type": "function", "function": described | {"parameters": parameters}}


def _parameters(function: Function) -> str:
    """Returns the arguments of a function as a part of a grammar."""
    schema = function.parameters or NO_PARAMETERS
    try:
        if schema.get("type") != "object":
            raise ValueError('the JSON schema of parameters must have "type": "object"')
        return inline(schema)
    except (ValueError, TypeError) as error:
        raise ValueError(f"tools: the function {function.name!r}: {error}") from error


def _check_parameters(function: Function) -> None:
    """Raises ValueError if the parameters of a function are not supported."""
    try:
        Grammar.json_schema(function.parameters or NO_PARAMETERS, untrusted=True)
    except ValueError as error:
        raise ValueError(f"tools: the function {function.name!r}: {error}") from error


def _quoted(text: str) -> str:
    """Returns a text as a part of a grammar."""
    return json.dumps(text)


def _is_special(tokenizer: Any, text: str) -> bool:
    added = tokenizer.added_tokens_decoder.values()
    return any(token.content == text and token.special for token in added)


def _parsed(arguments: str, where: str) -> dict[str, Any]:
    parsed = _json(arguments or "{}")
    if not isinstance(parsed, dict):
        _refuse(
            f"{where}.function.arguments={shown(arguments)}: it must be the JSON text of an object",
            "messages",
        )
    return parsed


def _json(text: str) -> Any:
    """Returns the value of JSON text; None if it is not valid."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def _text_delta(text: str) -> list[Delta]:
    return [{"content": text}] if text else []


def _refuse(message: str, param: str = "tools") -> NoReturn:
    raise ApiError(400, message, param=param)
