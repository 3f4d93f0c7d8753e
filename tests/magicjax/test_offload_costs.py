"""What the cost model makes of weights in host memory."""

import dataclasses

import pytest

import models
from magicjax import cost_model
from magicjax.aot import memory_estimate
from magicjax.aot.aot_compile import Workload
from magicjax.cost_model import Device, Machine

CONFIG = models.preset("opt-13b")
RESIDENT = cost_model.sizes_of(CONFIG, "bfloat16", "opt-13b")
STREAMED = cost_model.sizes_of(CONFIG, "bfloat16", "opt-13b", True)
INT8 = cost_model.sizes_of(CONFIG, "bfloat16", "opt-13b", "int8")
H200 = cost_model.find_device("h200")
BLOCKS = RESIDENT.attention + RESIDENT.mlp


def seconds(sizes: cost_model.Sizes, device: Device, nodes: int = 1) -> dict[str, float]:
    return cost_model.seconds(cost_model.pass_parts(sizes, Machine(device), 1, nodes, 128), device)


def test_a_pass_fetches_every_layer_once():
    assert RESIDENT.streamed_bytes == 0 and "host link" not in seconds(RESIDENT, H200)
    assert STREAMED.streamed_bytes == 2 * BLOCKS and INT8.streamed_bytes == BLOCKS
    assert len({RESIDENT.key, STREAMED.key, INT8.key}) == 3


def test_a_slow_link_is_all_that_counts_but_for_the_last_layer():
    found, resident = seconds(STREAMED, H200), seconds(RESIDENT, H200)
    fetching = STREAMED.streamed_bytes / H200.reached_host_link
    computing = sum(resident[name] for name in cost_model.work.BLOCKS)
    whole = sum(resident.values())
    assert fetching > 10 * computing
    # The first layer's fetch and the last layer's work have nothing beside them.
    assert sum(found.values()) == pytest.approx(fetching + computing / 40 + whole - computing)


def test_a_fast_link_costs_the_first_layer():
    device = dataclasses.replace(H200, host_link=1e15)
    found, resident = seconds(STREAMED, device), seconds(RESIDENT, device)
    fetching = STREAMED.streamed_bytes / device.reached_host_link
    assert sum(found.values()) == pytest.approx(sum(resident.values()) + fetching / 40)


def test_a_cpu_fetches_and_computes_one_after_the_other():
    device = dataclasses.replace(H200, fetches_beside=False)
    found, resident = seconds(STREAMED, device), seconds(RESIDENT, device)
    fetching = STREAMED.streamed_bytes / device.reached_host_link
    assert sum(found.values()) == pytest.approx(sum(resident.values()) + fetching)


def test_int8_is_read_and_written_whole_before_it_is_multiplied():
    device = dataclasses.replace(H200, host_link=1e15)
    more = sum(seconds(INT8, device).values()) - sum(seconds(STREAMED, device).values())
    assert more == pytest.approx((1 + 2) * BLOCKS / device.reached_bandwidth, rel=1e-3)


def test_trees_pay_more_and_larger_ones():
    """Sixteen nodes cost next to nothing beside the stream, also where they cost something else."""
    l40 = cost_model.find_device("l40")

    def nodes_for_a_tenth(sizes):
        plain = sum(seconds(sizes, l40).values())
        counts = (2**k for k in range(20))
        return next(n for n in counts if sum(seconds(sizes, l40, n).values()) > 1.1 * plain)

    assert nodes_for_a_tenth(STREAMED) > 10 * nodes_for_a_tenth(RESIDENT)


def test_memory_has_two_layers_in_place_of_all():
    machine = Machine(H200)
    whole = cost_model.memory_bytes(RESIDENT, machine, 1, 128, RESIDENT.kv_bytes)
    streamed = cost_model.memory_bytes(STREAMED, machine, 1, 128, STREAMED.kv_bytes)
    assert whole - streamed == pytest.approx(2 * BLOCKS * (1 - 2 / 40))


def test_bytes_from_shapes_are_those_of_the_model():
    small = cost_model.sizes_of(models.preset("opt-125m"))
    counted = memory_estimate.count(Workload("opt-125m", "", "", 1, 1024, "h200", offload=True))
    assert counted.host == pytest.approx(2 * (small.attention + small.mlp), rel=2e-3)  # and norms
    assert counted.streamed == 2 * counted.host // 12


def test_a_link_that_is_not_known_is_an_error():
    device = dataclasses.replace(H200, host_link=None)
    with pytest.raises(ValueError, match="link between h200 and its host is not known"):
        seconds(STREAMED, device)


def test_the_plan_knows_of_it(run):
    where = ("--target", "opt-13b", "--batch", 1, "--context", 1024, "--device", "h200")
    ask = ("plan", *where, "--acceptance", 0.7, "--drafter", "look-up")
    code, out, _ = run(*ask, "--offload")
    assert code == 0 and "on 1 x h200 (data=1,model=1), offloaded\n" in out
    assert "T_target 49" in out.splitlines()[1]  # ms: 25 GB over some 51 GB/s
    assert "T_target 49" not in run(*ask)[1].splitlines()[1]


def test_fit_counts_what_lies_where(run):
    code, out, _ = run(
        *("fit", "--target", "opt-125m", "--batch", 1, "--context", 1024, "--device", "h100"),
        *("--offload", "--analytic"),
    )
    assert code == 0 and "in host memory " in out and "two layers, streamed " in out
