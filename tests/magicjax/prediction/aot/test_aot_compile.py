"""Ahead-of-time requests for absent GPUs, and reports read from compiled programs."""

import dataclasses

import jax
import pytest

from magicjax.decoding.decoder import Decoder
from magicjax.prediction.aot import aot_compile
from magicjax.sources import Source
from sharding import abstract_mesh

WORKLOAD = aot_compile.AotWorkload(
    "llama-3.2-1b", "self:streaming:512", "chain:4", 16, 32768, "h200"
)


def abstract_request(**changes):
    workload = dataclasses.replace(WORKLOAD, **changes)
    return aot_compile.abstract_request(workload, abstract_mesh(workload.data, workload.model))


@pytest.fixture
def two_layers(monkeypatch):
    """Cuts every model to two layers, which trace faster."""
    whole = Source.config.func

    def cut(source):
        return dataclasses.replace(whole(source), num_layers=2)

    monkeypatch.setattr(Source, "config", property(cut))


@pytest.mark.slow
def test_a_request_of_a_large_model_has_only_shapes():
    request = abstract_request(backend="mosaic")
    assert request.settings.backend == "mosaic"
    leaves = jax.tree.leaves(request.target.params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    state = Decoder(request).state_shapes()
    slots = request.settings.capacity
    assert 32768 <= slots < 32768 + 128
    assert state.cache.k[0].shape == (16, 8, slots, 64) and len(state.cache.k) == 16
    assert state.drafter.cache.k[0].shape == (16, 8, 512, 64)


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
        (dict(device="a100", backend="mosaic"), "backend=mosaic needs NVIDIA Hopper, not a100"),
        (dict(device="h100", backend="tpu"), "backend=tpu needs a TPU, not h100: use backend=xla"),
        (dict(device="v5e", backend="mosaic"), "backend=mosaic needs NVIDIA Hopper, not v5e"),
        (dict(context=64), "context=64 must be larger than max_tokens=128"),
        (dict(model=64), "does not divide the model: its 32 query heads are not a multiple of 64"),
        (dict(drafter="", tree="chain:4"), "tree=chain:4 needs a drafter"),
        (dict(draft_shards=2), "draft_shards=2 applies to draft models"),
        (dict(batch=-1), "batch=-1 must be at least 1"),
        (dict(data=3), "16 prompts do not divide over data=3"),
        (
            dict(device="b300"),
            "device=b300 is unknown: use a10, a100, b200, h100, h200, l4, l40, l40s, t4, tpu7x, ",
        ),
        (dict(device="cpu"), "device=cpu is unknown"),
        (dict(device="cpu:16", offload=True), "is one device, whose memory is the host's"),
        (dict(device="cpu:16", data=2), "omit offload and mesh"),
        (dict(drafter="prompt-lookup:4:kv_dtype=int8"), "'kv_dtype' is not an option of"),
        (dict(target="llama-9"), "llama-9"),
    ],
)
def test_an_invalid_workload_is_refused(changes, message):
    with pytest.raises(ValueError) as error:
        abstract_request(**changes)
    assert message in str(error.value)


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("v5e", {}, "tpu"),
        ("v6e", dict(dtype="float16"), "xla"),
        ("h100", {}, "mosaic"),
        ("h100", dict(dtype="float32"), "xla"),
        ("a100", {}, "mosaic_sm80"),
        ("l40s", {}, "mosaic_sm80"),
        ("b200", {}, "xla"),
        ("cpu:16", {}, "cpu"),
        ("h100", dict(backend="xla"), "xla"),
    ],
)
def test_the_backend_is_the_default_of_the_device(device, changes, expected):
    assert abstract_request(device=device, **changes).settings.backend == expected


def test_kernels_are_read_from_dumped_files(tmp_path):
    dumped = tmp_path / "a.ptxas"
    dumped.write_text(
        "    16 bytes stack frame, 12 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 232 registers, used 16 barriers, 1 bytes smem\n"
    )
    assert aot_compile.kernels([dumped]) == [{"registers": 232, "spilled bytes": 52}]
