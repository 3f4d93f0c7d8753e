"""The memory of a request is counted exactly, and compared before anything is compiled."""

import dataclasses

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax import loading
from magicjax.decoding import memory, program_cache
from magicjax.drafters import quantized_blocks
from magicjax.parallel import offloading
from magicjax.prediction.aot import aot_compile, memory_estimate
from sharding import abstract_mesh
from tests.magicjax import keywords, tiny
from tests.quick import quick

LOAD = aot_compile.Workload("llama-2-7b-32k", "", "", 8, 2048, "h100", max_tokens=64)
WORKLOADS = {
    "layers": {"drafter": "self:streaming:256:layers=0-7,24-31"},
    "pages": {"drafter": "quest:256"},
    "small, sharded": {
        "drafter": "small:llama-68m:streaming:256:sink_positions=in_cache",
        "model": 4,
        "draft_shards": 2,
    },
    "stages": {"drafter": "self:streaming:256", "stage": 2, "model": 2},
    "int8 cache": {"drafter": "self:streaming:256", "kv_dtype": "int8", "model": 2},
}


@pytest.mark.parametrize("case", quick(WORKLOADS, "small, sharded"))
def test_the_bytes_are_those_of_the_state_on_each_device(case):
    load = dataclasses.replace(LOAD, **WORKLOADS[case])
    shapes, counted = memory_estimate.count(load), None
    counted = memory.count(aot_compile.abstract_request(load, abstract_mesh(*load.mesh_size)))
    assert counted.weights == shapes.weights + shapes.streamed
    assert counted.cache == shapes.target_kv
    # The slots' positions and scales beside keys and values are a few bytes.
    expected = shapes.draft_weights + shapes.draft_kv
    assert counted.drafter == pytest.approx(expected, rel=0.05)


def request_of(target, rows=4, tokens=200, **options):
    return keywords.prepare(target, [[1] * tokens] * rows, max_tokens=20, **options)


def skeleton(dtype="float32"):
    return magicjax.Model(models.build(tiny.config(), dtype), None)


def test_weights_count_until_they_are_loaded():
    loaded, target = memory.count(request_of(tiny.model())), request_of(skeleton())
    counted = memory.count(target)
    assert (counted.weights, counted.cache) == (loaded.weights, loaded.cache)
    half = memory.count(request_of(skeleton("bfloat16")))
    assert (half.weights, half.cache) == (counted.weights / 2, counted.cache / 2)
    memory.check(request_of(tiny.model()), available=loaded.cache)
    memory.check(target, available=counted.weights + counted.cache)
    with pytest.raises(memory.OutOfMemoryError, match="target's weights .* GB, its KV cache"):
        memory.check(target, available=counted.weights + counted.cache - 1)
    with pytest.raises(memory.OutOfMemoryError, match="target's weights .* GB, loaded, its KV"):
        memory.check(request_of(tiny.model()), available=loaded.cache - 1)


@pytest.mark.parametrize("model", [1, 4])
def test_an_offloaded_target_counts_two_layers_before_it_is_loaded(model):
    load = dataclasses.replace(LOAD, offload=True, model=model)
    shapes = memory_estimate.count(load)
    target = loading.skeleton(load.target, load.dtype, offload=True)
    counted = memory.count(request_of(target, mesh=abstract_mesh(model=model)))
    assert counted.weights == pytest.approx(shapes.weights + shapes.streamed, rel=1e-3)
    request = request_of(target)
    needed = memory.count(request).weights + memory.count(request).cache
    memory.check(request, available=needed)
    with pytest.raises(memory.OutOfMemoryError):
        memory.check(request, available=needed - 1)


