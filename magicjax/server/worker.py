"""The thread that owns the engine, and its jobs: requests of the event loop.

The event loop puts commands into a queue; the thread runs them between two steps of the engine and
sleeps while there is nothing to do. What a step has produced returns to the event loop by
`call_soon_threadsafe`, into one queue per job that is bounded by the limit of its new tokens, so
slow readers do not stop the engine.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable

from magicjax.decoding.text import NewTokens, Result
from magicjax.engine.engine import Engine
from magicjax.engine.handle import Handle
from magicjax.engine.stats import EngineStats
from magicjax.server.errors import ApiError, refused, server_error
from magicjax.server.protocol import Generation

logger = logging.getLogger("magicjax.server")

POLL_S = 0.05  # while draining
WARM_UP_POLL_S = 5.0
STOP_S = 10.0  # for a step to end


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The engine after a step.

    Attributes:
      stats: its statistics.
      tokens: that the loop has emitted so far, those of unfinished requests included.
      rounds: rounds of the loop for these requests.
    """

    stats: EngineStats
    tokens: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Arrived:
    """New tokens of a choice, or its result."""

    index: int
    value: NewTokens | Result


class Job:
    """One HTTP request: a handle for each of its choices.

    Attributes:
      generation: the request.
      accepted: done when the engine has queued all choices.
      arrived: what `events` yields, or an error.
      num_choices: prompts times samples.
      missing: choices without a result; the event loop's.
      first_at: when the first token arrived, on `time.monotonic`; None before. The event loop's.
      new_tokens: that have arrived; the event loop's.
      handles: handles by index of the choice, the samples of the first prompt first; only the
        engine's thread uses them.
      unfinished: handles without a result; only that thread uses them.
    """

    def __init__(self, generation: Generation):
        self.generation = generation
        self.accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.arrived: asyncio.Queue[Arrived | ApiError] = asyncio.Queue()
        self.num_choices = self.missing = len(generation.prompts) * generation.n
        self.first_at: float | None = None
        self.new_tokens = 0
        self.handles: list[Handle] = []
        self.unfinished: dict[int, Handle] = {}

    async def events(self) -> AsyncIterator[Arrived]:
        """Yields what arrives until all choices have their results; raises ApiError."""
        missing = self.num_choices
        while missing:
            event = await self.arrived.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event.value, Result) and event.value.finish_reason == "error":
                if event.value.error_kind == "grammar":
                    message = "the grammar of the request exceeds the limits of its parser"
                    raise ApiError(400, message)
                raise server_error("the model's logits are NaN")
            missing -= isinstance(event.value, Result)
            yield event

    async def results(self) -> list[Result]:
        """Returns the results by index; raises ApiError."""
        results = {e.index: e.value async for e in self.events() if isinstance(e.value, Result)}
        return [results[index] for index in sorted(results)]


