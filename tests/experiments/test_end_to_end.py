"""A grid on real, tiny models: text, prompts, models from disk, decoding, results."""

import csv
import json

import pytest
import transformers

import models
from experiments import corpus, launch, measure

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(60))


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A target and a draft in Hugging Face format, and held-out text of ten modules."""
    modules = [corpus.Module(f"m{i}.py", TEXT.replace("x", f"x{i}")) for i in range(160)]
    _, held_out = corpus.split(modules)
    assert len(held_out) >= 5
    monkeypatch.setattr(corpus, "library", lambda: modules)
    monkeypatch.setattr(measure.bandwidth, "read_bandwidth", lambda: 2e10)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=corpus.train_tokenizer(modules[:5], 300), eos_token=corpus.END
    )
    for name, layers, seed in (("target", 2, 0), ("draft", 1, 1)):
        config = models.LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_layers=layers,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            max_positions=256,
        )
        module = models.build(config)
        models.save_checkpoint(
            tmp_path / name,
            module,
            models.init_params(module, seed),
            eos_token_ids=(tokenizer.eos_token_id,),
            tokenizer=tokenizer,
        )
    return tmp_path


def test_a_grid_runs_from_file_to_summary_and_is_exact(zoo, capsys):
    path = zoo / "grid.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\n"
        f"results: {zoo / 'results'}\n"
        "new_tokens: 12\n"
        "agreement_tokens: 96\n"
        "shapes: [{batch: 2, context: 48}]\n"
        "methods:\n"
        "  - {draft: self, kv_budget: 24, sinks: 4, tree: chain:3}\n"
        f"  - {{draft: small, model: {zoo / 'draft'}, tree: 'expansion:2,1'}}\n"
    )
    assert launch.main([str(path)]) == 0
    with (zoo / "results" / "grid" / "summary.csv").open() as file:
        plain, streaming, small = csv.DictReader(file)
    for row in (plain, streaming, small):
        assert (row["status"], float(row["exact_match"])) == ("ok", 1.0)
        assert float(row["decode_s"]) > 0
        assert float(row["compile_s"]) > 0
    assert float(plain["tau"]) == 1.0
    assert int(plain["rounds"]) == 2 * 11  # the first token of each row is the prefill's
    assert float(streaming["kv_mb_draft"]) < float(streaming["kv_mb_target"])
    assert 0 <= float(small["agreement"]) <= 1
    records = (zoo / "results" / "grid" / "cells").glob("*.json")
    assert sum("acceptance_by_depth" in json.loads(p.read_text()) for p in records) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "τ: tokens emitted a target pass and row" in out
