"""The routes of the server, an ASGI application."""

import asyncio
import collections
import concurrent.futures
import dataclasses
import hmac
import importlib.resources
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from magicjax.decoding.detokenizer import TokenTexts, token_texts
from magicjax.decoding.text import NewTokens, Result
from magicjax.server import protocol, responses
from magicjax.server.config import ServerConfig
from magicjax.server.errors import ApiError, server_error, shown
from magicjax.server.metrics import Metrics
from magicjax.server.middleware import AccessLog, ClientLimit, HostCheck
from magicjax.server.protocol import Generation, Served
from magicjax.server.worker import Job, Snapshot, Worker

STATUS_S = 1.0  # between two events of /status
RATE_EVENTS = 5  # over which its rates are: a step of a slow engine takes longer than one
CLOSED = 499  # a client that has disconnected receives nothing; the status is for the log
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
GRAMMAR_THREADS = 2
WITH_GRAMMARS = (b'"response_format"', b'"tools"')  # fields of a body
NOTHING = NewTokens(np.zeros(0, np.int32), "", None)

Parse = Callable[[bytes, Served], Generation]
Handler = Callable[[Request], Awaitable[Response]]


def create_app(served: Served, worker: Worker, config: ServerConfig) -> Starlette:
    """Returns the application.

    Args:
      served: whose target has a tokenizer.
      worker: the worker that owns the engine.
      config: the server's configuration.
    """
    routes = _Routes(served, worker, config)
    completions = routes.generating(protocol.parse_completion)
    chat = routes.generating(protocol.parse_chat)
    handlers: dict[Any, Any] = {ApiError: _error, HTTPException: _http_error, Exception: _bug}
    return Starlette(
        routes=[
            Route("/v1/completions", routes.guarded(completions), methods=["POST"]),
            Route("/v1/chat/completions", routes.guarded(chat), methods=["POST"]),
            Route("/v1/models", routes.guarded(routes.models)),
            Route("/v1/models/{name:path}", routes.guarded(routes.model)),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/status", routes.status),
            Route("/", routes.index),
        ],
        middleware=[
            Middleware(AccessLog),
            Middleware(  # so that pages of these origins can read refusals, too
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            ),
            Middleware(HostCheck, names=config.allowed_hosts),
            Middleware(ClientLimit, limit=config.max_requests_per_client),
        ],
        exception_handlers=handlers,
    )


