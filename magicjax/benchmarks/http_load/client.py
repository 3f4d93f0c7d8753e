"""One streamed request to a server with OpenAI's API, and what a client measures of it."""

import dataclasses
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

OK = "ok"
CONNECT_S = 10.0
SHOWN = 200  # characters of a server's error


@dataclasses.dataclass(frozen=True)
class Server:
    """A server under load.

    Attributes:
      label: in reports.
      url: without /v1.
      model: its name for clients.
    """

    label: str
    url: str
    model: str


@dataclasses.dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
      path: below /v1/.
      body: without the model.
      category: of the prompt; "" for none.
    """

    path: str
    body: dict[str, Any]
    category: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One request that has ended. Seconds are since it was due; counts are from `usage`.

    Attributes:
      status: "ok", a status of HTTP, the name of an exception of httpx, or what was wrong with the
        stream.
      error: the reason; empty if the status is "ok".
      due_s: when it was due, since the start of the run.
      total_s: end of the answer.
      ttft_s: first text; the end for an answer without text, None for a failed request.
      tpot_s: per token after the first piece of text, whose tokens are counted by its share of the
        characters; None for text in one piece and without counts.
      prompt_tokens, cached_tokens, new_tokens, accepted_tokens: None where a server sends none.
      category: of the request.
    """

    status: str
    error: str
    due_s: float
    total_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    new_tokens: int | None = None
    accepted_tokens: int | None = None
    category: str = ""


class StreamError(Exception):
    """A stream that does not end as it should; the arguments are status and reason."""


def make_client(api_key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """Returns a client without a limit of connections, and without a proxy.

    Args:
      api_key: for /v1/; None: none.
      timeout_s: longest time without data.
    """
    return httpx.AsyncClient(
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def find_model(client: httpx.AsyncClient, url: str) -> str:
    """Returns the name of the model that a server has.

    Raises:
      OSError: the server does not answer.
      ValueError: the server answers with an error, or has no model, or several.
    """
    try:
        answer = await client.get(f"{url}/v1/models")
    except httpx.HTTPError as error:
        raise OSError(f"url={url} does not answer ({_reason(error)}): start the server") from error
    if answer.status_code != 200:
        raise ValueError(f"url={url}: /v1/models answers {answer.status_code}: {_shown(answer)}")
    try:
        names = [model["id"] for model in answer.json()["data"]]
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"url={url}: /v1/models lists no models: is it OpenAI's API?") from None
    if len(names) != 1:
        listed = ", ".join(names[:5]) + ", …" * (len(names) > 5)
        raise ValueError(f"url={url} has {len(names)} models ({listed}): choose one with --model")
    return names[0]


async def send(
    client: httpx.AsyncClient, server: Server, request: Request, start: float, due: float
) -> Sample:
    """Sends a request and reads the stream to its end.

    Args:
      client: with the key.
      server: to which.
      request: what.
      start, due: of the run, and of the request, on the clock of `time.perf_counter`. A request
        that is sent late counts from when it was due.
    """
    pieces: list[tuple[float, int]] = []  # seconds and characters
    usage: dict[str, Any] = {}
    status, reason = OK, ""
    body = request.body | {"model": server.model, "stream": True}
    body["stream_options"] = {"include_usage": True}
    try:
        async with client.stream("POST", f"{server.url}/v1/{request.path}", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise StreamError(str(answer.status_code), _shown(answer))
            async for chunk in _chunks(answer):
                if characters := sum(len(_text(choice)) for choice in chunk.get("choices") or ()):
                    pieces.append((time.perf_counter() - due, characters))
                usage = chunk.get("usage") or usage
    except StreamError as error:
        status, reason = error.args
    except httpx.HTTPError as error:
        status, reason = type(error).__name__, _reason(error)
    except (ValueError, TypeError, AttributeError) as error:
        status, reason = "not OpenAI's", f"an event is not OpenAI's: {error}"
    total_s = time.perf_counter() - due
    if status != OK:
        return Sample(status, reason, due - start, total_s, category=request.category)
    new_tokens = usage.get("completion_tokens")
    prompt, new = (usage.get(f"{kind}_tokens_details") or {} for kind in ("prompt", "completion"))
    return Sample(
        OK,
        "",
        due - start,
        total_s,
        ttft_s=pieces[0][0] if pieces else total_s,
        tpot_s=time_per_token(pieces, total_s, new_tokens),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=prompt.get("cached_tokens"),
        new_tokens=new_tokens,
        accepted_tokens=new.get("accepted_prediction_tokens"),
        category=request.category,
    )


def time_per_token(
    pieces: list[tuple[float, int]], total_s: float, tokens: int | None
) -> float | None:
    """Returns the seconds per token after the first piece; None if nothing came after it.

    A server that sends a piece per token gives the usual (total - TTFT) / (tokens - 1). Speculation
    sends several at once: of 20 tokens in pieces of 40, 30 and 30 characters, 12 came after the
    first.

    Args:
      pieces: seconds and characters.
      total_s: end of the answer.
      tokens: of the answer; None: unknown.
    """
    if len(pieces) < 2 or not tokens:
        return None
    first_s, first = pieces[0]
    after = tokens * (1 - first / sum(characters for _, characters in pieces))
    return (total_s - first_s) / after


async def _chunks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream; raises StreamError if it ends too early.

    It ends with [DONE]. `transformers serve` sends none, so a finish reason is enough.
    """
    ended, rest = False, b""
    # Not `aiter_lines`: it also splits at U+2028 and U+0085, which JSON may contain.
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                ended = True
                continue
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise StreamError("error in stream", str(error.get("message", error))[:SHOWN])
            ended |= any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
            yield chunk
    if not ended:
        raise StreamError("cut stream", "the stream ended without a finish reason")


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def _shown(answer: httpx.Response) -> str:
    """Returns the message of an answer with an error."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, TypeError, LookupError):
        message = answer.text
    return " ".join(str(message).split())[:SHOWN]


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
