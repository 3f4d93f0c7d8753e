"""Tiny models and a bench that answers at once, so that the launcher's own rules are tested."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import measure
from models import Llama, LlamaConfig, init_params


@pytest.fixture(scope="session")
def tiny():
    """A random model of two layers, grouped heads, vocabulary 64."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=1024,
    )
    module = Llama(config)
    params = init_params(module, seed=3)
    return SimpleNamespace(module=module, params=params, config=config, tokenizer=None)


class ScriptedBench(measure.Bench):
    """A bench whose runs are made up: plain decoding takes 1 s, everything else half of it.

    Attributes:
      target: the model behind the comparisons.
      fails: called with a cell before each of its runs; raises what the test wants raised.
      ran: the cells run, in order.
    """

    def __init__(self, target, fails=lambda cell: None):
        super().__init__()
        self.target, self.fails, self.ran = target, fails, []

    def model(self, directory, dtype):
        return self.target

    def _choice(self, cell):
        tokens = np.arange(cell.batch * cell.context, dtype=np.int32)
        return tokens.reshape(cell.batch, -1) % 64, 0.0

    def agreement(self, cell):
        return None if cell.draft == "none" else 0.75

    def run(self, cell):
        self.fails(cell)
        warm_up = cell not in self.ran
        self.ran.append(cell)
        tokens = np.tile(np.arange(cell.new_tokens, dtype=np.int32), (cell.batch, 1))
        stats = Stats(
            tau=1.0 if cell.draft == "none" else 2.0,
            decode_s=1.0 if cell.draft == "none" else 0.5,
            compile_s=3.0 if warm_up else 0.0,
            rounds=cell.batch * cell.new_tokens,
            emitted=cell.batch * cell.new_tokens,
        )
        return SimpleNamespace(tokens=tokens, stats=stats, texts=["text"] * cell.batch)


@dataclasses.dataclass(frozen=True)
class Stats:
    tau: float
    decode_s: float
    compile_s: float
    rounds: int
    emitted: int
    tau_by_request: float = 2.0
    nodes_per_round: float = 4.0
    acceptance_rate: float = 0.5
    acceptance_by_depth: tuple = (0.8, 0.4)
    drafted: int = 4
    accepted: int = 2
    prefill_s: float = 0.25
    tokens_per_s: float = 0.0
    kv_bytes_target: int = 2_000_000
    kv_bytes_draft: int = 1_000_000
    attention_backend: str = "xla"


@pytest.fixture
def scripted(tiny, monkeypatch):
    """Makes a scripted bench; memory bandwidth is a made-up number too."""
    monkeypatch.setattr(measure.bandwidth, "read_bandwidth", lambda: 2e10)
    return lambda fails=lambda cell: None: ScriptedBench(tiny, fails)
