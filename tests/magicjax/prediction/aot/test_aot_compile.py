"""Ahead-of-time requests for absent GPUs, and reports read from compiled programs."""

import dataclasses

import jax
import pytest

from magicjax import loading
from magicjax.prediction.aot import aot_compile
from sharding import abstract_mesh

LOAD = aot_compile.Workload("llama-3.2-1b", "self:streaming:512", "chain:4", 16, 32768, "h200")


def abstract_request(**changes):
    load = dataclasses.replace(LOAD, **changes)
    return aot_compile.abstract_request(load, abstract_mesh(load.data, load.model))


@pytest.fixture
def two_layers(monkeypatch):
    """Cuts every model to two layers, which trace faster."""
    whole = loading.config_of

    def cut(source):
        return dataclasses.replace(whole(source), num_layers=2)

    monkeypatch.setattr(loading, "config_of", cut)


def test_a_request_of_a_large_model_has_only_shapes():
    request = abstract_request(backend="mosaic")
    assert request.settings.backend == "mosaic"
    leaves = jax.tree.leaves(request.target.params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    state = aot_compile.state_shapes(request)
    slots = request.settings.capacity
    assert 32768 <= slots < 32768 + 128
    assert state.cache.k[0].shape == (16, 8, slots, 64) and len(state.cache.k) == 16
    assert state.drafter.cache.k[0].shape == (16, 8, 512, 64)


@pytest.mark.parametrize("device", aot_compile.DEVICES)
def test_the_attention_is_that_of_generate_on_the_device(device):
    load = dataclasses.replace(LOAD, device=device)
    assert load.attention == "xla"
    assert dataclasses.replace(load, backend="mosaic").attention == "mosaic"


@pytest.mark.usefixtures("two_layers")
def test_rows_and_heads_are_sharded():
    request = abstract_request(data=2, model=4)
    slots = request.settings.capacity
    assert aot_compile.cache_sizes(request) == {
        "target": {8 * 2 * slots * 64},
        "draft 1": {8 * 2 * 512 * 64},
    }


@pytest.mark.usefixtures("two_layers")
def test_a_draft_model_may_have_fewer_shards_than_the_target():
    request = abstract_request(drafter="small:llama-3.2-1b:streaming:512", model=8, draft_shards=2)
    assert aot_compile.cache_sizes(request)["draft 1"] == {16 * 4 * 512 * 64}


@pytest.mark.usefixtures("two_layers")
def test_the_draft_cache_can_be_quantized():
    keys = aot_compile.state_shapes(
        abstract_request(drafter="self:streaming:512:kv_dtype=int8")
    ).drafter.cache.k[0]
    assert keys.values.dtype == "int8" and keys.shape == (16, 8, 512, 64)


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize(
    ("changes", "has_quantized"),
    [
        (dict(), False),
        (dict(weights="int4"), True),
        (dict(weights="int8", offload=True), True),
        (dict(drafter="self:streaming:512:weights=int4"), True),
        (dict(drafter="small:llama-3.2-1b:weights=int8"), True),
    ],
)
def test_quantized_matrices_of_targets_and_drafts_are_sought(changes, has_quantized):
    matrices = {2048 * 512, 2048 * 2048, 2048 * 8192}
    found = aot_compile.matrix_sizes(abstract_request(**changes))
    assert found == (matrices if has_quantized else set())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(device="a100", backend="mosaic"), "backend=mosaic needs Hopper, not a100"),
        (dict(context=64), "context=64 must be larger than max_new_tokens=128"),
        (dict(model=64), "does not divide the model: its 32 query heads are not a multiple of 64"),
        (dict(drafter="", tree="chain:4"), "tree=chain:4 needs a drafter"),
        (dict(draft_shards=2), "draft_shards=2 applies to draft models"),
        (dict(batch=-1), "batch=-1 must be at least 1"),
        (dict(data=3), "16 prompts do not divide over data=3"),
        (dict(device="b300"), "device=b300 is unknown: use a10, a100, h100, h200, l40, or"),
        (dict(drafter="prompt-lookup:4:kv_dtype=int8"), "'kv_dtype' is not an option of"),
        (dict(target="llama-9"), "llama-9"),
    ],
)
def test_an_invalid_workload_is_refused(changes, message):
    with pytest.raises(ValueError) as error:
        abstract_request(**changes)
    assert message in str(error.value)


def test_a_device_description_may_be_a_file(tmp_path):
    own = tmp_path / "own.txtpb"
    own.write_text(aot_compile.DEVICES["h200"].read_text().replace("150000000000", "160000000000"))
    assert aot_compile.device_memory_bytes(str(own)) == 160_000_000_000 and aot_compile.is_hopper(
        str(own)
    )
    own.write_text("cuda_compute_capability {\n  major: 9\n  minor: 0\n}")
    assert aot_compile.is_hopper(str(own))
    own.write_text("")
    with pytest.raises(ValueError, match="has no device_memory_size"):
        aot_compile.device_memory_bytes(str(own))


def test_kernels_are_read_from_dumped_files(tmp_path):
    dumped = tmp_path / "a.ptxas"
    dumped.write_text(
        "    16 bytes stack frame, 12 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 232 registers, used 16 barriers, 1 bytes smem\n"
    )
    assert aot_compile.kernels([dumped]) == [{"registers": 232, "spilled bytes": 52}]


def test_each_size_of_shared_memory_is_read_once(tmp_path):
    paths = []
    for name, size in {"a": 231424, "a_1": 200704, "a_2": 231424}.items():
        paths.append(tmp_path / f"{name}.resources.txt")
        paths[-1].write_text(f"Resources(smem_scratch_bytes={size}, ...)")
    assert aot_compile.shared_bytes(paths) == [200704, 231424]
