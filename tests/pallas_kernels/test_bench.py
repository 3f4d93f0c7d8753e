"""The benchmark command and its bandwidth measurement: they run, and report the right rates."""

import json
import types

import jax.numpy as jnp
import pytest

from pallas_kernels import choose_backend
from pallas_kernels.benchmarks import bench, shapes
from pallas_kernels.benchmarks.bandwidth import (
    copy_bandwidth,
    copy_bandwidths,
    read_bandwidth,
    read_bandwidths,
)
from pallas_kernels.benchmarks.timing import fastest_seconds

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


def test_functions_run_once_uncounted_and_then_interleaved():
    order = []
    functions = {name: lambda name=name: order.append(name) or jnp.zeros(()) for name in "ab"}
    assert set(fastest_seconds(functions, repeats=2, calls=2)) == {"a", "b"}
    assert "".join(order) == "ab" + 2 * "aabb"


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


def test_a_baseline_is_timed_or_skipped_with_a_reason(tmp_path, capsys, small_read):
    path = tmp_path / "attention.json"
    arguments = ["--nodes", "3", "--backends", "xla", "--baselines", "jax.nn xla,jax.nn cudnn"]
    assert bench.main([*TINY, *arguments, "--out", str(path)]) == 0
    ours, xla, cudnn = json.loads(path.read_text())["rows"]
    assert [row["backend"] for row in (ours, xla, cudnn)] == ["xla", "jax.nn xla", "jax.nn cudnn"]
    assert xla["us/layer"] > 0 and ours["us/layer"] > 0
    assert cudnn["skipped"] == "needs an NVIDIA GPU with cuDNN" and "us/layer" not in cudnn
    assert "needs an NVIDIA GPU with cuDNN" in capsys.readouterr().out


def test_the_best_backend_supports_the_device():
    cpu = types.SimpleNamespace(device_kind="cpu")
    hopper = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
    assert bench.best_backend(jnp.dtype("bfloat16"), 128, hopper) == "mosaic"
    assert bench.best_backend(jnp.dtype("float32"), 128, hopper) == "xla"
    assert bench.best_backend(jnp.dtype("bfloat16"), 128, cpu) == choose_backend()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1,0"], "0 must be at least 1"),
        (["--nodes", "1,x"], "'x'"),
        (["--fill", "1.5"], "1.5 must be above 0"),
        (["--backends", "fast"], "'fast' is unknown"),
        (["--baselines", "flash"], "'flash' is unknown: use jax.nn xla"),
        (["--preset", "hopper"], "--preset sets --batch"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, capsys, small_read):
    with pytest.raises(SystemExit):
        bench.main([*TINY, *arguments])
    assert message in capsys.readouterr().err


def test_a_baseline_that_fails_while_timed_keeps_other_results(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench.baselines, "skip_reason", lambda *arguments: None)
    monkeypatch.setattr(bench.baselines, "make_program", fails)
    shape = shapes.bench_shape(1, 64, 1, 1, 64, 2)
    options = dict(baseline_names=["jax.nn xla"], layers=1, repeats=1)
    results = bench.measure(shape, jnp.float32, ["xla"], **options)
    assert results["xla"]["seconds"] > 0
    assert results["jax.nn xla"]["skipped"] == "failed with all layers: RuntimeError: no memory"
