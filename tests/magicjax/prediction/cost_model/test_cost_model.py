"""The cost model: hand-counted work, monotonicity, profiles, and errors."""

import dataclasses
import json
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import models
from magicjax.prediction import cost_model
from magicjax.prediction.cost_model import Device, Draft, Machine, Work, round_cost

UNIT = Device(
    "unit",
    bandwidth=1.0,
    matrix_rate=1.0,
    memory=1.0,
    link=1.0,
    bandwidth_efficiency=1.0,
    matrix_efficiency=1.0,
    link_efficiency=1.0,
    collective_seconds=0.0,
    layer_seconds=0.0,
    round_seconds=0.0,
)
LLAMA = cost_model.sizes_of(models.preset("llama-3.1-8b"), "bfloat16", "llama-3.1-8b")
SMALL = cost_model.sizes_of(models.preset("llama-3.2-1b"), "bfloat16", "llama-3.2-1b")


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "llama-3.2-1b", "qwen2.5-7b", "opt-125m", "olmo-2-1b"]
)
def test_every_parameter_is_counted_once(name):
    config = models.preset(name)
    s = cost_model.sizes_of(config)
    total = s.attention + s.mlp + s.unembedding + s.small + s.tables
    assert total == models.count_params(config)


def test_the_work_of_a_pass_equals_a_hand_count():
    """Llama-3.1-8B, 4 nodes of each of 2 rows against 100 slots, on 2 devices."""
    parts = cost_model.pass_parts(LLAMA, Machine(UNIT, model=2), 2, 4, 100)
    layers, width, heads, kv_heads, head, mlp, vocabulary = 32, 4096, 32, 8, 128, 14336, 128256
    attention = layers * 2 * width * (heads + kv_heads) * head
    norms = (2 * layers + 1) * width
    assert parts["projections"] == Work(bytes=attention, flops=2 * attention * 8 / 2)
    assert parts["MLP"].bytes == layers * 3 * width * mlp + norms
    assert parts["MLP"].flops == 2 * layers * 3 * width * mlp * 8 / 2
    per_token = 2 * layers * kv_heads * head * 2
    assert per_token == 131072
    assert parts["attention"].bytes == (2 * 100 + 8) * per_token / 2
    # scores and values, 2 FLOPs each, for every node against 100 slots and 4 nodes
    assert parts["attention"].flops == 2 * 2 * 8 * layers * heads * head * 104 / 2
    assert parts["logits"] == Work(bytes=vocabulary * width, flops=2 * vocabulary * width * 8 / 2)
    assert parts["selection"] == Work(bytes=2 * 4 * 8 * vocabulary / 2, messages=1)
    # 64 all-reduces of 8 hidden states; in a ring of two each device sends them once
    assert parts["collectives"] == Work(messages=64, sent=64 * 8 * width * 2)
    assert parts["overhead"] == Work(layers=32)
    olmo = cost_model.sizes_of(models.preset("olmo-2-1b"))
    parts = cost_model.pass_parts(olmo, Machine(UNIT, model=2), 2, 4, 100)
    assert parts["collectives"] == Work(messages=4 * 16, sent=2 * 16 * 8 * 2048 * olmo.itemsize)


def test_a_part_takes_the_maximum_of_memory_and_compute_time_and_overheads_add():
    assert cost_model.seconds({"a": Work(bytes=3, flops=2)}, UNIT) == {"a": 3}
    assert cost_model.seconds({"a": Work(bytes=2, flops=3)}, UNIT) == {"a": 3}
    device = dataclasses.replace(
        UNIT,
        link=4.0,
        link_efficiency=0.5,
        bandwidth_efficiency=0.5,
        matrix_efficiency=0.25,
        collective_seconds=10.0,
        layer_seconds=100.0,
    )
    part = Work(bytes=3, flops=1, messages=2, sent=4, layers=3)
    assert cost_model.seconds({"a": part}, device) == {"a": 3 / 0.5 + 20 + 4 / 2 + 300}


def test_a_round_is_the_sum_of_drafts_verification_and_overhead():
    device = cost_model.find_device("h100")
    machine, where = Machine(device, model=8), (16, 32000)
    cost = round_cost(LLAMA, Draft(SMALL, 512), machine, *where, 5, 4)
    drafted = cost_model.draft_step(Draft(SMALL, 512), machine, *where)
    assert cost.draft == sum(drafted.values())
    parts = cost_model.pass_parts(LLAMA, machine, where[0], 5, where[1])
    assert cost.verify == sum(cost_model.seconds(parts, device).values())
    assert cost.target == sum(cost_model.plain_step(LLAMA, machine, *where).values())
    assert cost.total == 4 * cost.draft + cost.verify + device.round_seconds
    assert math.isclose(sum(cost.parts.values()), cost.total)
    assert cost.speedup(3.0) == 3 * cost.target / cost.total


