import json
import pathlib
import re
from typing import ClassVar

import numpy as np
import pytest

from experiments.schema import config, grid
from experiments.studies.peers import __main__ as peers
from experiments.studies.peers.process import run_peer

ONE_ROW = ["HF prompt lookup, 4 tokens", "HF assisted, its settings", "HF assisted, 4 tokens"]
CONFIG = """
results: {0}
new_tokens: 16
repeats: 2
context: 8
methods:
- {{drafter: self, tree: chain:3}}
- {{drafter: small:experiments/zoo/draft-1, tree: chain:3}}
"""


class ScriptedPeer:
    """Answers with the scripted bench's plain tokens; decoding takes 1 s per token."""

    made: ClassVar[list["ScriptedPeer"]] = []

    def __init__(self, folder, module):
        self.folder, self.module, self.requests = folder, module, []
        self.versions, self.is_closed = {module: "1"}, False
        self.made.append(self)

    def request(self, function, prompts=(), new_tokens=0, **arguments):
        self.requests.append(arguments)
        if function == "convert":
            pathlib.Path(arguments["out"]).touch()
            return {}
        return {
            "tokens": [list(range(new_tokens))] * len(prompts),
            "stamps": [(4.0 + n, n) for n in range(1, new_tokens + 1)],
        }

    def close(self):
        self.is_closed = True


@pytest.fixture
def main(tmp_path, scripted, monkeypatch):
    """Runs the command on a config that ends with the given lines; returns (rows, bench)."""

    def run(lines, *options):
        path = tmp_path / "mine.yaml"
        path.write_text(CONFIG.format(tmp_path) + lines)
        bench = scripted()
        monkeypatch.setattr(peers, "Bench", lambda: bench)
        monkeypatch.setattr(peers, "Peer", ScriptedPeer)
        monkeypatch.setattr(ScriptedPeer, "made", [])
        assert peers.main([*options, str(path)]) == 0
        return json.loads((tmp_path / "mine" / "peers.json").read_text())["rows"], bench

    return run


def test_the_rate_of_a_peer_excludes_prefill(monkeypatch):
    peer = ScriptedPeer(pathlib.Path("environments"), "huggingface")
    stamps = [(4.0, 1), (5.0, 3), (6.0, 5)]
    answer = {"tokens": [[1, 2, 3]] * 2, "stamps": stamps}
    monkeypatch.setattr(peer, "request", lambda function, **arguments: answer)
    run = run_peer(peer, [[0] * 8] * 2, 5, "float32", cache="static")
    assert run.tokens_per_s == 2 * 4 / 2.0  # two rows, tokens 2 to 5, in two seconds
    assert run.prefill_s == 4.0
    np.testing.assert_array_equal(run.tokens, [[1, 2, 3]] * 2)


def test_runs_are_interleaved_and_speculation_of_peers_is_for_one_row(main, capsys):
    rows, bench = main("grid: {batch: [1, 2]}")
    assert [cell.draft for cell in bench.ran] == ["none", "self", "small"] * 6
    both = ["HF static cache", "HF dynamic cache"]
    assert [r["method"] for r in rows if r["batch"] == 1][3:] == both + ONE_ROW
    assert [r["method"] for r in rows if r["batch"] == 2][3:] == both
    found = {(r["tok_s"], r["equal"]) for r in rows if r["method"].startswith("HF")}
    assert found == {(1.0, 1.0), (2.0, 1.0)}
    assert {r["tok_s"] for r in rows if r["method"] == "magicjax plain"} == {15.0, 30.0}
    assert "0.07×" in capsys.readouterr().out


