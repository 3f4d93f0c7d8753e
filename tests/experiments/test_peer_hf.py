import importlib.util
import json
import sys

import numpy as np
import pytest

from experiments.schema import config, grid
from experiments.studies import hf_baseline

CELL = grid.groups(config.Experiment(batch=2, context=8))[0][0]


class ScriptedPeer:
    def __init__(self, notes):
        self.notes = notes

    def ask(self, do, **arguments):
        self.asked = do, arguments
        return {"tokens": [[1, 2, 3]] * 2, "notes": self.notes, "total_s": 9.0}


def test_the_peers_rate_leaves_out_its_prefill():
    peer = ScriptedPeer([(4.0, 1), (5.0, 3), (6.0, 5)])
    setting = hf_baseline.SETTINGS[0]
    run = hf_baseline.theirs(peer, setting, CELL, [[0] * 8] * 2, assistant="")
    assert run.tokens_per_s == 2 * 4 / 2.0  # two rows, tokens 2 to 5, in two seconds
    assert run.prefill_s == 4.0
    np.testing.assert_array_equal(run.tokens, [[1, 2, 3]] * 2)
    assert peer.asked[1]["assistant"] == ""


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
def test_a_python_without_torch_is_named_as_the_reason():
    with pytest.raises(RuntimeError, match="it needs torch and transformers"):
        hf_baseline.Peer(sys.executable, threads=1)


class EchoingPeer:
    """Answers with plain decoding's tokens as the scripted bench makes them, at 1 s a token."""

    def __init__(self, python, threads):
        self.versions = {"torch": "2", "transformers": "5"}

    def ask(self, do, prompts, new_tokens, **arguments):
        return {
            "tokens": [list(range(new_tokens))] * len(prompts),
            "notes": [(4.0 + n, n) for n in range(1, new_tokens + 1)],
        }

    def close(self):
        pass


def test_both_sides_take_turns_and_assistants_only_where_they_can(
    tmp_path, scripted, monkeypatch, capsys
):
    path = tmp_path / "peer.yaml"
    path.write_text(
        f"results: {tmp_path}\nnew_tokens: 16\nrepeats: 2\n"
        "context: 8\ngrid: {batch: [1, 2]}\n"
        "methods: [{draft: self, tree: chain:3}, {draft: small, model: d, tree: chain:3}]\n"
    )
    bench = scripted()
    monkeypatch.setattr(hf_baseline, "Bench", lambda: bench)
    monkeypatch.setattr(hf_baseline, "Peer", EchoingPeer)
    assert hf_baseline.main(["--peer-python", "python", str(path)]) == 0
    assert [cell.draft for cell in bench.ran] == ["none", "self", "small"] * 6
    rows = json.loads((tmp_path / "peer" / "peer.json").read_text())["rows"]
    theirs = ["HF static cache", "HF dynamic cache"]
    assisted = ["HF assisted, its settings", "HF assisted, 4 tokens"]
    assert [r["what"] for r in rows if r["batch"] == 1][3:] == theirs + assisted
    assert [r["what"] for r in rows if r["batch"] == 2][3:] == theirs
    assert {(r["tok_s"], r["equal"]) for r in rows if r["what"] in theirs + assisted} == {
        (1.0, 1.0),
        (2.0, 1.0),
    }
    assert {r["tok_s"] for r in rows if r["what"] == "ours plain"} == {16.0, 32.0}
    assert "16.00×" in capsys.readouterr().out


def test_the_table_measures_everything_by_the_peers_static_cache():
    common = {"batch": 4, "context": 8192, "prefill_s": 1.0, "equal": 1.0, "ties": 0}
    rows = [
        common | {"what": "ours plain", "tok_s": 300.0},
        common | {"what": "HF static cache", "tok_s": 200.0},
    ]
    over = hf_baseline.table(rows).columns[4]
    assert list(over.cells) == ["1.50×", "1.00×"]
