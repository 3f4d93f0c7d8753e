import csv
import json
import pathlib

import pytest

from experiments.schema import store
from experiments.schema.columns import COLUMNS

ISSUED = (  # scripts rely on these columns
    "target, draft, policy, budget, tree, gamma, nodes, dtype, device, batch, context, "
    "new_tokens, repeat, status, error, tau, acceptance_rate, decode_tok_s, ar_decode_tok_s, "
    "speedup, exact_match, prefill_s, decode_s, compile_s, kv_mb_target, kv_mb_draft"
).split(", ")


def test_the_summary_opens_with_the_agreed_columns(tmp_path):
    rows = [{"target": "a, b", "tau": 2.5, "agreement": None, "speedup": float("nan")}]
    path = store.write_summary(tmp_path, rows, COLUMNS)
    with path.open() as file:
        reader = csv.DictReader(file)
        (row,) = reader
    assert reader.fieldnames[: len(ISSUED)] == ISSUED
    assert (row["target"], row["tau"], row["agreement"], row["speedup"]) == ("a, b", "2.5", "", "")


def test_a_file_has_null_for_nan(tmp_path):
    path = tmp_path / "metrics.json"
    assert store.read_json(path) is None
    store.write_json(path, {"row": {"tau": 2.5, "agreement": float("nan")}})
    assert store.read_json(path) == {"row": {"tau": 2.5, "agreement": None}}


@pytest.mark.parametrize("moment", ["write_bytes", "replace"])
def test_an_interrupted_write_leaves_the_old_file_only(tmp_path, monkeypatch, moment):
    store.write_json(tmp_path / "cell.json", {"n": 1})
    real = pathlib.Path.write_bytes

    def interrupted(self, *arguments):
        if moment == "write_bytes":
            real(self, b'{"half')
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write_json(tmp_path / "cell.json", {"n": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["cell.json"]
    assert json.loads((tmp_path / "cell.json").read_text())["n"] == 1
