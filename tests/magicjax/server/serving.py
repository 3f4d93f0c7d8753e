"""A server of a tiny model on a free loopback port, and clients for it."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai

import magicjax
from magicjax.server.app import create_app
from magicjax.server.config import ServerConfig
from magicjax.server.protocol import Served
from magicjax.server.run import Server, bind
from magicjax.server.worker import Worker

NAME = "tiny"
NEW = 24
SLOTS, QUEUE = 3, 4
SECONDS = 60  # until something that is certain to happen has happened
OPTIONS = dict(max_body_bytes=2**20, body_s=SECONDS, max_requests_per_client=100, stall_s=SECONDS)
OPTIONS |= dict(drain_s=5.0, keep_alive_s=SECONDS, max_connections=100)
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and loop.first %}{{ raise_exception('who asked?') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}"
    "{% endfor %}[assistant]{% if enable_thinking %}<think>{% endif %}"
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
)


def target_of(directory) -> magicjax.Model:
    """Returns the tiny model, with a chat template."""
    target = magicjax.load(directory, dtype="float32")
    target.tokenizer.chat_template = TEMPLATE
    return target


def make_engine(target: magicjax.Model, **options) -> magicjax.Engine:
    defaults = dict(slots=SLOTS, capacity=256, max_tokens=128, queue_limit=QUEUE)
    defaults |= dict(sampling=True, logprobs=3, rounds_per_step=2, grammars=True)
    defaults |= dict(logits_processors=True)
    config = magicjax.EngineConfig(**defaults | options)
    return magicjax.Engine(target, magicjax.PromptLookup(), magicjax.chain(4), config)


@dataclasses.dataclass
class Running:
    """A server that runs in a thread."""

    engine: magicjax.Engine
    worker: Worker
    server: Server
    thread: threading.Thread
    url: str

    def client(self, **options) -> openai.OpenAI:
        defaults = dict(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return openai.OpenAI(**defaults | options)

    def post(self, path: str, **options) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", timeout=SECONDS, **options)

    def end(self) -> None:
        self.server.draining = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(engine: magicjax.Engine, **options) -> Iterator[Running]:
    """Runs a server of an engine; ends it, and the engine's requests."""
    served, worker = Served(NAME, engine._setup.row.target, engine.config), Worker(engine)
    server_config = ServerConfig(**OPTIONS | options)
    app = create_app(served, worker, server_config)
    server = Server(app, worker, server_config)
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        until(lambda: server.started)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        made = Running(engine, worker, server, thread, url)
        try:
            yield made
        finally:
            made.end()
            for handle in [*engine.unfinished]:
                handle.cancel()


def until(happened: Callable[[], object]) -> None:
    """Waits until something is the case."""
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@contextlib.contextmanager
def paused(worker: Worker) -> Iterator[None]:
    """Holds the engine's thread between two steps."""
    holding, released = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        released.wait(SECONDS)

    worker._commands.put(hold)
    assert holding.wait(SECONDS)
    try:
        yield
    finally:
        released.set()


@contextlib.contextmanager
def slow(engine: magicjax.Engine, seconds: float = 0.05) -> Iterator[None]:
    """Lets every step of the engine take longer."""
    step = engine.step

    def slow_step() -> None:
        time.sleep(seconds)
        step()

    engine.step = slow_step
    try:
        yield
    finally:
        engine.step = step
