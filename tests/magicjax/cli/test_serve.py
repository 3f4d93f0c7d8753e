"""`magicjax serve`: refused before weights are loaded, and in a process that signals end."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from magicjax import loading
from magicjax.cli import main
from magicjax.cli.serve import API_KEY, engine_config
from magicjax.decoding import program_cache
from magicjax.server import run as server_run
from magicjax.server import worker
from tests.magicjax import tiny

SECONDS = 120  # until a server in a process has compiled its programs
REFUSED = {
    "auto": (["--drafter", "auto"], "--drafter auto measures a single prompt"),
    "a tree without a drafter": (
        ["--tree", "chain:4", "--drafter", "none"],
        "--tree has no effect with --drafter none",
    ),
    "none and a drafter": (
        ["--drafter", "none", "--drafter", "prompt-lookup"],
        "--drafter none with another drafter: remove one of them",
    ),
    "adaptive without a drafter": (
        ["--no-adaptive", "--drafter", "none"],
        "--no-adaptive has no effect with --drafter none: remove it",
    ),
    "adaptive mss": (
        ["--verifier", "mss"],
        "--verifier mss gives a seed a text that depends on what drafts: add --no-adaptive",
    ),
    "greedy": (["--verifier", "greedy"], "--verifier greedy does not sample: use --greedy"),
    "a draw": (
        ["--greedy", "--drafter", "self:streaming:16:draw=with_replacement"],
        "draw has no effect in greedy decoding, with --greedy: remove it from self:streaming:16",
    ),
    "devices": (["--mesh", "model=64"], "64"),
    "port": (["--port", 65536], "--port 65536: it must be an integer from 0 to 65535"),
    "hosts": (["--allowed-hosts", "a,,b"], "'a,,b' has an empty name: separate names by commas"),
    "seconds": (["--body-s", 0], "--body-s 0.0: it must be a number above 0"),
    "connections": (
        ["--max-connections", 0],
        "--max-connections 0: it must be an integer of at least 1",
    ),
    "origins": (["--cors-origins", "app.example"], "--cors-origins app.example: an origin has a"),
    "two keys": (["--api-key", "a", "--api-key-file", "b"], "--api-key-file exclude each other"),
    "a missing file": (["--api-key-file", "missing"], "No such file or directory: 'missing'"),
    "an empty file": (
        ["--api-key-file", os.devnull],
        "--api-key-file /dev/null: the file is empty",
    ),
    "a key with spaces": (["--api-key", " a"], "the API key has spaces at its ends or letters"),
    "key": (["--api-key", " "], "the API key is empty: unset MAGICJAX_API_KEY and omit --api-key"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_options_exit_with_code_2_and_the_reason(name, directory, run, monkeypatch):
    monkeypatch.setattr(loading, "with_weights", None)
    arguments, message = REFUSED[name]
    code, _, errors = run("serve", "--target", directory, *arguments)
    assert code == 2 and message in errors and errors.count("\n") == 1


@pytest.mark.parametrize("package", ["llguidance", "uvicorn"])
def test_a_missing_package_is_an_error_before_weights_are_loaded(
    package, directory, run, monkeypatch
):
    monkeypatch.setattr(loading, "with_weights", None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "magicjax.server.run")  # imports it
    code, _, errors = run("serve", "--target", directory)
    assert code == 2 and errors.count("\n") == 1
    assert f'magicjax serve requires {package}: pip install "magicjax[serve]"' in errors


def test_a_port_in_use_is_an_error_before_weights_are_loaded(directory, run, monkeypatch):
    monkeypatch.setattr(loading, "with_weights", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, errors = run("serve", "--target", directory, "--port", port)
    assert code == 2 and f"--port {port}: Address already in use" in errors


def test_the_start_says_what_takes_how_long(directory, run, monkeypatch):
    def stop(app, engine_worker, *_):
        asyncio.run(engine_worker.stop())
        return 0

    monkeypatch.setattr(server_run, "run", stop)
    monkeypatch.setattr(worker, "WARM_UP_POLL_S", 0.01)
    program_cache.clear()
    plain = "--drafter", "none", "--greedy", "--slots", 1
    options = *plain, "--dtype", "float32", "--capacity", 64, "--port", 0
    code, _, errors = run("serve", "--target", directory, *options)
    loading, loaded, *progress, warm, ready = errors.splitlines()
    assert code == 0 and loading == "loading the weights of tiny"
    found = re.fullmatch(
        r"loading took \d+\.\d s; compiling (\d+) programs: seconds to minutes", loaded
    )
    assert found
    total = int(found[1])
    steps = [re.fullmatch(r"compiled (\d+) of (\d+) programs \(\d+ s\)", each) for each in progress]
    assert all(step and int(step[2]) == total for step in steps)
    counts = [int(step[1]) for step in steps]
    assert counts[0] < counts[-1] <= total and counts == sorted({*counts})
    found = re.fullmatch(r"warm-up took (\d+\.\d) s, (\d+\.\d) s of it to compile (\d+) .*", warm)
    assert found and float(found[1]) >= float(found[2]) > 0 and int(found[3]) == total
    assert ready.startswith("serving tiny at http://127.0.0.1:")


def test_new_tokens_are_limited_by_the_capacity_alone():
    def limit(*options: str) -> int:
        words = ["serve", "--target", "x", *options]
        arguments = main.parser(words).parse_args(words)
        target = tiny.model()
        return engine_config(arguments, target, adaptive=False).for_target(target, None).max_tokens

    assert limit("--capacity", "200") == 199
    assert limit() == limit("--max-tokens", "999k") == tiny.model().config.max_positions - 1
    assert limit("--capacity", "200", "--max-tokens", "50") == 50


class Serving:
    """`magicjax serve` in a process, on a free port."""

    def __init__(self, *arguments, **environment):
        command = [sys.executable, "-m", "magicjax", "serve", "--port", "0", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {API_KEY: "another"} | environment,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        end = time.monotonic() + SECONDS
        while not (found := re.search(r"http://[\d.:]+", "".join(self.lines))):
            assert self.process.poll() is None and time.monotonic() < end, "".join(self.lines)
            time.sleep(0.05)
        self.url = found[0]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="secret", timeout=SECONDS)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)

    def stream(self, **options):
        defaults = dict(model="tiny", prompt="a secret text", stream=True)
        return self.client.completions.create(**defaults | options)


@pytest.fixture
def serving(directory, tmp_path):
    options = ("--capacity", 400, "--max-tokens", 300, "--rounds-per-step", 1, "--slots", 2)
    key = tmp_path / "key"
    key.write_text("secret\n")
    options += ("--api-key-file", key)
    made = Serving("--target", directory, "--dtype", "float32", *options)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_its_requests(serving, number):
    ready = (
        "with 2 slots of 400 tokens in float32, drafter prompt-lookup:4; memory: target's weights"
    )
    assert ready in "".join(serving.lines)
    stream = serving.stream(max_tokens=300, n=16)
    next(stream)
    serving.process.send_signal(number)
    while httpx.get(f"{serving.url}/health").status_code != 503:
        time.sleep(0.01)
    with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
        serving.client.with_options(max_retries=0).completions.create(model="tiny", prompt="x")
    assert refused.value.status_code == 503
    reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert sum(reason in ("length", "stop") for reason in reasons) == 16
    assert serving.process.wait(SECONDS) == 0
    log = "".join(serving.lines)
    assert "secret" not in log and " 503 total_s=" in log and " 200 ttft_s=" in log


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(serving):
    stream = serving.stream(max_tokens=300, n=128)  # takes long in two slots
    next(stream)
    serving.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{serving.url}/health").status_code != 503:
        time.sleep(0.01)
    assert serving.process.poll() is None
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(SECONDS) == -signal.SIGTERM


@pytest.mark.slow
def test_the_server_answers_only_with_the_key(serving):
    assert httpx.get(f"{serving.url}/v1/models").status_code == 401
    assert [model.id for model in serving.client.models.list()] == ["tiny"]