def test_a_different_row_is_counted_and_located(main, monkeypatch):
    def request(self, function, prompts, new_tokens, **arguments):
        answer = original(self, function, prompts, new_tokens, **arguments)
        return answer | {"tokens": [[*range(15), 63]] * len(prompts)}

    original = ScriptedPeer.request
    monkeypatch.setattr(ScriptedPeer, "request", request)
    rows, _ = main("grid: {prompt_seed: [0, 1]}")
    assert [r["equal"] for r in rows] == [1.0] * 3 + [0.0] * 5
    assert "new token 15: 63 instead of 15" in rows[-1]["divergences"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--temperature 1", "temperature is not"),
        ("--target a.gguf --target_weights int8", "target_weights=int8 is not supported here"),
        ("--environments no-such-folder", "no-such-folder/huggingface/bin/python does not exist"),
        ("--peer llama", "llama cannot decode"),
    ],
)
def test_invalid_options_are_refused_with_the_remedy(options, message, capsys):
    assert peers.main(["experiments/configs/ablation_batch_context.yaml", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_peers_read_the_values_of_the_target_or_its_stored_weights(main, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "hf_calls", lambda *_: {})
    monkeypatch.setattr(peers.Source, "checkpoint_directory", tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    lines = "target: smollm2\nprompts: docs\ngrid: {target_weights: [none, '']}"
    rows, _ = main(lines, "--environments", str(tmp_path))
    found = {(r["method"], r["weights"]) for r in rows if not r["method"].startswith("magicjax")}
    ways = ["plain", "prompt lookup, 4 tokens"]
    names = [f"{peer} {how}" for peer in peers.READERS.values() for how in ways]
    unquantized = {name: "float16" if "OpenVINO" in name else "float32" for name in names}
    assert found == {*unquantized.items(), *((name, "Q4_1") for name in names)}
    requests = [r for peer in ScriptedPeer.made for r in peer.requests if "out" not in r]
    names = {re.sub("-[0-9a-f]{8}[.]", ".", pathlib.Path(r["file"]).name) for r in requests}
    stored = "SmolLM2-135M-Instruct.Q4_1"
    assert names == {f"{stored}{end}.gguf" for end in ("", ".float32", ".float16")}


def test_only_the_named_peers_run(main, tmp_path, monkeypatch):
    monkeypatch.setattr(peers.Source, "checkpoint_directory", tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    options = ("--environments", str(tmp_path), "--peer", "genai")
    for converts in (True, False):  # the file stays
        rows, _ = main("target: smollm2\ntarget_weights: none", *options)
        found = [(peer.module, peer.is_closed) for peer in ScriptedPeer.made]
        assert found == [("genai", False)] + [("llama", True)] * converts
        methods = [r["method"] for r in rows if not r["method"].startswith("magicjax")]
        assert methods == ["OpenVINO GenAI plain", "OpenVINO GenAI prompt lookup, 4 tokens"]
        content = json.loads((tmp_path / "mine" / "peers.json").read_text())
        assert content["peers"] == ["genai"]


def test_peers_draft_with_the_file_of_the_small_model(tmp_path, monkeypatch):
    directory = property(lambda source: tmp_path / source.text)
    monkeypatch.setattr(peers.Source, "checkpoint_directory", directory)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "target: qwen2.5-coder-1.5b\n"
        "methods: [{drafter: 'small:qwen2.5-coder-0.5b', tree: chain:4}]"
    )
    (group,) = grid.groups(config.from_command_line([str(path)], "peers"))
    peer = ScriptedPeer(tmp_path, "llama")
    calls = peers.reader_calls({"llama": peer}, group, [[0] * 8], tmp_path)
    calls["llama.cpp draft model, 4 tokens"]()
    (request,) = peer.requests
    assert request["drafted_tokens"] == 4
    files = [pathlib.Path(request[name]).parent.name for name in ("file", "draft")]
    assert files == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]


def test_the_table_divides_by_plain_decoding():
    common = {"batch": 4, "context": 8192, "prompts": "stdlib", "weights": "float32"}
    common |= {"target_weights": "", "prefill_s": 1.0, "equal": 1.0, "ties": 0}
    rows = [
        common | {"method": "magicjax plain", "tok_s": 300.0},
        common | {"method": "HF static cache", "tok_s": 200.0},
    ]
    lines = peers.table(rows).splitlines()[2:]
    assert [line.split("|")[7].strip() for line in lines] == ["1.00×", "0.67×"]
