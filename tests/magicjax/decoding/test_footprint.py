"""The footprint of models and caches is that of the arrays on each device."""

import dataclasses

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given

import magicjax
import models
from magicjax import loading, placement
from magicjax.decoding import footprint, memory
from magicjax.decoding.decoder import Decoder
from magicjax.kv_cache.pages import PageBounds
from magicjax.prediction.aot import aot_compile
from sharding import abstract_mesh, part_bytes
from tests.magicjax import keywords, tiny
from tests.quick import quick

LOAD = aot_compile.AotWorkload("llama-2-7b-32k", "", "", 8, 2048, "h100", max_tokens=64)
WORKLOADS = {
    "layers": {"drafter": "self:streaming:256:layers=0-7,24-31"},
    "pages": {"drafter": "quest:256", "model": 2},
    "small, sharded": {
        "drafter": "small:llama-68m:streaming:256:sink_positions=in_cache",
        "model": 4,
        "draft_shards": 2,
    },
    "groups": {"drafter": "small:llama-68m:full", "data": 2},
    "stages": {"drafter": "self:streaming:256", "stage": 2, "model": 2},
    "int8 caches": {"drafter": "self:streaming:256:kv_dtype=int8", "kv_dtype": "int8", "model": 2},
    "copy": {"drafter": "full:weights=int8", "model": 2},
    "states": {"target": "qwen3.5-27b", "drafter": "prompt-lookup", "data": 2},
    "states of a small model": {  # with 2 KV heads
        "target": "qwen3.5-27b",
        "drafter": "small:qwen3.5-35b-a3b:full",
        "model": 4,
    },
    "windows": {"target": "gemma-2-9b", "context": 8000, "drafter": "self:streaming:256"},
}


def draft_cache_bytes(state) -> int:
    """Returns the bytes of what drafters keep of tokens and their states, on each device."""

    def is_bounds(x) -> bool:
        return isinstance(x, PageBounds)

    bounds = filter(is_bounds, jax.tree.leaves(state.drafter, is_leaf=is_bounds))
    caches = [
        (cache.k, cache.v, getattr(cache, "pinned", ()), cache.states)
        for cache in aot_compile.all_caches(state)[1:]
    ]
    return part_bytes((caches, list(bounds), getattr(state.drafter, "sinks", None)))


@pytest.mark.parametrize(
    "case", quick(WORKLOADS, "small, sharded", "states of a small model", "windows")
)
def test_the_bytes_are_those_of_the_arrays_on_each_device(case):
    load = dataclasses.replace(LOAD, **WORKLOADS[case])
    request = aot_compile.abstract_request(load, abstract_mesh(*load.mesh_size))
    counted, state = memory.count(request), Decoder(request).state_shapes()
    cache = state.cache
    assert counted.target_kv == part_bytes((cache.k, cache.v, cache.states))
    assert counted.draft_kv == draft_cache_bytes(state)
    assert counted.weights == part_bytes(request.target.params) and not counted.streamed
    drafts = [model.params for model in placement.models_of(request.drafter)]
    assert counted.draft_weights == part_bytes(drafts)
    assert counted.allocated == counted.weights + counted.draft_weights
    assert counted.new == counted.target_kv + counted.draft_kv


def request_of(target, rows=4, tokens=200, **options):
    return keywords.prepare(target, [[1] * tokens] * rows, max_tokens=20, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_matrix_that_a_head_shares_with_its_target_counts_once(tied):
    module = models.build(tiny.config(**tiny.HYBRID, tie_embeddings=tied))
    target = magicjax.Model(module, tiny.put(tiny.drawn(module.config, 0)), name="target")
    request = request_of(target, drafter=magicjax.MTP(tiny.mtp_head(target)), tree="chain:2")
    (head,) = placement.models_of(request.drafter)
    counted = memory.count(request)
    buffers = {
        x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree.leaves((target.params, head.params))
    }
    assert counted.weights + counted.draft_weights == sum(buffers.values()) == counted.allocated
    shapes = [dataclasses.replace(model, params=None) for model in (target, head)]
    unloaded = footprint.of_models(shapes[0], magicjax.MTP(shapes[1]), 4, 256)
    assert unloaded.draft_weights == counted.draft_weights
    # In another dtype it is a copy.
    wide = dataclasses.replace(shapes[0], module=module.clone(dtype=jax.numpy.dtype("bfloat16")))
    other = footprint.of_models(wide, magicjax.MTP(shapes[1]), 4, 256)
    assert other.draft_weights - unloaded.draft_weights == 4 * tiny.VOCAB * 32


def abstract_model(dtype="float32"):
    return magicjax.Model(models.build(tiny.config(), dtype), None)


def test_weights_are_new_until_they_are_loaded():
    loaded = memory.count(request_of(tiny.model()))
    counted = memory.count(request_of(abstract_model()))
    assert dataclasses.replace(counted, allocated=counted.weights) == loaded
    assert counted.new == counted.resident == loaded.resident == loaded.new + counted.weights
    half = memory.count(request_of(abstract_model("bfloat16")))
    assert 2 * half.resident == counted.resident


@pytest.mark.parametrize("model", [1, 4])
def test_an_offloaded_target_has_two_layers_before_it_is_loaded(model):
    load = dataclasses.replace(LOAD, offload=True, model=model)
    mesh = abstract_mesh(model=model)
    shapes = memory.count(aot_compile.abstract_request(load, mesh))
    target = loading.abstract_model(load.target, load.dtype, offload=True)
    counted = memory.count(request_of(target, mesh=mesh))
    for name in ("weights", "streamed"):  # each device has all norms
        assert getattr(counted, name) == pytest.approx(getattr(shapes, name), rel=1e-3)
    assert counted.streamed > 0
    resident = loading.abstract_model(load.target, load.dtype)
    whole = footprint.of_models(resident, None, 1, 64, mesh)
    assert counted.weights + counted.streamed < whole.weights / 4 and not whole.streamed


@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 300))
def test_the_largest_size_fits_and_the_next_does_not(count, step, limit):
    sizes = range(step, step * count + 1, step)
    found = footprint.largest(sizes, limit, lambda size: 5 + size)
    assert found == max((size for size in sizes if 5 + size <= limit), default=0)