class Worker:
    """Runs an engine in a thread; all methods are called from one event loop or before it runs.

    Attributes:
      config: the engine's.
      snapshot: the newest state of the engine.
      error: what ended the thread, if it was an error: requests are then answered with 500, and the
        server exits.
      on_result: called in the event loop with the result of every request that was not cancelled.
    """

    def __init__(self, engine: Engine):
        """Starts the thread."""
        self.config = engine.config
        self.snapshot = Snapshot(engine.stats, 0, 0)
        self.error: Exception | None = None
        self._engine = engine
        self.on_result: Callable[[Result], None] = lambda _: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: set[Job] = set()  # the event loop's
        self._closed = False
        self._progress_s = time.monotonic()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The thread's:
        self._running: list[Job] = []
        self._stopped = False
        self._tokens = self._rounds = 0  # of the loop, of jobs that have ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def warm_up(self, waiting: Callable[[], None]) -> None:
        """Compiles all programs; raises what the engine raises.

        Args:
          waiting: called every `WARM_UP_POLL_S` seconds until then.
        """
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._commands.put(lambda: _resolve(done, self._engine.warm_up))
        while not concurrent.futures.wait([done], WARM_UP_POLL_S).done:
            waiting()
        done.result()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._closed

    def state(self, stall_s: float) -> str:
        """Returns "ok", "draining", "failed", or "stalled".

        The engine is stalled if requests wait and no step has ended for `stall_s` seconds.
        """
        if self.error is not None or not (self._thread.is_alive() or self._closed):
            return "failed"
        if self._jobs and time.monotonic() - self._progress_s > stall_s:
            return "stalled"
        return "draining" if self._closed else "ok"

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    async def submit(self, generation: Generation) -> Job:
        """Returns the job of a request that the engine has queued.

        Raises:
          ApiError: 400, 429, 503 while draining, or 500.
        """
        if self.error is not None:
            raise server_error("the engine has failed: the server is exiting")
        if self._closed:
            raise server_error("the server is shutting down", 503)
        self._loop = asyncio.get_running_loop()
        job = Job(generation)
        if not self._jobs:  # the thread has waited for it
            self._progress_s = time.monotonic()
        self._jobs.add(job)
        self._commands.put(lambda: self._submit(job))
        try:
            await asyncio.wrap_future(job.accepted)
        except ApiError:
            self._jobs.discard(job)
            raise
        except asyncio.CancelledError:  # the client has disconnected
            self.cancel(job)
            raise
        return job

    def cancel(self, job: Job) -> None:
        """Frees the slots of a job; does nothing if it has ended."""
        if job in self._jobs:
            self._jobs.discard(job)
            self._commands.put(lambda: self._cancel(job))

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits until all have ended, and cancels the rest with 503."""
        self._closed = True
        try:
            async with asyncio.timeout(seconds):
                while self._jobs:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            for job in list(self._jobs):
                job.arrived.put_nowait(server_error("the server is shutting down", 503))
                self.cancel(job)

    async def stop(self) -> None:
        """Ends the thread after its current step, for which it waits a bounded time."""
        self._closed = True
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, STOP_S)
        if self._thread.is_alive():  # the process ends without it
            logger.warning("the engine's step has not ended after %g s", STOP_S)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._run_commands()
                if self._running and not self._stopped:
                    self._engine.step()
                    self._publish()
                self._progress_s = time.monotonic()
        except Exception as error:
            logger.exception("the engine has failed: the server exits")
            self.error = error
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._fail)

    def _run_commands(self) -> None:
        """Runs the commands so far; waits for one if there are no jobs."""
        if not self._running:
            self._commands.get()()
        while not self._stopped:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _submit(self, job: Job) -> None:
        if not job.accepted.set_running_or_notify_cancel():
            return
        generation = job.generation
        try:
            for prompt in generation.prompts:
                job.handles += self._engine.submit_samples(prompt, generation.n, generation.params)
        except Exception as error:
            for handle in job.handles:
                handle.cancel()
            if not isinstance(error, ValueError | TypeError):
                logger.exception("a request failed")
            job.accepted.set_exception(refused(error, generation.fields))
            return
        job.unfinished = dict(enumerate(job.handles))
        self._running.append(job)
        job.accepted.set_result(None)

    def _cancel(self, job: Job) -> None:
        if job in self._running:
            for handle in job.handles:
                handle.cancel()
            self._forget(job)
            self._publish()

    def _forget(self, job: Job) -> None:
        self._running.remove(job)
        self._tokens, self._rounds = self._totals([job])

    def _totals(self, jobs: list[Job]) -> tuple[int, int]:
        """Returns the tokens and rounds of the jobs that have ended and of some others."""
        handles = [handle for job in jobs for handle in job.handles]
        tokens = sum(max(0, handle.text.emitted - 1) for handle in handles)  # without prefill's
        return self._tokens + tokens, self._rounds + sum(handle.rounds for handle in handles)

    def _publish(self) -> None:
        """Hands what has arrived, and the newest state, to the event loop."""
        events: list[tuple[Job, Arrived]] = []
        for job in list(self._running):
            for index, handle in list(job.unfinished.items()):
                events += [(job, Arrived(index, new)) for new in handle.arrived()]
                if handle.finished:
                    events.append((job, Arrived(index, handle.result())))
                    del job.unfinished[index]
            if not job.unfinished:
                self._forget(job)
        snapshot = Snapshot(self._engine.stats, *self._totals(self._running))
        assert self._loop is not None  # of the first job
        self._loop.call_soon_threadsafe(self._receive, events, snapshot)

    def _stop(self) -> None:
        self._stopped = True

    # In the event loop again:

    def _receive(self, events: list[tuple[Job, Arrived]], snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        for job, event in events:
            job.arrived.put_nowait(event)
            if isinstance(event.value, Result):
                self.on_result(event.value)
                job.missing -= 1
                if not job.missing:
                    self._jobs.discard(job)
                continue
            job.new_tokens += len(event.value.tokens)
            if job.first_at is None and job.new_tokens:
                job.first_at = time.monotonic()

    def _fail(self) -> None:
        """Answers all jobs with 500."""
        error = server_error("the engine has failed: the server is exiting")
        for job in self._jobs:
            if job.accepted.done():
                job.arrived.put_nowait(error)
            else:
                job.accepted.set_exception(error)
        self._jobs.clear()


def _resolve(future: concurrent.futures.Future[None], function: Callable[[], None]) -> None:
    """Sets a future to what a function returns or raises."""
    try:
        function()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
