"""Self-speculation drafts with some of the target's layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import magicjax
import models
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.drafters import layer_skipping, quantized_blocks
from magicjax.parallel import pipeline_stages
from magicjax.policies import H2O, SnapKV
from magicjax.prediction import cost_model
from magicjax.prediction.planner.candidates import make_draft, model_sizes
from tests.magicjax import keywords, tiny
from tests.quick import quick

SKIPPED = 1  # the layer of `with_identity` that adds nothing


@functools.cache
def with_identity() -> magicjax.Model:
    """Returns a model of three layers, whose second returns its input."""
    shape = tiny.config(num_layers=3)
    params = tiny.loud(tiny.drawn(shape, 0), np.random.default_rng(7), noise=0.0)
    block = params["params"][f"layers_{SKIPPED}"]
    for part, matrix in (("attention", "out"), ("mlp", "down")):
        block[part][matrix]["weight"][:] = 0
    return magicjax.Model(models.build(shape), tiny.put(params), name="with identity")


def first_layer(target: magicjax.Model) -> magicjax.Model:
    """Returns the plain model of the target's first block."""
    shape = dataclasses.replace(target.config, num_layers=1)
    inner = {name: x for name, x in target.params["params"].items() if name != "layers_1"}
    return magicjax.Model(models.build(shape), {"params": inner}, name="first layer")


def request_of(target, drafter, tree="2,2,1", **options):
    tree = (tiny.TREES | tiny.SPECIAL)[tree]
    settings = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return keywords.prepare(target, tiny.prompts(8), drafter=drafter, tree=tree, **settings)


def proposals(target, drafter, tree="2,2,1", **options) -> list[np.ndarray]:
    """Returns the proposed tokens of every round; 0 in rows that have ended."""
    request = request_of(target, drafter, tree, **options)
    state, found = Decoder(request).start(), []

    @jax.jit
    def propose(target, drafter, state):
        arguments = state.drafter, state.pending, state.cache, state.rows.sampling, request.settings
        return jnp.where(state.ended[:, None], 0, drafter.propose(target, *arguments)[0].tokens)

    while not state.ended.all():
        found.append(np.asarray(propose(request.target, request.drafter, state)))
        state = Decoder(request).decode(state, 1)
    return found


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def test_a_draft_of_the_first_layer_proposes_what_the_plain_model_of_it_does():
    target = tiny.model()
    wanted = proposals(target, magicjax.SmallModel(first_layer(target)))
    assert equal(proposals(target, magicjax.FullCacheSpeculation(layers="0")), wanted)


@struct.dataclass
class OtherCache(magicjax.FullCacheSpeculation):
    """A wrong drafter, which reads the keys and values of the layers after its own."""

    def propose(self, target, state, root, cache, sampling, settings):
        k, v = ((*layers[1:], layers[0]) for layers in (cache.k, cache.v))
        cache = cache.replace(k=k, v=v)
        arguments = target, state, root, cache, sampling, settings
        return magicjax.FullCacheSpeculation.propose(self, *arguments)


@pytest.mark.slow
def test_a_draft_that_reads_the_entries_of_another_layer_is_detected():
    wanted = proposals(tiny.model(), magicjax.FullCacheSpeculation(layers="0"))
    assert not equal(proposals(tiny.model(), OtherCache(layers="0")), wanted)


SNAPKV = magicjax.SelfSpeculation(SnapKV(window=5, kernel=3, recent=7), 13, refresh_every=2)
# Name: (drafter, tree, options of the request).
CASES = {
    "refreshed": (SNAPKV, "2,2,1", {}),
    "accumulated int8": (
        magicjax.SelfSpeculation(H2O(window=30, recent=7), 13, refresh_every=3, kv_dtype="int8"),
        "chain4",
        {},
    ),
    "pages": (magicjax.PageRetrieval(12, refresh_every=2, page_size=4), "irregular", {}),
    "quantized": (magicjax.FullCacheSpeculation(weights="int4:8"), "2,2,1", {}),
    "quantized on a ring": (dataclasses.replace(SNAPKV, weights="int8"), "chain4", {}),
    "dynamic": (SNAPKV, "dynamic", {}),
    "sampled": (SNAPKV, "2,2,1", dict(temperature=1.0, seed=3)),
}


