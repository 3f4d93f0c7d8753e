"""The estimated time of a cell counts prefills and runs as they are measured."""

import pytest

from experiments.runner import estimates
from experiments.schema import config, grid, method
from magicjax.prediction.cost_model import Device

START = estimates.START_S


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """A device whose prefill takes 1 s, and whose steps take a quarter of a second."""
    device = Device("cpu", 1e9, 1.0, 1e12, None, dtype="float32")
    part = estimates.cost_model.Part
    monkeypatch.setattr(estimates, "_cpu", lambda dtype: device)
    monkeypatch.setattr(
        estimates.cost_model,
        "pass_parts",
        lambda *a, **k: {"MLP": part(flops=1.0), "logits": part(flops=9.0)},
    )
    monkeypatch.setattr(estimates.cost_model, "plain_step", lambda *a: {"step": 0.25})


@pytest.mark.parametrize(
    ("settings", "plain", "drafted"),
    [
        # One prefill for all runs: 2 of plain decoding, 4 beside a method; 2 s each.
        ({}, 1 + 2 * 2, 1 + 4 * 2),
        ({"phases": True}, 1 + 3 * 2, 1 + 5 * 2),
        # Without timing every run has its own prefill, and none is traced.
        ({"repeats": 0, "phases": True}, 1 + 2, 2 * (1 + 2)),
        ({"requests": 3}, 3 * (1 + 2 * 2), 3 * (1 + 4 * 2)),
        # The first cell of a group chooses the prompts.
        ({"candidates": 4}, 1 + 2 * 2 + 4 * (1 + 2), 1 + 4 * 2),
    ],
)
def test_timed_runs_share_a_prefill(settings, plain, drafted):
    common = {"repeats": 1, "phases": False, "candidates": 1, "new_tokens": 8}
    experiment = config.Experiment(methods=[method.Method()], **common | settings)
    (cells,) = grid.groups(experiment)
    seconds = [estimates.of(cell, on_gpu=False).seconds for cell in cells]
    assert seconds == pytest.approx([START + plain, START + drafted])
