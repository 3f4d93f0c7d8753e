"""Runs the server in the main thread until a signal ends it."""

import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from magicjax.server.worker import Worker

SIGNALS = (signal.SIGINT, signal.SIGTERM)
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

    def __init__(self, app: Starlette, worker: Worker, drain_s: float):
        """The server of an application; running requests may take `drain_s` after a signal."""
        super().__init__(
            uvicorn.Config(app, timeout_graceful_shutdown=FLUSH_S, server_header=False)
        )
        self.draining = False
        self._worker, self._drain_s = worker, drain_s
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.draining and self._drain is None:
            self._drain = asyncio.create_task(self._worker.drain(self._drain_s))
        drained = self._drain is not None and self._drain.done()
        self.should_exit = drained or self._worker.error is not None
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._worker.stop()


def run(app: Starlette, worker: Worker, bound: socket.socket, drain_s: float) -> int:
    """Serves until a signal arrives or the engine fails; returns the exit code."""
    Server(app, worker, drain_s).run([bound])
    return 0 if worker.error is None else FAILED
