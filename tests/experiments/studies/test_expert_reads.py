"""The study of experts: what it counts is what tokens use."""

import pytest

import models
from experiments.studies import expert_reads


def test_few_tokens_use_few_experts(monkeypatch):
    monkeypatch.setattr(expert_reads, "TOKENS", (1, 4))
    monkeypatch.setattr(expert_reads, "REPEATS", 3)
    config = models.family_config(
        "mixtral",
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        max_positions=16,
        num_experts=16,
        experts_per_token=2,
    )
    one, four = expert_reads.measure(config, None)
    size = 3 * 16 * 32 * 32 * 2 / 1e6
    assert one["experts used"] == 2 and one["MB read"] == pytest.approx(size / 8)
    assert one["MB predicted"] == pytest.approx(size / 8)
    assert 4 <= four["experts used"] <= 8
    assert four["MB predicted"] == pytest.approx(size * (1 - (7 / 8) ** 4))
