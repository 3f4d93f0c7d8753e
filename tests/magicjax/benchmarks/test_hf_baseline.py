"""Hugging Face's decoding step: timed in a separate process, or skipped with a reason."""

import importlib.util
import subprocess
import sys

import pytest

from magicjax.benchmarks import hf_baseline


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def time_step(directory):
    return hf_baseline.time_step(str(directory), "float32", 2, 16, "cpu")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_is_named(missing, directory, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != missing)
    assert time_step(directory) == {"skipped": f"{missing} is not installed"}


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ((0, 'a warning\nresult: {"ms": 2.5}\n', "noise"), {"ms": 2.5}),
        ((1, "", "a trace\nOutOfMemoryError: x"), "exited with status 1: OutOfMemoryError: x"),
        ((-9, "", ""), "exited with status -9: no output"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_returns_the_result_of_the_process_or_its_status(result, found, directory, monkeypatch):
    calls = []

    def call(command, **options):
        calls.append((command, options))
        return subprocess.CompletedProcess(command, *result)

    monkeypatch.setattr(subprocess, "run", call)
    assert time_step(directory) == (found if isinstance(found, dict) else {"skipped": found})
    ((command, options),) = calls
    assert command[:3] == [sys.executable, "-m", "magicjax.benchmarks.hf_baseline"]
    assert options["env"]["JAX_PLATFORMS"] == "cpu"  # torch needs the memory
