"""What all requests pass before their routes: the access log and checks."""

import collections
import ipaddress
import logging
import time
import urllib.parse
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from magicjax.server.errors import ApiError, too_many_requests

logger = logging.getLogger("magicjax.server.access")

ANY = "*"
MISDIRECTED = 421
SHOWN = 100  # characters of a wrong name in an error


class AccessLog:
    """Logs a line for each request when its answer ends.

    ::

        127.0.0.1 POST /v1/completions 200 ttft_s=0.041 total_s=0.370 prompt_tokens=6 new_tokens=24
    """

    def __init__(self, app: ASGIApp):
        """Routes that generate text set `state.job`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            logger.info(_line(scope, status, begun))


class HostCheck:
    """Refuses requests to other names than the server's.

    A web page can let its own name resolve to the address of this server (DNS rebinding); the
    browser then takes both for one origin. It needs a name for this, so addresses are allowed.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]):
        """Allows `names`, localhost and all IP addresses; "*" allows any name."""
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ANY not in self._names:
            name = _name(Headers(scope=scope).get("host", ""))
            if name not in self._names and not _is_address(name):
                error = ApiError(
                    MISDIRECTED,
                    f"the host {name[:SHOWN]!r} is not a name of this server: use its IP address, "
                    "or start the server with this name in --allowed-hosts",
                    code="host_not_allowed",
                )
                await answer(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


class ClientLimit:
    """Bounds the open requests from one address; /health is not counted."""

    def __init__(self, app: ASGIApp, limit: int):
        """Allows `limit` requests from each address at a time."""
        self._app, self._limit = app, limit
        self._open: collections.Counter[str] = collections.Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or scope["client"] is None:
            await self._app(scope, receive, send)
            return
        address = scope["client"][0]
        if self._open[address] >= self._limit:
            error = too_many_requests(
                f"{address} has {self._limit} open requests, the most of one client "
                "(--max-requests-per-client): wait for an answer",
                "too_many_requests",
            )
            await answer(error, scope, receive, send)
            return
        self._open[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]


async def answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with an error."""
    await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)


def _line(scope: Scope, status: int, begun: float) -> str:
    """Returns the line of a request, without its query."""
    client, job = scope["client"], scope.get("state", {}).get("job")
    path = urllib.parse.quote(scope["path"])[:SHOWN]
    parts = [client[0] if client else "-", scope["method"], path, str(status)]
    if job is not None and job.first_at is not None:
        parts.append(f"ttft_s={job.first_at - begun:.3f}")
    parts.append(f"total_s={time.monotonic() - begun:.3f}")
    if job is not None:
        prompt_tokens = sum(map(len, job.generation.prompts))
        parts += [f"prompt_tokens={prompt_tokens}", f"new_tokens={job.new_tokens}"]
    return " ".join(parts)


def _name(host: str) -> str:
    """Returns the name or address of a Host header: "[::1]:8000" is "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
