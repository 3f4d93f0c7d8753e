"""Tiny models, and a bench without models to test the launcher."""

from types import SimpleNamespace

import numpy as np
import pytest
import transformers

import magicjax
import models
from experiments.prompts import corpus
from experiments.report import page
from experiments.runner import launchers, measure, workload
from magicjax.decoding.counts import by_row
from magicjax.decoding.stats import Stats, summed
from models import DecoderConfig, Transformer, init_params


@pytest.fixture(scope="session")
def tiny():
    """A random model of two layers, grouped heads, vocabulary 64."""
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=1024,
    )
    module = Transformer(config)
    params = init_params(module, seed=3)
    return magicjax.Model(module, params)


class ScriptedBench(workload.Bench):
    """A bench with scripted runs: plain decoding takes 1 s, everything else 0.5 s.

    Attributes:
      target: the model that decides ties.
      fails: called with a cell before each of its runs; may raise.
      ran: the cells that ran, in order.
    """

    def __init__(self, target, fails=lambda cell: None):
        super().__init__()
        self.target, self.fails, self.ran = target, fails, []

    def model(self, directory, dtype, *mesh, **options):
        return self.target

    def prompts(self, cell):
        tokens = np.arange(cell.batch * cell.context, dtype=np.int32)
        return tokens.reshape(cell.batch, -1) % 64

    def agreement(self, cell):
        return None if cell.draft == "none" else 0.75

    def runs(self, cells, rows):
        return SimpleNamespace(run=lambda cell, streams: self.run(cell), compile_s=0.0)

    def run(self, cell):
        self.fails(cell)
        warm_up = cell not in self.ran
        self.ran.append(cell)
        tokens = np.tile(np.arange(cell.new_tokens, dtype=np.int32), (cell.batch, 1))
        histogram = (
            (cell.new_tokens - 1, 0) if cell.draft == "none" else (1, cell.new_tokens // 2 - 1)
        )
        of_row = [cell.new_tokens], [histogram], np.zeros((1, 2, 0), int), [2]
        (row,) = by_row(*map(np.array, of_row))
        stats = Stats(
            **summed((row,) * cell.batch),
            rounds=sum(histogram),
            prefill_s=0.25,
            decode_s=1.0 if cell.draft == "none" else 0.5,
            compile_s=3.0 if warm_up else 0.0,
            compilations=0,
            kv_bytes_target=2_000_000,
            kv_bytes_draft=1_000_000,
            attention_backend="xla",
        )
        texts = ["text"] * cell.batch
        return SimpleNamespace(tokens=tokens, stats=stats, texts=texts, choice=None)


class Here(launchers.InProcess):
    """The launcher of this process.

    Attributes:
      before: called with each folder before its cell is measured.
    """

    def __init__(self, bench=None, before=lambda folder: None):
        super().__init__(lambda folder: bench or workload.Bench(folder))
        self.before = before

    def start(self, folder, bench, limits):
        self.before(folder)
        return super().start(folder, bench, limits)


@pytest.fixture
def here(monkeypatch):
    """Replaces every launcher by `Here`."""

    def use(bench=None, before=lambda folder: None):
        launcher = Here(bench, before)
        monkeypatch.setattr(launchers, "make", lambda experiment, devices: launcher)

    return use


@pytest.fixture
def scripted(tiny, monkeypatch):
    """Makes a scripted bench; bandwidth, phases and the report are scripted too."""
    monkeypatch.setattr(measure.bandwidth, "read_bandwidth", lambda: 2e10)
    monkeypatch.setattr(measure, "_phases", lambda bench, cell, folder: ({"draft": 0.25}, ""))
    monkeypatch.setattr(page, "write", lambda results, to_do: None)
    return lambda fails=lambda cell: None: ScriptedBench(tiny, fails)


TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(60))


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A target and a draft in Hugging Face format, and held-out text of ten modules.

    Both have one shape, so programs compile once for all drafters.
    """
    modules = [corpus.Module(f"m{i}.py", TEXT.replace("x", f"x{i}")) for i in range(160)]
    _, held_out = corpus.split(modules)
    assert len(held_out) >= 5
    monkeypatch.setattr(corpus, "library", lambda: modules)
    monkeypatch.setattr(measure.bandwidth, "read_bandwidth", lambda: 2e10)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=corpus.train_tokenizer(modules[:5], 300), eos_token=corpus.END
    )
    for name, seed in (("target", 0), ("draft", 1)):
        config = models.DecoderConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_layers=1,
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
