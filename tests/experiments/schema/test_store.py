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


def test_a_record_has_null_for_nan(tmp_path):
    record = {"row": {"status": "ok", "tau": 2.5, "agreement": float("nan")}}
    store.write_record(tmp_path, "good", record)
    assert store.read_record(tmp_path, "good")["row"] == {
        "status": "ok",
        "tau": 2.5,
        "agreement": None,
    }
    assert store.read_record(tmp_path, "never") is None


@pytest.mark.parametrize("moment", ["write_bytes", "replace"])
def test_an_interrupted_write_leaves_the_old_file_only(tmp_path, monkeypatch, moment):
    store.write_record(tmp_path, "cell", {"row": {"status": "ok"}, "n": 1})
    real = pathlib.Path.write_bytes

    def interrupted(self, *arguments):
        if moment == "write_bytes":
            real(self, b'{"half')
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write_record(tmp_path, "cell", {"row": {"status": "ok"}, "n": 2})
    assert [p.name for p in (tmp_path / "cells").iterdir()] == ["cell.json"]
    assert json.loads((tmp_path / "cells" / "cell.json").read_text())["n"] == 1
