"""The schedule of stages, and what the command makes of what was compiled."""

import itertools

import pytest

from experiments.schema import store
from experiments.studies import stages


@pytest.mark.parametrize(("count", "micro_batches"), [(2, 1), (2, 4), (4, 2), (8, 8)])
def test_every_stage_works_on_every_micro_batch_once(eight, count, micro_batches):
    found = eight(stages.schedule, stages=count, micro_batches=micro_batches, seconds=0)
    rows = 8 // micro_batches
    wanted = itertools.product(range(count), range(0, 8, rows))
    assert [tuple(pair) for pair in found["worked"]] == list(wanted)
    assert found["out"] == [row + count for row in range(8)]
    assert found["came"] == [[row + stage for row in range(8)] for stage in range(count)]


@pytest.mark.parametrize(
    ("axis", "kind", "size"),
    [
        ("stage", "collective-permute", 8 * 100),  # each of eight devices gets its own
        ("stage", "all-reduce", 8 * 100 * 1.5),  # eight rings of four
        ("model", "all-reduce", 100 * 2 * 31 / 32),  # one ring of 32, which enters a host once
    ],
)
def test_what_arrives_at_one_of_four_hosts(axis, kind, size):
    assert stages._arriving({"kind": kind, "bytes": 100}, axis, 4) == pytest.approx(size)


def test_what_was_compiled_is_not_compiled_again(tmp_path, monkeypatch, capsys):
    compiled = {
        "decode": {
            "collectives": [
                {"kind": "collective-permute", "count": 3, "bytes": 1000, "between": True},
                {"kind": "all-reduce", "count": 50, "bytes": 9000, "between": False},
            ]
        }
    }
    asked = []

    def compile_apart(load, *options):
        asked.append(load)
        return compiled, ""

    def request_of(load, mesh):
        if load.model > 8:
            raise ValueError(f"model={load.model} does not divide")

    monkeypatch.setattr(stages.fit, "compile_apart", compile_apart)
    monkeypatch.setattr(stages, "request_of", request_of)
    stages.main(["hosts", "--out", str(tmp_path)])
    assert len(asked) == 6
    row = store.read_record(tmp_path, "stage-2")
    assert row["messages"] == 3 and row["MB to a host"] == 0.008
    assert row["ms at 100 Gb/s"] == pytest.approx(0.00064)
    assert asked[0].batch == 16 and asked[0].micro_batches == 2
    assert "model-2: model=16 does not divide" in capsys.readouterr().out
    stages.main(["hosts", "--out", str(tmp_path)])
    assert len(asked) == 6
    assert (tmp_path / "hosts.md").read_text().count("\n") == 2 + 6


def test_a_compiler_that_fails_is_no_row_that_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "request_of", lambda load, mesh: None)
    monkeypatch.setattr(stages.fit, "compile_apart", lambda *given: (None, "no network"))
    with pytest.raises(ValueError, match="no network"):
        stages.main(["hosts", "--out", str(tmp_path)])
