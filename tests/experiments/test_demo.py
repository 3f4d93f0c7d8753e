"""The demo: its size, and what it prints, with tiny models."""

import json

import pytest
import yaml

from experiments import demo, launch
from magicjax.downloads import DOWNLOADS


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder of models; returns a function that downloads one."""
    monkeypatch.setenv("MAGICJAX_CACHE", str(tmp_path / "cache"))
    return lambda name: DOWNLOADS[name].directory.mkdir(parents=True)


@pytest.mark.parametrize(
    ("memory", "disk", "size"),
    [
        (8.0, 50.0, demo.LARGE),
        (None, 50.0, demo.LARGE),
        (3.9, 50.0, demo.SMALL),
        (8.0, 3.0, demo.SMALL),  # the client of a download keeps a copy
        (8.0, 3.2, demo.LARGE),
    ],
)
def test_the_models_fit_memory_and_disk(memory, disk, size, cache):
    chosen, reason = demo.choose(memory, disk)
    assert chosen == size
    assert "needs 4.0 GB of memory and 3.1 GB of disk" in reason
    assert f"{disk} GB of disk are free" in reason
    assert reason.startswith(f"{size.models[0]}, ")


def test_models_that_are_downloaded_need_no_disk(cache):
    for name in demo.LARGE.models:
        cache(name)
    size, reason = demo.choose(8.0, 0.1)
    assert size == demo.LARGE and "memory: 8.0 GB" in reason


def test_with_little_memory_it_says_so_before_the_small_model_is_looked_for(
    cache, monkeypatch, capsys
):
    launched = []

    def stop(experiment, launcher):
        launched.append((experiment, capsys.readouterr().out))
        return 2

    monkeypatch.setattr(launch, "run_experiment", stop)
    monkeypatch.setattr(demo.offloading, "free_host_memory", lambda: 1_500_000_000)
    assert demo.main(["--limit", "1"]) == 2
    ((experiment, printed),) = launched
    assert (experiment.name, experiment.fresh, experiment.limit) == ("demo_small", True, 1)
    assert "smollm2, because qwen2.5-coder-1.5b needs 4.0 GB of memory" in printed
    assert "1.5 GB of memory and" in printed and "downloading 93 MB" in printed


def test_another_launcher_is_refused(cache, capsys):
    assert demo.main(["--launcher", "local", "--jobs", "2"]) == 2
    assert "launcher=local: the demo runs in one process; omit it" in capsys.readouterr().err


def test_invalid_settings_and_an_interrupt_have_no_traceback(cache, monkeypatch, capsys):
    assert demo.main(["--batch", "0"]) == 2
    assert "batch=0: Input should be greater than or equal to 1" in capsys.readouterr().err

    def interrupt(memory, disk):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "choose", interrupt)
    assert demo.main([]) == launch.INTERRUPTED
    assert capsys.readouterr().err.startswith("interrupted; ")


def test_it_prints_the_text_as_both_decode_it_and_the_speedup(zoo, monkeypatch, capsys):
    path = zoo / "tiny.yaml"
    settings = dict(
        target=str(zoo / "target"),
        results=str(zoo / "results"),
        launcher="in_process",
        context=48,
        new_tokens=12,
        repeats=1,
        agreement_tokens=0,
        phases=False,
        requests=2,
        candidates=1,
        methods=[{"drafter": "prompt-lookup", "tree": ["chain:3", "chain:2"]}],
    )
    path.write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(demo, "LARGE", demo.Size(str(path), ("smollm2",), 0.0))
    assert demo.main([]) == 0
    printed = capsys.readouterr().out
    directory = zoo / "results" / "tiny"
    (folder, _) = (directory / "cells").iterdir()
    first, second = map(json.loads, (folder / "requests.jsonl").read_text("utf-8").splitlines())
    assert first["text"] != second["text"]
    # Once in plain decoding and once in the first method, before the timed runs.
    assert printed.count(first["text"]) == 2 and second["text"] not in printed
    assert printed.index("cell 2 of 2") > printed.index("plain: timed run 1 of 1, prompts 2 of 2")
    assert "context 48: " in printed and f"open {directory / 'report.html'}" in printed
    assert any(words in printed for words in (" times faster, same text", "no method is faster"))
