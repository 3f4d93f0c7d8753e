"""The schedule of stages, and the traffic read from compiled programs."""

import itertools

import pytest

from experiments.schema import store
from experiments.studies import stages


@pytest.mark.parametrize(("count", "micro_batches"), [(2, 1), (2, 4), (4, 2), (8, 8)])
def test_every_stage_works_on_every_micro_batch_once(eight, count, micro_batches):
    result = eight(stages.schedule, stages=count, micro_batches=micro_batches, seconds=0)
    rows = 8 // micro_batches
    expected = itertools.product(range(count), range(0, 8, rows))
    assert [tuple(pair) for pair in result["work"]] == list(expected)
    assert result["out"] == [row + count for row in range(8)]
    assert result["inputs"] == [[row + stage for row in range(8)] for stage in range(count)]


@pytest.mark.parametrize(
    ("axis", "kind", "size"),
    [
        ("stage", "collective-permute", 8 * 100),  # each of eight devices receives its part
        ("stage", "all-reduce", 8 * 100 * 1.5),  # eight rings of four
        ("model", "all-reduce", 100 * 2 * 31 / 32),  # one ring of 32 enters a host once
    ],
)
def test_the_bytes_that_one_of_four_hosts_receives(axis, kind, size):
    assert stages._received({"kind": kind, "bytes": 100}, axis, 4) == pytest.approx(size)


def test_stored_rows_are_not_compiled_again(tmp_path, monkeypatch, capsys):
    compiled = {
        "decode": {
            "collectives": [
                {"kind": "collective-permute", "count": 3, "bytes": 1000, "between": True},
                {"kind": "all-reduce", "count": 50, "bytes": 9000, "between": False},
            ]
        }
    }
    loads = []

    def compile_apart(load, *options):
        loads.append(load)
        return compiled, ""

    def abstract_request(load, mesh):
        if load.model > 8:
            raise ValueError(f"model={load.model} does not divide")

    monkeypatch.setattr(stages.fit, "compile_apart", compile_apart)
    monkeypatch.setattr(stages, "abstract_request", abstract_request)
    stages.main(["hosts", "--out", str(tmp_path)])
    assert len(loads) == 6
    row = store.read_record(tmp_path, "stage-2")
    assert row["messages"] == 3 and row["MB to a host"] == 0.008
    assert row["ms at 100 Gb/s"] == pytest.approx(0.00064)
    assert loads[0].batch == 16 and loads[0].micro_batches == 2
    assert "model-2: model=16 does not divide" in capsys.readouterr().out
    stages.main(["hosts", "--out", str(tmp_path)])
    assert len(loads) == 6
    assert (tmp_path / "hosts.md").read_text().count("\n") == 2 + 6


def test_a_failed_compilation_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "abstract_request", lambda load, mesh: None)
    monkeypatch.setattr(stages.fit, "compile_apart", lambda *arguments: (None, "no network"))
    with pytest.raises(ValueError, match="no network"):
        stages.main(["hosts", "--out", str(tmp_path)])
