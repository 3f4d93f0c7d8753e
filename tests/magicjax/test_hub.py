"""Models of the Hugging Face Hub: needed files only, revisions, resumed downloads, errors."""

import hashlib
import http.server
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from magicjax import hub

MODEL = pathlib.Path("experiments/zoo/draft-1")
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
EXTRA = {"pytorch_model.bin": b"pickle", "original/model.safetensors": b"copy"}


class Stub(http.server.BaseHTTPRequestHandler):
    """Serves one model as the Hub does; `served` lists (file, first byte)."""

    protocol_version = "HTTP/1.1"
    served: ClassVar[list[tuple[str, int]]]
    breaks: ClassVar[set[str]]  # files of which the next answer ends in the middle

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[:2]), parts[2:]
        if name != "owner/tiny":
            return self.refuse("RepoNotFound")
        if rest[0] == "revision":
            if rest[1] not in {*COMMITS, *COMMITS.values()}:
                return self.refuse("RevisionNotFound")
            sha = COMMITS.get(rest[1], rest[1])
            return self.answer(json.dumps({"id": name, "sha": sha, "siblings": []}).encode())
        if rest[0] == "tree":
            files = [
                {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
                for path, data in self.files.items()
            ]
            return self.answer(json.dumps(files).encode())
        file = "/".join(rest[2:])
        return self.answer(self.files[file], rest[1], file)

    @property
    def files(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted(MODEL.iterdir())} | EXTRA

    def refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, data: bytes, commit: str = "", file: str = "") -> None:
        first = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(data) - first))
        self.send_header("Content-Type", "application/octet-stream" if file else "application/json")
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        if file:
            self.send_header("ETag", f'"{_oid(data)}"')
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file:
            self.served.append((file, first))
        if file in self.breaks:
            self.breaks.discard(file)
            self.wfile.write(data[first : len(data) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)  # closing it waits for its readers
            self.close_connection = True
            return
        self.wfile.write(data[first:])

    def log_message(self, *arguments):
        pass


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def stub():
    """The class of a running server's handler, with its address as `endpoint`."""

    class Running(Stub):
        served: ClassVar[list[tuple[str, int]]] = []
        breaks: ClassVar[set[str]] = set()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Running)
    Running.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Running
    server.shutdown()


def run(endpoint: str, cache: pathlib.Path, script: str) -> subprocess.CompletedProcess:
    """Runs Python in a process whose huggingface_hub reads from an endpoint."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_ETAG_TIMEOUT": "5",
    }
    command = [sys.executable, "-c", f"from magicjax import sources\n{script}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_model_is_downloaded_once_and_without_files_that_are_not_read(stub, tmp_path):
    stub.breaks.add("model.safetensors")
    script = """
from huggingface_hub import constants
import magicjax
from magicjax.loading import config_of
constants.DOWNLOAD_CHUNK_SIZE = 1024  # what it writes at once
assert config_of("owner/tiny").num_layers
assert not list(sources.directory_of("owner/tiny", weights=False).glob("*.safetensors"))
for _ in range(5):
    try:
        model = magicjax.load("owner/tiny@v2")
        break
    except OSError as error:
        print("again:", error)
print(model.name, sorted(p.name for p in sources.directory_of("owner/tiny@v2").iterdir()))
"""
    done = run(stub.endpoint, tmp_path, script)
    assert done.returncode == 0, done.stderr
    read = {p.name for p in MODEL.iterdir() if p.suffix in (".json", ".safetensors", ".jinja")}
    assert done.stdout.splitlines()[-1] == f"tiny@v2 {sorted(read)}"
    assert {file for file, _ in stub.served} == read
    starts = [first for file, first in stub.served if file == "model.safetensors"]
    assert starts[0] == 0 and max(starts) > 0  # continued
    before = list(stub.served)
    endpoint = "http://127.0.0.1:9"  # nothing answers
    assert run(endpoint, tmp_path, "sources.directory_of('owner/tiny@v2')").returncode == 0
    assert stub.served == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("owner/none", "owner/none is neither a directory nor a model on http://127.0.0.1"),
        ("owner/tiny@v9", "owner/tiny has no revision 'v9': use a branch, a tag or a commit"),
    ],
)
def test_what_the_hub_does_not_have_is_an_error(stub, tmp_path, source, message):
    done = run(stub.endpoint, tmp_path, f"sources.directory_of({source!r})")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_without_a_network_the_message_is_how_to_fetch_the_model(tmp_path):
    done = run("http://127.0.0.1:9", tmp_path, "sources.directory_of('experiments/zo')")
    error = done.stderr.splitlines()[-1]
    assert "127.0.0.1:9 cannot be reached: run `magicjax fetch experiments/zo` with" in error
    assert error.endswith("; did you mean 'zoo'?")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B", True),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", True),
        ("./a/b", False),
        ("../b", False),
        ("/a/b", False),
        ("a/b/c", False),
        ("opt-125m", False),
    ],
)
def test_the_form_of_an_id(source, expected):
    assert hub.is_id(source) == expected
