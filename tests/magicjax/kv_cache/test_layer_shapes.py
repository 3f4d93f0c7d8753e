"""Caches of models whose layers have heads of several sizes and numbers (Gemma 4)."""

import dataclasses

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax import placement
from magicjax.decoding.decoder import Decoder
from magicjax.kv_cache import full_cache
from magicjax.parallel import offloading, pipeline_stages
from magicjax.prediction.cost_model.work import sizes_of
from sharding import abstract_mesh
from tests.magicjax import family_cases, keywords, tiny
from tests.magicjax.kv_cache.test_loop_caches import (
    check_cache,
    check_draft_cache,
    prompts_around_the_budget,
)
from tests.quick import quick

OPTIONS = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
SELF = magicjax.SelfSpeculation("snapkv", budget=12)
KINDS = ("gemma-4", "gemma-4-shared")


def target(kind: str = KINDS[0], bits: int | None = None) -> magicjax.Model:
    model = family_cases.model(kind, tiny.VOCAB)
    return magicjax.Model(model.module, model.params, kv_bits=bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [None, 8])
def test_the_bytes_of_caches_are_counted_by_layer(kind, bits):
    model = target(kind, bits)
    request = keywords.prepare(model, tiny.prompts(3), drafter=SELF, **OPTIONS)
    cache = full_cache.empty(model, 3, request.settings.capacity)
    shapes = {k.shape[1::2] for k in cache.k if k is not None}
    assert shapes == ({(4, 8), (2, 16)} if kind == "gemma-4" else {(2, 8), (2, 16)})
    assert cache.k.count(None) == model.config.shared_kv_layers
    counted, of_draft = request.kv_bytes
    assert counted == sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v)))
    draft = Decoder(request).state_shapes().drafter.cache
    entries = jax.tree.leaves((draft.k, draft.v, draft.pinned))
    assert of_draft == sum(x.size * x.dtype.itemsize for x in entries)


@pytest.mark.parametrize("kind", quick(KINDS, "gemma-4-shared"))
@pytest.mark.parametrize("bits", quick([None, 8], None))
def test_after_every_round_caches_equal_a_fresh_prefill(kind, bits):
    model, prompts = target(kind, bits), prompts_around_the_budget()
    request = keywords.prepare(
        model, prompts, drafter=SELF, tree=tiny.TREES["irregular"], **OPTIONS
    )
    state, rounds = Decoder(request).start(), 0
    while not np.asarray(state.ended).all():
        state = Decoder(request).decode(state, 1)
        rounds += 1
        if rounds % 4:
            continue
        seen = jax.tree.map(np.array, state.replace(rows=state.rows.replace(sampling=None)))
        texts = [
            np.concatenate([prompt, output[:emitted]])
            for prompt, output, emitted in zip(prompts, seen.output, seen.emitted, strict=True)
        ]
        check_cache(seen.cache, model, texts, seen.cache.lengths, 1e-5)
        check_draft_cache(seen.drafter.cache, seen.cache)
    assert rounds < tiny.NEW


def test_the_cost_model_counts_the_heads_of_each_layer():
    config = models.preset("gemma-4-31b")
    sizes = sizes_of(config)
    entry = 50 * 16 * 256 + 10 * 4 * 512
    assert sizes.kv_bytes == 2 * 2 * entry
    text = 100_000
    read = 50 * 16 * 256 * 1024 + 10 * 4 * 512 * text
    assert sizes.slots_per_layer(text) * sizes.kv_bytes == pytest.approx(2 * 2 * read)
    products = 32 * (50 * 256 * 1024 + 10 * 512 * text)
    assert sizes.score_products(text, 0) == products
    whole = magicjax.Model(models.build(config, "bfloat16"), None)
    assert whole.kv_bytes(1, 131072) == 2 * 2 * (50 * 16 * 256 * 1152 + 10 * 4 * 512 * 131072)


def test_what_needs_equal_layers_is_an_error():
    config = models.preset("gemma-4-31b")
    shared = models.preset("gemma-4-e2b")
    for check in (offloading.check_layers, lambda x: pipeline_stages.check_layers(x, 5)):
        with pytest.raises(ValueError, match="with shared_kv_layers=20 and layer_input_size=256"):
            check(shared)
    # Heads of one kind of layers are not replicated where those of the other are divided.
    few = dataclasses.replace(config, num_kv_heads=2, full_kv_heads=4)
    for heads, devices, message in ((config, 8, "16 .* the 4"), (few, 4, "2 .* the 4")):
        with pytest.raises(ValueError, match=f"model={devices} does not divide the {message} of "):
            placement.split_of(heads, None, abstract_mesh(model=devices))
    assert placement.split_of(config, None, abstract_mesh(model=4)).kv_shards == 4


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (magicjax.PageRetrieval(12, page_size=4), "does not support layers that read the keys of"),
        (
            magicjax.SelfSpeculation(budget=12, layers="0-1"),
            "layers='0-1' of self-speculation with",
        ),
    ],
)
def test_drafters_that_need_layers_with_keys_of_their_own_are_errors(drafter, message):
    with pytest.raises(ValueError, match=message):
        keywords.prepare(target("gemma-4-shared"), tiny.prompts(1), drafter=drafter, **OPTIONS)