class _Routes:
    """Handlers of requests."""

    def __init__(self, served: Served, worker: Worker, config: ServerConfig):
        self._served, self._worker, self._config = served, worker, config
        self._created = int(time.time())
        tokenizer = served.target.tokenizer
        tokenizer("")  # sets truncation and padding once: from now on threads only read it
        self._texts = token_texts(tokenizer)
        self._metrics = Metrics(served.name, worker)
        worker.on_result = self._metrics.count
        page = importlib.resources.files("magicjax.server").joinpath("status.html")
        self._page = page.read_text("utf-8")
        # The trial of a grammar can take seconds; requests without one do not wait for it.
        self._compiling = concurrent.futures.ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")

    def guarded(self, handler: Handler) -> Handler:
        """Returns the handler for requests with the key."""

        async def authorized(request: Request) -> Response:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            key = self._config.api_key
            if key is not None and not (
                scheme.lower() == "bearer"
                and hmac.compare_digest(token.strip().encode(), key.encode())
            ):
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return await handler(request)

        return authorized

    def generating(self, parse: Parse) -> Handler:
        """Returns the handler that answers the bodies which `parse` reads."""

        async def handle(request: Request) -> Response:
            try:
                data = await _body(request, self._config)
            except ClientDisconnect:
                return Response(status_code=CLOSED)
            return await _unless_disconnected(request, self._respond(request, parse, data))

        return handle

    async def _respond(self, request: Request, parse: Parse, data: bytes) -> Response:
        executor = self._compiling if any(field in data for field in WITH_GRAMMARS) else None
        loop = asyncio.get_running_loop()
        generation = await loop.run_in_executor(executor, parse, data, self._served)
        worker, texts = self._worker, self._texts
        job = await worker.submit(generation)
        request.state.job = job  # for the access log
        if generation.stream:
            return _JobStream(worker, job, _chunks(job, texts))
        try:
            results = await job.results()
        finally:
            worker.cancel(job)  # if the client has disconnected
        return JSONResponse(await asyncio.to_thread(responses.answer, generation, texts, results))

    async def models(self, request: Request) -> Response:
        return JSONResponse(responses.model_list(self._served, self._created))

    async def model(self, request: Request) -> Response:
        protocol.check_model(request.path_params["name"], self._served)
        return JSONResponse(responses.model_card(self._served, self._created))

    async def health(self, request: Request) -> Response:
        state = self._worker.state(self._config.stall_s)
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        text = prometheus_client.generate_latest(self._metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def index(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": PAGE_POLICY})

    async def status(self, request: Request) -> Response:
        return _EventStream(_states(self._served.name, self._worker))


async def _error(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    headers, message = None if error.headers is None else dict(error.headers), error.detail
    if error.status_code == 404:
        paths = ", ".join(route.path_format for route in request.app.routes)
        message = f"{shown(request.url.path)} does not exist: use one of {paths}"
    return await _error(request, ApiError(error.status_code, message, headers=headers))


async def _bug(request: Request, _: Exception) -> Response:
    return await _error(request, server_error("internal error"))


async def _body(request: Request, config: ServerConfig) -> bytes:
    """Returns the body of a request; raises ApiError (408, 413, 415)."""
    limit = config.max_body_bytes
    # A web page of another origin cannot send this type unless the server allows the origin.
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise ApiError(415, "the body must have Content-Type: application/json")
    too_large = ApiError(413, f"the body has more than {limit} bytes, the limit of the server")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > limit:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(config.body_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408,
            f"the body has not arrived within {config.body_s:g} s, the limit of the server",
            headers={"Connection": "close"},
        ) from None
    return bytes(data)


async def _unless_disconnected(
    request: Request, response: Coroutine[Any, Any, Response]
) -> Response:
    """Returns a response; cancels making it when the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    making, gone = asyncio.create_task(response), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({making, gone}, return_when=asyncio.FIRST_COMPLETED)
        return making.result() if making.done() else Response(status_code=CLOSED)
    finally:
        for task in (making, gone):
            task.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events."""

    def __init__(self, events: AsyncIterator[str]):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )


class _JobStream(_EventStream):
    """The events of a job, which ends with the connection."""

    def __init__(self, worker: Worker, job: Job, events: AsyncIterator[str]):
        super().__init__(events)
        self._worker, self._job = worker, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._worker.cancel(self._job)


async def _chunks(job: Job, texts: TokenTexts) -> AsyncIterator[str]:
    """Yields the events of a stream of /v1/."""
    generation = job.generation
    envelope = responses.envelope(generation)
    if generation.include_usage:
        envelope["usage"] = None
    builder = responses.ChoiceBuilder(generation.chat, generation.stream, texts, generation.tools)
    if generation.chat:
        for index in range(job.num_choices):
            delta = {"role": "assistant", "content": ""}
            first = dict(index=index, delta=delta, logprobs=None, finish_reason=None)
            yield _event(envelope | {"choices": [first]})
    results: dict[int, Result] = {}
    prompt_tokens, new_tokens = sum(map(len, generation.prompts)), 0
    try:
        async for event in job.events():
            index, value = event.index, event.value
            new_tokens += 0 if isinstance(value, Result) else len(value.tokens)
            if generation.continuous_usage:
                envelope["usage"] = dict(
                    prompt_tokens=prompt_tokens,
                    completion_tokens=new_tokens,
                    total_tokens=prompt_tokens + new_tokens,
                )
            if isinstance(value, Result):
                results[index] = value
                choices = builder.choices(index, NOTHING, value.finish_reason)
            elif value.text or value.reasoning or value.logprobs is not None:
                if not len(value.tokens):  # the rest of the text
                    value = dataclasses.replace(value, logprobs=None)
                choices = builder.choices(index, value, None)
            else:
                continue
            for choice in choices:
                yield _event(envelope | {"choices": [choice]})
    except ApiError as error:
        yield _event(error.body())
        return
    if generation.include_usage:
        counts = responses.usage([results[i] for i in sorted(results)], generation.n)
        yield _event(envelope | {"choices": [], "usage": counts})
    yield "data: [DONE]\n\n"


async def _states(model: str, worker: Worker) -> AsyncIterator[str]:
    """Yields the state of the engine every second, until the server ends."""
    newest = collections.deque[tuple[Snapshot, float]](maxlen=RATE_EVENTS + 1)
    while True:
        newest.append((worker.snapshot, time.monotonic()))
        (before, then), (snapshot, now) = newest[0], newest[-1]
        yield _event(_state(model, worker.config.slots, snapshot, before, now - then))
        if worker.error is not None or (worker.draining and not worker.num_jobs):
            return
        await asyncio.sleep(STATUS_S)


def _state(
    model: str, slots: int, now: Snapshot, before: Snapshot, seconds: float
) -> dict[str, Any]:
    """Returns what the status page shows; rates are those since the snapshot before."""
    stats, rounds = now.stats, now.rounds - before.rounds
    tokens = now.tokens - before.tokens
    times = dict(queue=stats.queue_s, ttft=stats.ttft_s, tpot=stats.tpot_s, itl=stats.itl_s)
    return dict(
        model=model,
        slots=slots,
        running=stats.running,
        waiting=stats.waiting,
        tokens_per_s=round(tokens / seconds, 1) if seconds else None,
        tau=round(tokens / rounds, 3) if rounds else None,
        tau_in_total=round(now.tokens / now.rounds, 3) if now.rounds else None,
        new_tokens=now.tokens,
        finished=stats.finished,
        prefix_hits=stats.prefix_hits,
        prefix_lookups=stats.prefix_lookups,
        times={name: each and dataclasses.asdict(each) for name, each in times.items()},
    )


def _event(value: Any) -> str:
    # In ASCII, because many clients end lines also at U+0085, U+2028 and U+2029.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n"