@pytest.mark.parametrize("case", quick(CASES, "refreshed"))
@pytest.mark.slow
def test_to_skip_a_layer_that_adds_nothing_changes_no_proposal(case):
    drafter, tree, options = CASES[case]
    wanted = proposals(with_identity(), drafter, tree, **options)
    found = proposals(with_identity(), dataclasses.replace(drafter, layers="0,2"), tree, **options)
    assert equal(found, wanted)


@pytest.mark.slow
def test_to_skip_another_layer_changes_proposals():
    wanted = proposals(with_identity(), SNAPKV)
    assert not equal(proposals(with_identity(), dataclasses.replace(SNAPKV, layers="0,1")), wanted)


def test_nothing_is_copied():
    target = with_identity()
    part = layer_skipping.of_model(target, (0, 2))
    inner, whole = part.params["params"], target.params["params"]
    assert part.config.num_layers == 2 and sorted(inner) == sorted(whole.keys() - {"layers_2"})
    for name, original in {"layers_0": "layers_0", "layers_1": "layers_2"}.items():
        same = jax.tree.map(lambda x, y: x is y, inner[name], whole[original])
        assert all(jax.tree.leaves(same))
    assert inner["unembedding"] is whole["unembedding"]


def test_the_draft_cache_and_the_copy_have_the_drafted_layers_only():
    target, drafter = tiny.model(), dataclasses.replace(SNAPKV, layers="1", weights="int8")
    request = request_of(target, drafter)
    state = Decoder(request).start().drafter
    assert [len(x) for x in (state.cache.k, state.cache.pinned, state.stats.queries)] == [1] * 3
    assert drafter.cache_bytes(target, 3, 64) * 2 == SNAPKV.cache_bytes(target, 3, 64)
    blocks, all_blocks = request.drafter.blocks, quantized_blocks.of(target, "int8")
    assert set(blocks.params["params"]) == {"layers_0"}
    copied = blocks.params["params"]["layers_0"], all_blocks.params["params"]["layers_1"]
    jax.tree.map(np.testing.assert_array_equal, *copied)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0", (0,)), ("3-5", (3, 4, 5)), ("0-2,5,7-8", (0, 1, 2, 5, 7, 8)), ("2-2,3", (2, 3))],
)
def test_numbers_and_ranges_are_layers(text, layers):
    assert layer_skipping.parse(text) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "such as 0-9,20-29") for text in ("", "0-", "-1", "a", "0, 1", "0-1-2", "10000")),
        *((text, "in ascending order") for text in ("1,0", "0,0", "3-1", "0-3,2-5", "2,5-4")),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=f"^layers='{text}': .*{message}"):
        magicjax.SelfSpeculation(layers=text)


REFUSED = {
    "2": (tiny.model, "the layers of the target are 0 to 1; use some of them"),
    "0-1": (tiny.model, "the target has no other layers than these 2; omit layers"),
    "1": (lambda: magicjax.offload(tiny.model()), "is offloaded, .*; omit layers, or load"),
}


@pytest.mark.parametrize("layers", REFUSED)
@pytest.mark.parametrize("make", [magicjax.FullCacheSpeculation, magicjax.SelfSpeculation])
def test_targets_that_cannot_be_divided_are_refused_before_compilation(layers, make):
    target, message = REFUSED[layers]
    before = program_cache.totals()
    with pytest.raises(ValueError, match=f"layers='{layers}': .*{message}"):
        request_of(target(), make(layers=layers))
    assert program_cache.totals() == before


def test_stages_are_refused():
    with pytest.raises(ValueError, match="layers='0': the target has 2 stages, .*; omit layers"):
        layer_skipping.check("0", 4, stages=2)
    drafter = magicjax.SelfSpeculation(layers="0")
    with pytest.raises(ValueError, match="layers='0' of self-speculation with stage=2 is not"):
        pipeline_stages.check_policy(drafter, 4, 2)


def test_the_cost_model_runs_the_drafted_layers_and_the_unembedding():
    target = model_sizes(with_identity(), None)
    machine = cost_model.Machine(cost_model.find_device("h100"))

    def step(drafter):
        return cost_model.draft_step(make_draft(drafter, target, None), machine, 1, 64)

    whole = step(magicjax.FullCacheSpeculation())
    part = step(magicjax.FullCacheSpeculation(layers="0,2"))
    for name in ("projections", "attention", "overhead"):
        assert part[name] == pytest.approx(whole[name] * 2 / 3)
    assert part["logits"] == whole["logits"]
    with pytest.raises(ValueError, match="layers='3': the layers of the target are 0 to 2"):
        step(magicjax.FullCacheSpeculation(layers="3"))
