import importlib.util
import sys

import numpy as np
import pytest

from experiments import config, grid, peer_hf

CELL = grid.groups(config.validate({"shapes": [{"batch": 2, "context": 8}]}, "test"))[0][0]


class ScriptedPeer:
    def __init__(self, notes):
        self.notes = notes

    def ask(self, do, **arguments):
        self.asked = do, arguments
        return {"tokens": [[1, 2, 3]] * 2, "notes": self.notes, "total_s": 9.0}


def test_the_peers_rate_leaves_out_its_prefill():
    peer = ScriptedPeer([(4.0, 1), (5.0, 3), (6.0, 5)])
    setting = peer_hf.SETTINGS[0]
    run = peer_hf.theirs(peer, setting, CELL, [[0] * 8] * 2, assistant="")
    assert run.tokens_per_s == 2 * 4 / 2.0  # two rows, tokens 2 to 5, in two seconds
    assert run.prefill_s == 4.0
    np.testing.assert_array_equal(run.tokens, [[1, 2, 3]] * 2)
    assert peer.asked[1]["assistant"] == ""


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
def test_a_python_without_torch_is_named_as_the_reason():
    with pytest.raises(RuntimeError, match="it needs torch and transformers"):
        peer_hf.Peer(sys.executable, threads=1)


def test_the_table_measures_everything_by_the_peers_static_cache():
    common = {"batch": 4, "context": 8192, "prefill_s": 1.0, "equal": 1.0, "ties": 0}
    rows = [
        common | {"what": "ours plain", "tok_s": 300.0},
        common | {"what": "HF static cache", "tok_s": 200.0},
    ]
    over = peer_hf.table(rows).columns[4]
    assert list(over.cells) == ["1.50×", "1.00×"]
