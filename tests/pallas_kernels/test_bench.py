"""The benchmark command and its bandwidth measurement: they run, and report the right rates."""

import json

import pytest

from pallas_kernels.benchmarks import bench
from pallas_kernels.benchmarks.bandwidth import (
    copy_bandwidth,
    copy_bandwidths,
    read_bandwidth,
    read_bandwidths,
)

TINY = "--batch 1 --context 64 --kv-heads 1 --head-dim 8 --layers 1 --repeats 1".split()


@pytest.fixture
def small_read(monkeypatch):
    monkeypatch.setattr(bench, "read_bandwidths", lambda repeats: {"sum": 4e9, "maximum": 2e9})
    monkeypatch.setattr(bench, "copy_bandwidths", lambda repeats: {"copy": 8e9, "negation": 1e9})


def test_bandwidth_is_that_of_the_fastest_kernel():
    kernels = read_bandwidths(2**22, repeats=1)
    assert all(1e6 < rate < 1e14 for rate in kernels.values())
    assert read_bandwidth(2**22, repeats=1) > 0 and copy_bandwidth(2**22, repeats=1) > 0
    assert all(1e6 < rate < 1e14 for rate in copy_bandwidths(2**22, repeats=1).values())
    with pytest.raises(ValueError, match=r"size=64 bytes is too small.*at least"):
        read_bandwidth(64)


def test_writes_a_row_for_each_node_count_and_backend(tmp_path, capsys, small_read):
    path = tmp_path / "attention.json"
    assert bench.main([*TINY, "--nodes", "1,3", "--fill", "0.5", "--out", str(path)]) == 0
    result = json.loads(path.read_text())
    rows = [(row["nodes"], row["backend"]) for row in result["rows"]]
    assert rows == [(1, "reference"), (1, "xla"), (3, "reference"), (3, "xla")]
    for row in result["rows"]:
        # Keys and values of half the slots and of the new tokens, 8 numbers of 4 bytes each.
        size = 2 * (32 + row["nodes"]) * 8 * 4
        assert row["GB/s"] == pytest.approx(1e-3 * size / row["us/layer"])
        assert row["% of read"] == pytest.approx(100 * row["GB/s"] / 4)
        assert row["% of copy"] == pytest.approx(100 * row["GB/s"] / 8)
    assert result["settings"]["context"] == 64
    assert list(tmp_path.iterdir()) == [path]
    assert len(capsys.readouterr().out.splitlines()) == 4 + len(rows)
