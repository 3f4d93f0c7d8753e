"""Requests from lines of JSON."""

import functools
import importlib.resources
import json
import pathlib
from typing import Any

from magicjax.benchmarks.http_load.client import Request

PATHS = {"chat": "chat/completions", "completions": "completions"}  # below /v1/
BUNDLED = "prompts.jsonl"


def read_prompts(path: str | None, api: str | None) -> list[Request]:
    """Returns a request for each line of a file, with only its prompt or messages.

    Args:
      path: of a file whose lines are objects with "messages", "prompt" or, as in SPEED-Bench,
        "turns", of which the first one is sent; and optionally "category". None: the bundled file,
        whose categories are the entropy classes of SPEED-Bench (arXiv 2604.09557).
      api: "chat" makes a message of the user of a prompt, "completions" a prompt of a single
        message; None: as each line has it.

    Raises:
      ValueError, OSError: the file cannot be read, or a line is neither.
    """
    if path is None:
        folder = importlib.resources.files("magicjax.benchmarks.http_load")
        text = folder.joinpath(BUNDLED).read_text("utf-8")
    elif not pathlib.Path(path).is_file():
        raise ValueError(f"prompts={path} is not a file")
    else:
        text = pathlib.Path(path).read_text("utf-8")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"prompts={path} is empty: it must have a JSON object per line")
    return [_request(line, f"prompts={path}, line {number}", api) for number, line in lines]


def _request(line: str, where: str, api: str | None) -> Request:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        value = {}
    prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(turns := value.get("turns"), list) and turns and _is_prompt(turns[0]):
        messages = [{"role": "user", "content": turns[0]}]
    category = value.get("category", "")
    if not isinstance(category, str):
        raise ValueError(f"{where}: category={category!r}: it must be a text")
    if not (_is_prompt(prompt) if messages is None else prompt is None and _are_messages(messages)):
        raise ValueError(
            f'{where}: it must have one of "prompt", a text, "turns", a list of texts, and '
            '"messages", a list of objects with the texts "role" and "content"'
        )
    if api == "completions" and messages:
        if len(messages) > 1:
            raise ValueError(f"{where}: {len(messages)} messages are no prompt: use --api chat")
        prompt = messages[0]["content"]
    if api == "chat" and prompt:
        messages = [{"role": "user", "content": prompt}]
    chosen = api or ("chat" if messages else "completions")
    body: dict[str, Any] = {"messages": messages} if chosen == "chat" else {"prompt": prompt}
    return Request(PATHS[chosen], body, category)


def with_text_before(request: Request, characters: int, number: int) -> Request:
    """Returns the request with other text in front, so that its prompt is longer.

    The text is source code of Python's standard library, because random tokens are accepted and
    routed unlike text.

    Args:
      request: of `read_prompts`.
      characters: of the text.
      number: selects the part of the sources; different numbers have different text.
    """
    sources = standard_library()
    begin = number * characters % max(1, len(sources) - characters)
    text = f"{sources[begin : begin + characters]}\n\n"
    if "prompt" in request.body:
        longer = {"prompt": text + request.body["prompt"]}
    else:
        first, *others = request.body["messages"]
        longer = {"messages": [first | {"content": text + first["content"]}, *others]}
    return Request(request.path, request.body | longer, request.category)


@functools.cache
def standard_library() -> str:
    """Returns the sources of Python's standard library, without packages."""
    files = sorted(pathlib.Path(json.__file__).parents[1].glob("*.py"))
    return "\n".join(file.read_text("utf-8", errors="replace") for file in files)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, dict) and all(isinstance(one.get(k), str) for k in ("role", "content"))
            for one in value
        )
    )