def test_a_draft_on_pages_gathers_them_and_reads_the_bounds_of_all_in_every_choice():
    device = cost_model.find_device("h100")
    machine, where = Machine(device, model=2), (16, 32000)
    pages = Draft(LLAMA, 512, page_size=16)
    on_cache, gathered = (
        cost_model.draft_step(d, machine, *where) for d in (Draft(LLAMA, 512), pages)
    )
    more = 2 * 16 * 512 * 131072 / 2 / device.reached_bandwidth  # written, and read again
    assert math.isclose(gathered["attention"], on_cache["attention"] + more)
    choice = 16 * 32000 / 16 * 131072 / 2 / device.reached_bandwidth
    for every in (1, 4):
        cost = round_cost(LLAMA, dataclasses.replace(pages, every=every), machine, *where, 5, 4)
        assert math.isclose(cost.parts["round", cost_model.CHOICE], choice / every)
        assert math.isclose(cost.rest, device.round_seconds + choice / every)
        assert math.isclose(sum(cost.parts.values()), cost.total)
    fits = round_cost(LLAMA, pages, machine, 16, 500, 5, 4)  # nothing to choose
    assert fits.rest == device.round_seconds


def test_kv_heads_are_replicated_over_more_devices():
    eight, sixteen = (
        cost_model.pass_parts(LLAMA, Machine(UNIT, model=g), 2, 1, 100)["attention"]
        for g in (8, 16)
    )
    assert sixteen.bytes == eight.bytes and sixteen.flops == eight.flops / 2


@st.composite
def places(draw):
    device = cost_model.DEVICES[draw(st.sampled_from(sorted(cost_model.DEVICES)))]
    tile = draw(st.sampled_from([1, 4]))
    machine = Machine(
        dataclasses.replace(device, tile=tile),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4, 8, 16])),
    )
    batch, context = draw(st.integers(1, 300)), draw(st.integers(1, 100_000))
    return machine, batch, context, draw(st.integers(1, 70))


@given(places(), st.integers(1, 50))
@settings(deadline=None)
def test_the_time_of_a_pass_is_monotone_in_rows_slots_and_nodes(place, more):
    machine, batch, context, nodes = place

    def total(b, s, n):
        return round_cost(LLAMA, Draft(SMALL), machine, b, s, n, 1).verify

    base = total(batch, context, nodes)
    assert total(batch + machine.data * more, context, nodes) > base
    assert total(batch, context + more, nodes) > base
    assert total(batch, context, nodes + more) > base
    drafted = [
        sum(cost_model.draft_step(Draft(LLAMA, budget), machine, batch, context).values())
        for budget in (more, more + 50)
    ]
    assert drafted[0] <= drafted[1] <= total(batch, context, 1)


@pytest.mark.parametrize("key", ["device", "jax", "magicjax"])
def test_a_profile_of_another_device_or_version_is_an_error_with_the_remedy(tmp_path, key):
    path = tmp_path / "here.json"
    cost_model.save_profile(path, UNIT, {})
    content = json.loads(path.read_text())
    content["provenance"][key] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=f"another.*magicjax calibrate --target YOUR_TARGET --out {path}"
    ):
        cost_model.load_profile(path)


@pytest.mark.parametrize("text", ["{}", "no", '{"provenance": {}, "device": {"a": 1}}'])
def test_an_invalid_profile_is_an_error(tmp_path, text):
    path = tmp_path / "here.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a valid profile"):
        cost_model.load_profile(path)


REFUSED = {
    "no device": (lambda: Machine(UNIT, model=0), "model=0 must be at least 1"),
    "no link": (
        lambda: Machine(dataclasses.replace(UNIT, link=None), model=2),
        "model=2: the link between devices of unit is unknown",
    ),
    "an efficiency": (
        lambda: dataclasses.replace(UNIT, link_efficiency=1.5),
        "link_efficiency=1.5 must be above 0",
    ),
    "a rate": (lambda: dataclasses.replace(UNIT, bandwidth=0.0), "bandwidth=0.0 must be positive"),
    "a time": (
        lambda: dataclasses.replace(UNIT, round_seconds=-1.0),
        "round_seconds=-1.0 must not be negative",
    ),
    "a device": (lambda: cost_model.find_device("H10"), "use one of a100, .*did you mean 'h100'"),
    "no row": (lambda: cost_model.pass_parts(LLAMA, Machine(UNIT), 0, 1, 1), "batch=0"),
    "no node": (lambda: cost_model.pass_parts(LLAMA, Machine(UNIT), 1, 0, 1), "nodes=0"),
    "heads": (
        lambda: cost_model.pass_parts(LLAMA, Machine(UNIT, model=3), 1, 1, 1),
        "model=3 does not divide the 8 KV heads of llama-3.1-8b: use one of 1, 2, 4, 8, 16, 32",
    ),
    "no level": (lambda: round_cost(LLAMA, Draft(None), Machine(UNIT), 1, 1, 1, 0), "depth=0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_settings_are_errors(what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()
