"""Models of a grid are validated, and their memory compared, before weights are loaded."""

import csv
import json
import re
import shutil

import pytest

from experiments import launch, prompts
from experiments.runner import launchers
from magicjax.parallel import offloading


def test_a_draft_with_another_tokenizer_is_an_error_before_the_grid_starts(tmp_path, capsys):
    shutil.copytree("experiments/zoo/draft-1", draft := tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["import"], vocab["return"] = vocab["return"], vocab["import"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = tmp_path / "mine.yaml"
    path.write_text(f"methods: [{{drafter: small:{draft}}}]")
    assert launch.main([str(path), "--dry-run"]) == 2
    message = "differs from that of the target 'target' in 2 tokens"
    assert message in capsys.readouterr().err


def test_a_huge_batch_is_refused_before_its_prompts_are_made(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"results: {tmp_path}\ncontext: 512\nnew_tokens: 64\nbatch: 1000000\nmethods: []\n"
    )
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 20e6)
    monkeypatch.setattr(prompts, "make", lambda *_, **__: pytest.fail("prompts were made"))
    assert launch.main([str(path)]) == 2
    assert "a batch of 1000000 rows of 576 tokens needs" in capsys.readouterr().err


def test_cells_larger_than_the_memory_are_refused_or_recorded(
    tmp_path, capsys, here, scripted, monkeypatch
):
    bench = scripted()
    here(bench)
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 20e6)
    path = tmp_path / "mine.yaml"
    settings = (
        f"results: {tmp_path}\nrepeats: 1\nprompts: random\ncontext: 512\nnew_tokens: 64\n"
        "grid: {batch: [1, 512]}\nmethods: []\n"
    )
    path.write_text(settings)
    assert launch.main([str(path)]) == 2
    message = "a batch of 512 rows .* use at most [0-9]+ rows of this length .batch., or more"
    assert re.search(f"batch 512, context 512: plain: {message}", capsys.readouterr().err)
    assert bench.ran == []
    assert launch.main([str(path), "--dry-run"]) == 0
    assert re.search(f"plain cannot run: {message}", " ".join(capsys.readouterr().out.split()))
    path.write_text(f"{settings}impossible: record\n")
    assert launch.main([str(path)]) == 1
    with (tmp_path / "mine" / "summary.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok", "memory"]
    assert {cell.batch for cell in bench.ran} == {1}
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 1000)
    assert launch.main([str(path)]) == 1  # nothing is to do: finished cells are not counted
    monkeypatch.setattr(launchers, "gpus", lambda: ["0"])
    for memory in (None, 1e12):
        monkeypatch.setattr(launchers, "gpu_memory", lambda memory=memory: memory)
        path.write_text(f"{settings}name: gpu-{bool(memory)}")
        assert launch.main([str(path)]) == 0
