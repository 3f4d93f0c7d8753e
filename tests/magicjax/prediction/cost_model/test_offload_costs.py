"""The cost model of weights in host memory."""

import dataclasses

import pytest

import models
from magicjax.prediction import cost_model
from magicjax.prediction.cost_model import Device, Machine

CONFIG = models.preset("opt-13b")
RESIDENT = cost_model.sizes_of(CONFIG, "bfloat16", "opt-13b")
STREAMED = cost_model.sizes_of(CONFIG, "bfloat16", "opt-13b", True)
INT8 = cost_model.sizes_of(CONFIG, "bfloat16", "opt-13b", True, models.WeightFormat(8, None))
H200 = cost_model.find_device("h200")
BLOCKS = RESIDENT.attention + RESIDENT.mlp


def seconds(sizes: cost_model.Sizes, device: Device, nodes: int = 1) -> dict[str, float]:
    return cost_model.seconds(cost_model.pass_parts(sizes, Machine(device), 1, nodes, 128), device)


def test_a_pass_fetches_every_layer_once():
    assert RESIDENT.streamed_bytes == 0 and "host link" not in seconds(RESIDENT, H200)
    assert STREAMED.streamed_bytes == 2 * BLOCKS
    assert INT8.streamed_bytes == pytest.approx(BLOCKS, rel=1e-3)  # and scales
    assert len({RESIDENT.key, STREAMED.key, INT8.key}) == 3


def test_a_slow_link_dominates_except_for_the_last_layer():
    found, resident = seconds(STREAMED, H200), seconds(RESIDENT, H200)
    fetching = STREAMED.streamed_bytes / H200.reached_host_link
    computing = sum(resident[name] for name in cost_model.work.BLOCKS)
    whole = sum(resident.values())
    assert fetching > 10 * computing
    # The first layer's fetch and the last layer's work do not overlap with anything.
    assert sum(found.values()) == pytest.approx(fetching + computing / 40 + whole - computing)


def test_a_fast_link_costs_the_fetch_of_the_first_layer():
    device = dataclasses.replace(H200, host_link=1e15)
    found, resident = seconds(STREAMED, device), seconds(RESIDENT, device)
    fetching = STREAMED.streamed_bytes / device.reached_host_link
    assert sum(found.values()) == pytest.approx(sum(resident.values()) + fetching / 40)


def test_the_plan_includes_offloading(run):
    where = ("--target", "opt-13b", "--batch", 1, "--context", 1024, "--device", "h200")
    command = ("plan", *where, "--acceptance", 0.7, "--drafter", "prompt-lookup")
    code, out, _ = run(*command, "--offload")
    assert code == 0 and "on 1 x h200 (data=1,model=1), offloaded\n" in out
    assert "T_target 49" in out.splitlines()[1]  # ms: 25 GB over some 51 GB/s
    assert "T_target 49" not in run(*command)[1].splitlines()[1]
