"""Hugging Face's decoding step: asked in a process of its own, or a reason why not."""

import importlib.util
import subprocess
import sys

import pytest

from magicjax.benchmarks import hf_baseline


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def ask(directory):
    return hf_baseline.ask(str(directory), "float32", 2, 16, "cpu")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_what_is_not_installed_is_named(missing, directory, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != missing)
    assert ask(directory) == {"why": f"{missing} is not installed"}


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ((0, 'a warning\nanswer: {"ms": 2.5}\n', "noise"), {"ms": 2.5}),
        ((1, "", "a trace\nOutOfMemoryError: x"), "ended with status 1: OutOfMemoryError: x"),
        ((-9, "", ""), "ended with status -9: nothing printed"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_the_answer_of_the_other_process_or_how_it_ended(result, found, directory, monkeypatch):
    calls = []

    def call(command, **options):
        calls.append((command, options))
        return subprocess.CompletedProcess(command, *result)

    monkeypatch.setattr(subprocess, "run", call)
    assert ask(directory) == (found if isinstance(found, dict) else {"why": found})
    ((command, options),) = calls
    assert command[:3] == [sys.executable, "-m", "magicjax.benchmarks.hf_baseline"]
    assert options["env"]["JAX_PLATFORMS"] == "cpu"  # JAX there must leave the memory to torch


@pytest.mark.usefixtures("installed")
def test_one_that_takes_too_long_is_given_up(directory, monkeypatch):
    def call(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", call)
    assert ask(directory) == {"why": f"took longer than {hf_baseline.SECONDS} s"}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_step_is_timed_where_torch_is(directory):
    found = ask(directory)
    assert found.get("ms", 0) > 0 or "too busy" in found["why"]
