"""Runs the server in the main thread until a signal ends it."""

import asyncio
import logging
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import LOGGING_CONFIG

from magicjax.server.config import ServerConfig
from magicjax.server.worker import Worker

logger = logging.getLogger("magicjax.server")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TO_STDERR = {"handlers": ["default"], "level": "INFO", "propagate": False}
LOGGERS = LOGGING_CONFIG["loggers"] | {"magicjax.server": TO_STDERR}
FLUSH_S = 5  # for clients to read the last answers
FAILED = 1  # exit code


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket with an address, which is not listening yet.

    Raises:
      OSError: the address is not available.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise OSError(f"host={host} and port={port}: {error.strerror}") from error
    return bound


class Server(uvicorn.Server):
    """A server that drains after the first signal; the second one ends the process at once.

    Attributes:
      draining: set it to end the server.
    """

    def __init__(self, app: Starlette, worker: Worker, config: ServerConfig):
        """Makes the server of an application and its engine."""
        uvicorn_config = uvicorn.Config(
            app,
            log_config=LOGGING_CONFIG | {"loggers": LOGGERS},
            access_log=False,  # the application has its own
            timeout_graceful_shutdown=FLUSH_S,
            timeout_keep_alive=config.keep_alive_s,
            limit_concurrency=config.max_connections + 1,  # the first number that is refused
            server_header=False,
        )
        super().__init__(uvicorn_config)
        self.draining = False
        self._worker, self._server_config = worker, config
        self._drain: asyncio.Future | None = None
        # By connection: its newest request, and since when this one has ended.
        self._idle: dict[Any, tuple[Any, float]] = {}

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.draining and self._drain is None:
            requests, limit = self._worker.num_jobs, self._server_config.drain_s
            if requests:
                logger.info(
                    "shutting down after %d running requests, or %g s; a second signal ends the "
                    "process at once",
                    requests,
                    limit,
                )
            self._drain = asyncio.ensure_future(self._worker.drain(limit))
        self._close_idle()
        drained = self._drain is not None and self._drain.done()
        self.should_exit = drained or self._worker.error is not None
        return await super().on_tick(counter)

    def _close_idle(self) -> None:
        """Closes connections on which no request has begun for long.

        uvicorn does so after an answer only, and not while a client sends parts of a header.
        """
        before, now, self._idle = self._idle, time.monotonic(), {}
        for connection in list(self.server_state.connections):
            newest: Any = getattr(connection, "cycle", None)
            if newest is not None and not newest.response_complete:
                continue
            request, since = before.get(connection, (newest, now))
            if request is not newest:
                since = now
            if now - since > self._server_config.keep_alive_s:
                connection.transport.close()
            else:
                self._idle[connection] = newest, since

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._worker.stop()


def run(app: Starlette, worker: Worker, bound: socket.socket, config: ServerConfig) -> int:
    """Serves until a signal arrives or the engine fails; returns the exit code."""
    Server(app, worker, config).run([bound])
    return 0 if worker.error is None else FAILED
