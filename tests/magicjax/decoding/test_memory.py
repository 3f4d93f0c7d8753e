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
from tests.magicjax import keywords, tiny


def request_of(target, rows=4, tokens=200, **options):
    return keywords.prepare(target, [[1] * tokens] * rows, max_tokens=20, **options)


def abstract_model(dtype="float32"):
    return magicjax.Model(models.build(tiny.config(), dtype), None)


def test_weights_count_until_they_are_loaded():
    loaded, target = request_of(tiny.model()), request_of(abstract_model())
    counted = memory.count(target)
    memory.check(loaded, available=counted.target_kv)
    memory.check(target, available=counted.resident)
    with pytest.raises(memory.OutOfMemoryError, match="target's weights .* GB, its KV cache"):
        memory.check(target, available=counted.resident - 1)
    with pytest.raises(memory.OutOfMemoryError, match="target's weights .* GB, loaded, its KV"):
        memory.check(loaded, available=counted.target_kv - 1)


def test_two_layers_of_an_offloaded_target_count():
    request = request_of(loading.abstract_model("llama-2-7b-32k", "bfloat16", offload=True))
    counted = memory.count(request)
    assert f"target's weights {(counted.weights + counted.streamed) / 1e9:.3g} GB, its KV" in (
        memory.describe(request)
    )
    memory.check(request, available=counted.resident)
    with pytest.raises(memory.OutOfMemoryError):
        memory.check(request, available=counted.resident - 1)


@pytest.mark.parametrize("drafter", [None, magicjax.SelfSpeculation(budget=32)])
def test_the_remedies_fit_and_more_does_not(drafter):
    whole = memory.count(request_of(tiny.model(), drafter=drafter))
    available = 0.6 * (whole.target_kv + whole.draft)
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
    assert memory.free_memory(abstract_model(), None) == 600


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