@pytest.mark.parametrize("drafter", [None, magicjax.SelfSpeculation(budget=32)])
def test_the_remedies_fit_and_more_does_not(drafter):
    whole = memory.count(request_of(tiny.model(), drafter=drafter))
    available = 0.6 * (whole.cache + whole.drafter)
    with pytest.raises(memory.OutOfMemoryError) as refused:
        memory.check(request_of(tiny.model(), drafter=drafter), available)
    words = str(refused.value).partition("use at most ")[2].split()
    rows, tokens = int(words[0]), int(words[words.index("tokens") - 1])
    fit = request_of(tiny.model(), rows, drafter=drafter)
    memory.check(fit, available)
    memory.check(request_of(tiny.model(), tokens=tokens - 20, drafter=drafter), available)
    for larger in ({"rows": rows + 1}, {"tokens": tokens - 20 + 64}):  # slots come in 64s
        with pytest.raises(memory.OutOfMemoryError):
            memory.check(request_of(tiny.model(), drafter=drafter, **larger), available)
    with pytest.raises(
        memory.OutOfMemoryError, match="use a smaller model, a smaller dtype or kv_dtype, off"
    ):
        memory.check(request_of(tiny.model(), drafter=drafter), 100)


CALLS = {
    "generate": lambda: magicjax.generate(tiny.model(), [[1, 2]]),
    "stream": lambda: magicjax.stream(tiny.model(), [[1, 2]]),
    "many": lambda: magicjax.generate(tiny.model(), np.broadcast_to(0, (10**7, 1))),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_refused_before_compilation(call, monkeypatch):
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 1000)
    before = program_cache.totals()
    with pytest.raises(memory.OutOfMemoryError, match="and 1e-06 GB are available"):
        CALLS[call]()
    assert program_cache.totals() == before


COPY = magicjax.SelfSpeculation(budget=32, weights="int8")


COPYING = {
    "generate": lambda target: magicjax.generate(target, [[1, 2]], drafter=COPY),
    "stream": lambda target: magicjax.stream(target, [[1, 2]], drafter=COPY),
    "engine": lambda target: magicjax.Engine(target, COPY, config=magicjax.EngineConfig(slots=2)),
}


@pytest.mark.parametrize("call", COPYING)
def test_no_memory_for_a_copy_of_the_target_is_explained(call, monkeypatch):
    def quantize(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no")

    monkeypatch.setattr(quantized_blocks, "_quantize", quantize)
    with pytest.raises(memory.OutOfMemoryError, match="the drafter's weights and KV caches"):
        COPYING[call](dataclasses.replace(tiny.model()))


def test_a_device_that_reports_nothing_is_not_compared(monkeypatch):
    monkeypatch.setattr(offloading, "free_host_memory", lambda: None)
    memory.check(request_of(tiny.model()))


class Device:
    """A GPU with 1,000 bytes, 400 of them in use."""

    platform, process_index = "gpu", 0

    def memory_stats(self):
        return {"bytes_limit": 1000, "bytes_in_use": 400}


def test_memory_in_use_is_not_free(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert memory.free_memory(skeleton(), None) == 600


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no"), MemoryError("no")]
)
def test_running_out_of_memory_names_the_counted_sizes(error, monkeypatch):
    def program(*arguments):
        raise error

    monkeypatch.setattr(program_cache, "program", program)
    with pytest.raises(
        memory.OutOfMemoryError, match=r"out of memory: a batch of 1 rows of 130 tokens has target"
    ) as refused:
        magicjax.generate(tiny.model(), [[1, 2]])
    assert refused.value.__cause__ is error


def test_other_errors_stay(monkeypatch):
    def program(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(program_cache, "program", program)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        magicjax.generate(tiny.model(), [[1, 2]])


def test_a_preset_is_announced_as_random_and_refused_before_its_weights_are_made(
    monkeypatch, caplog
):
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 10**8)
    with pytest.raises(ValueError, match=r"weights of opt-125m need 0.3 GB .* 0.1 GB are availab"):
        magicjax.load("opt-125m")
    assert "opt-125m is a preset with random weights: pass a directory" in caplog.text
