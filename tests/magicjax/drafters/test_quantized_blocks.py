"""Self-speculation drafts with a quantized copy of the target's blocks."""

import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest

import magicjax
from magicjax import placement
from magicjax.decoding import memory
from magicjax.drafters import quantized_blocks
from magicjax.drafters.spec import make_drafter, text_of
from magicjax.parallel import pipeline_stages
from magicjax.prediction.planner.candidates import make_draft, model_sizes
from sharding import part_bytes
from tests.magicjax import keywords, tiny

OPTIONS = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, tree=tiny.TREES["2,2,1"])


def request_of(drafter, target=None, **options):
    return keywords.prepare(
        target or tiny.model(), tiny.prompts(3), drafter=drafter, **OPTIONS | options
    )


def close(x, y):
    # XLA multiplies by the reciprocal of the largest integer.
    np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-6)


def test_the_copy_is_what_loading_quantizes_and_shares_other_arrays():
    target = tiny.model()
    blocks = quantized_blocks.of(target, "int4:8").params["params"]
    wanted = tiny.quantized(target, "int4:8").params["params"]
    assert set(blocks) == {"layers_0", "layers_1"}
    for name, block in blocks.items():
        jax.tree.map(close, block, wanted[name])
        norm = target.params["params"][name]["mlp_norm"]["scale"]
        assert block["mlp_norm"]["scale"] is norm


def test_a_target_is_quantized_once_and_its_copy_is_freed_with_it():
    target = dataclasses.replace(tiny.model())
    drafter = magicjax.FullCacheSpeculation(weights="int8")
    first, second = (request_of(drafter, target).drafter.blocks for _ in range(2))
    ensemble = request_of(magicjax.Ensemble([drafter]), target).drafter
    assert first is second is ensemble.members()[0].blocks
    assert quantized_blocks.of(dataclasses.replace(target), "int8") is not first
    before = len(quantized_blocks._copies)
    del target
    gc.collect()
    assert len(quantized_blocks._copies) < before


def test_only_the_latest_copy_of_a_target_is_kept():
    target = dataclasses.replace(tiny.model())
    first = weakref.ref(quantized_blocks.of(target, "int8"))
    second = quantized_blocks.of(target, "int4:8")
    gc.collect()
    assert first() is None
    assert quantized_blocks.of(target, "int4:8") is second
    part = quantized_blocks.of(target, "int4:8", (1,))
    assert quantized_blocks.of(target, "int4:8", (1,)) is part
    assert quantized_blocks.of(target, "int4:8", (0,)) is not part


@pytest.mark.slow
def test_a_coarse_copy_accepts_less():
    full = magicjax.FullCacheSpeculation(weights="int4:8")
    found = keywords.generate(tiny.model(), tiny.prompts(3), drafter=full, **OPTIONS)
    assert found.stats.acceptance_rate < 1  # the target itself would accept all


def test_memory_counts_the_copy_with_and_without_weights():
    target, drafter = tiny.model(), magicjax.FullCacheSpeculation(weights="int8")
    (copy,) = placement.models_of(request_of(drafter).drafter)
    abstract_model = dataclasses.replace(target, params=None)
    request = request_of(drafter, abstract_model)
    plain = request_of(magicjax.FullCacheSpeculation(), abstract_model)
    added = memory.count(request).new - memory.count(plain).new
    assert added == part_bytes(copy.params)


def test_the_cost_model_reads_the_copy():
    sizes = model_sizes(tiny.model(), None)
    copy = make_draft(magicjax.FullCacheSpeculation(weights="int4:8"), sizes, None)
    elements = sizes.attention + sizes.mlp
    assert copy.sizes.matrix_bytes == elements * (0.5 + 4 / 8)


def test_text_round_trips():
    drafter = make_drafter("self:streaming:256:weights=int4:32", None)
    assert drafter.weights == "int4:32"
    assert text_of(drafter) == "self:streaming:256:weights=int4:32"


@pytest.mark.parametrize(
    ("weights", "target", "message"),
    [
        ("int4", tiny.model, "groups of 128 do not divide the 32 inputs"),
        ("int8", lambda: tiny.quantized(tiny.model(), "int8"), "the target has weights='int8'"),
        ("int8", lambda: magicjax.loading.offload(tiny.model()), "the target is offloaded"),
    ],
)
def test_targets_that_cannot_be_copied_are_refused(weights, target, message):
    drafter = magicjax.FullCacheSpeculation(weights=weights)
    with pytest.raises(ValueError, match=message):
        request_of(drafter, target())


def test_unknown_formats_and_stages_are_refused():
    with pytest.raises(ValueError, match="weights='int3' is unknown"):
        magicjax.SelfSpeculation(weights="int3")
    drafter = magicjax.FullCacheSpeculation(weights="int8")
    with pytest.raises(ValueError, match="stage=2 is not supported"):
        pipeline_stages.check_policy(drafter, 2, 2)
