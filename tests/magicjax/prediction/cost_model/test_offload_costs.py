"""The cost model of weights in host memory."""

import dataclasses

import pytest

import models
from magicjax.prediction import cost_model
from magicjax.prediction.aot import memory_estimate
from magicjax.prediction.aot.aot_compile import Workload
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


def test_a_cpu_does_not_overlap_fetches():
    device = dataclasses.replace(H200, overlaps_fetch=False)
    found, resident = seconds(STREAMED, device), seconds(RESIDENT, device)
    fetching = STREAMED.streamed_bytes / device.reached_host_link
    assert sum(found.values()) == pytest.approx(sum(resident.values()) + fetching)


def test_a_pass_reads_int8_weights_once():
    device = dataclasses.replace(H200, host_link=1e15)
    less = sum(seconds(STREAMED, device).values()) - sum(seconds(INT8, device).values())
    assert less == pytest.approx(BLOCKS / device.reached_bandwidth, rel=1e-2)


def test_larger_trees_are_cheaper_with_offloading():
    """Many nodes add little to the fetch, even on a device where they slow a resident target."""
    l40 = cost_model.find_device("l40")

    def nodes_for_a_tenth(sizes):
        plain = sum(seconds(sizes, l40).values())
        counts = (2**k for k in range(20))
        return next(n for n in counts if sum(seconds(sizes, l40, n).values()) > 1.1 * plain)

    assert nodes_for_a_tenth(STREAMED) > 10 * nodes_for_a_tenth(RESIDENT)


def test_memory_holds_two_layers_instead_of_all():
    machine = Machine(H200)
    whole = cost_model.memory_bytes(RESIDENT, machine, 1, 128, RESIDENT.kv_bytes)
    streamed = cost_model.memory_bytes(STREAMED, machine, 1, 128, STREAMED.kv_bytes)
    assert whole - streamed == pytest.approx(2 * BLOCKS * (1 - 2 / 40))


def test_estimated_bytes_equal_those_of_the_model():
    small = cost_model.sizes_of(models.preset("opt-125m"))
    counted = memory_estimate.count(Workload("opt-125m", "", "", 1, 1024, "h200", offload=True))
    assert counted.host == pytest.approx(2 * (small.attention + small.mlp), rel=2e-3)  # and norms
    assert counted.streamed == 2 * counted.host // 12


def test_an_unknown_link_is_an_error():
    device = dataclasses.replace(H200, host_link=None)
    with pytest.raises(ValueError, match="host link of h200 is unknown"):
        seconds(STREAMED, device)


def test_the_plan_includes_offloading(run):
    where = ("--target", "opt-13b", "--batch", 1, "--context", 1024, "--device", "h200")
    command = ("plan", *where, "--acceptance", 0.7, "--drafter", "prompt-lookup")
    code, out, _ = run(*command, "--offload")
    assert code == 0 and "on 1 x h200 (data=1,model=1), offloaded\n" in out
    assert "T_target 49" in out.splitlines()[1]  # ms: 25 GB over some 51 GB/s
    assert "T_target 49" not in run(*command)[1].splitlines()[1]


def test_fit_counts_device_and_host_memory(run):
    code, out, _ = run(
        *("fit", "--target", "opt-125m", "--batch", 1, "--context", 1024, "--device", "h100"),
        *("--offload", "--analytic"),
    )
    assert code == 0 and "in host memory " in out and "two layers, streamed " in out
