"""Blocks streamed from host memory give the text of blocks on the device, two layers at a time."""

import dataclasses
import functools
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from magicjax.cli import fit
from magicjax.decoding import memory
from magicjax.decoding.decoder import Decoder
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import AttendTo
from magicjax.parallel import offloading
from magicjax.parallel.layouts import Offloaded
from magicjax.prediction.aot import aot_compile, memory_estimate
from sharding import host
from tests.eight_devices import Eight
from tests.forget import forget_programs
from tests.magicjax import keywords, tiny
from tests.quick import quick

DEEP = tiny.config(num_layers=4)
TREE = magicjax.expansion((2, 2, 1))
SAMPLED = dict(seed=3, temperature=0.8)


@functools.cache
def model(shape) -> magicjax.Model:
    """Returns a model whose text depends on its context."""
    params = tiny.loud(tiny.drawn(shape, 0), np.random.default_rng(7), 0.05)
    return magicjax.Model(models.build(shape), tiny.put(params), name="deep")


@functools.cache
def quantized(shape, weights: str) -> magicjax.Model:
    return tiny.quantized(model(shape), weights)


@functools.cache
def offloaded(shape, weights: str | None = None) -> magicjax.Model:
    return magicjax.offload(quantized(shape, weights) if weights else model(shape))


def text(target: magicjax.Model, **options) -> np.ndarray:
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return keywords.generate(target, tiny.prompts(3), **options).tokens


DRAFTS = {
    "plain": {},
    "plain sampled": SAMPLED,
    "self": dict(drafter=magicjax.SelfSpeculation(budget=24), tree=TREE),
    "refreshed": dict(drafter=magicjax.SelfSpeculation("snapkv", budget=64, refresh_every=2)),
    "quest": dict(drafter=tiny.drafter("quest"), tree=TREE),
    "prompt-lookup": dict(drafter=magicjax.PromptLookup()),
    "dynamic": dict(
        drafter=magicjax.SelfSpeculation(budget=24), tree=magicjax.DynamicTree(9, 4, 3)
    ),
    "small sampled": dict(drafter=magicjax.SmallModel(tiny.model("near")), tree=TREE) | SAMPLED,
    "eagle sampled": dict(drafter=tiny.drafter("eagle"), tree=TREE) | SAMPLED,
    "cascade": dict(drafter=tiny.drafter("cascade"), tree=tiny.TREES["chain4"]),
}


@pytest.mark.parametrize("draft", quick(DRAFTS, "self"))
def test_an_offloaded_model_generates_the_text_of_the_resident_one(draft):
    np.testing.assert_array_equal(
        text(offloaded(DEEP), **DRAFTS[draft]), text(model(DEEP), **DRAFTS[draft])
    )


@jax.jit
def hidden(target: magicjax.Model, tokens):
    """Returns the hidden states of a prompt."""
    triangle = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = full_cache.empty(target, len(tokens), 64)
    return target(tokens, positions, AttendTo(cache, triangle, None, positions=positions))[0]


def test_layers_of_two_kinds_have_a_stack_each():
    target = model(tiny.config(**tiny.HYBRID | dict(num_layers=3, linear_layers=(0, 2))))
    streamed, tokens = magicjax.offload(target), jnp.arange(12, dtype=jnp.int32)[None] % 7
    nets, attention = streamed.layout.blocks
    assert [stack["mlp"]["up"]["weight"].shape[0] for stack in (nets, attention)] == [2, 1]
    expected = np.asarray(hidden(target, tokens))
    found = np.asarray(hidden(streamed, tokens))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # Negative control: the layers of a kind in another order.
    swapped = jax.tree.map(lambda x: jax.device_put(np.asarray(x)[::-1], x.sharding), nets)
    mistaken = dataclasses.replace(streamed, layout=Offloaded((swapped, attention)))
    assert np.abs(hidden(mistaken, tokens) - expected).max() > 1e-2 * np.abs(expected).max()


@pytest.mark.slow
def test_one_layer_is_streamed():
    shape = tiny.config(num_layers=1)
    np.testing.assert_array_equal(text(offloaded(shape)), text(model(shape)))


@pytest.mark.parametrize(
    ("weights", "draft"), quick(itertools.product(["int8", "int4:8"], ["self", "small sampled"]))
)
def test_offloaded_quantized_weights_give_the_text_of_resident_ones(weights, draft):
    target, options = offloaded(DEEP, weights), DRAFTS[draft]
    assert str(target.weights) == weights
    found = text(target, **options)
    np.testing.assert_array_equal(found, text(quantized(DEEP, weights), **options))
    if weights != "int8":  # whose text may be that of the unquantized weights
        assert (found != text(model(DEEP), **options)).any()


# What is on the device, read from compiled programs. Layers outweigh everything else.
HEAVY = tiny.config(num_layers=6, hidden_size=256, intermediate_size=1024)
LAYER_BYTES = 4 * (256 * (4 + 2 * 2 + 4) * 8 + 3 * 256 * 1024 + 2 * 256)


def shaped() -> magicjax.Model:
    module = models.build(HEAVY)
    rest, _ = models.split_blocks(nn.meta.unbox(models.abstract_params(module)))
    return magicjax.Model(module, rest, layout=Offloaded(offloading.shapes(module)))


def loop(target, drafter=None, tree=None):
    """Returns the compiled loop."""
    request = keywords.prepare(
        target,
        [np.zeros(20, np.int32)],
        drafter=drafter,
        tree=tree,
        max_tokens=tiny.NEW,
        eos_token_id=[],
        backend="xla",
        put=None,
    )
    decoder = Decoder(request)
    return decoder.loop(decoder.state_shapes())


def streamed_bytes(compiled, **draft) -> int:
    """Returns the temporary memory beyond that of the loop of the same model on the device."""
    module = models.build(HEAVY)
    resident = magicjax.Model(module, nn.meta.unbox(models.abstract_params(module)))
    found = [
        one.memory_analysis().temp_size_in_bytes for one in (compiled, loop(resident, **draft))
    ]
    return found[0] - found[1]


@pytest.mark.parametrize("draft", quick([{}, DRAFTS["self"]]), ids=["plain", "self"])
def test_no_more_than_two_layers_are_on_the_device(draft):
    compiled = loop(shaped(), **draft)
    # Buffers of several sizes leave gaps, which are smaller than a matrix of the MLP.
    gaps = 4 * HEAVY.hidden_size * HEAVY.intermediate_size
    assert LAYER_BYTES < streamed_bytes(compiled, **draft) < 2 * LAYER_BYTES + gaps
    block_arrays = stacks(compiled.as_text())
    assert len(block_arrays) == 9 and all("S(5)" in found for found in block_arrays)


@pytest.mark.slow
def test_a_third_layer_on_the_device_is_detected(monkeypatch):
    monkeypatch.setattr(host, "_zero_after", lambda x: 0)  # so nothing keeps fetches in their order
    compiled = loop(dataclasses.replace(shaped(), shards=1))  # a program of its own
    assert streamed_bytes(compiled) > 2.5 * LAYER_BYTES


def stacks(text: str) -> list[str]:
    """Returns a program's arguments that have a matrix of all layers; S(5) is host memory."""
    layout = re.search(r"entry_computation_layout={\((.*?)\)->", text)[1]
    return re.findall(rf"f32\[{HEAVY.num_layers},[\d,]+\]{{[^}}]*}}", layout)


def test_a_checkpoint_is_loaded_without_its_blocks(directory):
    whole, streamed = (
        magicjax.load(directory, offload=offload, dtype="float32") for offload in (False, True)
    )
    layers = models.split_blocks(whole.params)[1]
    for i, layer in enumerate(layers):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_array_equal(a[i], b),
            streamed.layout.blocks[0],
            layer,
        )
    assert (
        streamed.params.keys() == whole.params.keys()
        and "layers_0" not in streamed.params["params"]
    )
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(streamed.layout.blocks)} == {
        host.HOST
    }
    assert (whole.offload, streamed.offload) == (False, True)
    small = magicjax.load(directory, "float32", weights="int8", offload=True)
    assert small.offload and small.layout.blocks[0]["mlp"]["up"]["weight"].dtype == jnp.int8


def test_a_machine_without_the_memory_is_refused_before_anything_is_loaded():
    module = models.build(models.preset("llama-3.1-70b"), "bfloat16")
    with pytest.raises(
        ValueError, match=r"offload needs 17\d.\d GB of host memory, .* 24.0 GB are"
    ):
        offloading.check_host_memory(module, available=int(24e9))
    for weights in ("int8", "int4"):  # numpy does not pack int4 while it loads
        small = models.build(module.config, module.dtype, models.WeightFormat.parse(weights))
        with pytest.raises(ValueError, match=r"offload needs \d\d.\d GB of host memory"):
            offloading.check_host_memory(small, available=int(24e9))
    offloading.check_host_memory(module, available=int(300e9))


def test_invalid_offload_is_refused(directory):
    with pytest.raises(ValueError, match="offload='int4' is unknown: use True or False, and"):
        magicjax.load(directory, offload="int4")
    with pytest.raises(ValueError, match="the model 'deep' is offloaded already"):
        magicjax.offload(offloaded(DEEP))


def test_caches_that_do_not_fit_are_refused_and_a_model_that_would_fit_is_logged(
    monkeypatch, caplog
):
    monkeypatch.setattr(offloading, "device_memory", lambda: 50_000)
    target = magicjax.offload(model(DEEP))
    monkeypatch.setattr(memory, "free_memory", lambda target, mesh: 50_000)
    with pytest.raises(memory.OutOfMemoryError, match="a batch of .* and 5e-05 GB are available"):
        text(target)
    assert "would fit" not in caplog.text
    monkeypatch.setattr(offloading, "device_memory", lambda: 10_000_000)
    target = magicjax.offload(model(DEEP))
    assert "offload: the model (0.00 GB) would fit the device (0.01 GB)" in caplog.text
    monkeypatch.undo()
    text(target)


@pytest.mark.slow
def test_a_row_of_nans_changes_nothing_in_the_others(monkeypatch):
    """What orders the fetches must not be moved by it, or all rows get another layer's weights."""
    prompts, texts = tiny.prompts(3), text(model(DEEP))
    others_have = np.concatenate([*prompts, *texts[1:]])
    index, token = next((i, t) for i, t in enumerate(texts[0]) if t not in others_have)
    table = model(DEEP).params["params"]["embedding"].at[token].set(jnp.nan)
    inner = offloaded(DEEP).params["params"] | {"embedding": table}
    poisoned = dataclasses.replace(offloaded(DEEP), params={"params": inner})

    def results(target):
        config = magicjax.EngineConfig(slots=3, capacity=128, prefill_chunk=16)
        engine = magicjax.Engine(target, config=config)
        params = magicjax.SamplingParams(max_tokens=tiny.NEW)
        handles = [engine.submit(prompt, params) for prompt in prompts]
        engine.run()
        return [handle.result() for handle in handles]

    first, *others = results(poisoned)
    assert (first.finish_reason, first.error_kind) == ("error", "nan")
    np.testing.assert_array_equal(first.tokens, texts[0][: index + 1])
    for result, expected in zip(others, texts[1:], strict=True):
        assert result.finish_reason == "length"
        np.testing.assert_array_equal(result.tokens, expected)
    # Negative control: NaN moves the order.
    monkeypatch.setattr(host, "_zero_after", lambda x: jnp.isnan(x.ravel()[0]).astype(jnp.int32))
    forget_programs()
    try:
        _, *moved = results(poisoned)
    finally:
        forget_programs()
    assert any((x.tokens != y.tokens).any() for x, y in zip(moved, others, strict=True))


@pytest.mark.parametrize("weights", quick([None, "int4"], "int4"))
def test_fit_counts_the_streamed_layers_once(weights):
    load = aot_compile.AotWorkload(
        "opt-125m", "", "", 4, 1024, "h100", offload=True, weights=weights
    )
    counted = memory_estimate.count(load)
    own = counted.footprint
    of = {"temporary bytes": own.streamed + 10**6, "argument bytes in host memory": 7}
    names = {"prefill": of, "init": of | {"temporary bytes": 0}, "decode": of}
    found = fit.summary(load, counted, names, 10**10)
    sizes = found["bytes on each device"]
    assert sizes["total"] == counted.resident + 10**6 and sizes["in host memory"] == 7
    per_row = (own.target_kv + counted.rest) / 4 + 10**6 / 4
    assert found["largest batch"] == pytest.approx((0.95e10 - own.weights) / per_row, rel=0.05)


def on_mesh(data: int, model: int, kv_heads: int | str) -> list:
    """Runs in a process of eight devices."""
    from tests.magicjax import mesh_cases

    mesh = magicjax.make_mesh(data, model)
    target = magicjax.offload(mesh_cases.target(kv_heads))
    drafter = magicjax.SelfSpeculation(budget=24)
    options = dict(drafter=drafter, tree=magicjax.chain(3), max_tokens=12, eos_token_id=[])
    found = keywords.generate(target, mesh_cases.prompts(), mesh=mesh, **options)
    return [
        found.tokens.tolist(),
        keywords.generate(target, mesh_cases.prompts(), **options).tokens.tolist(),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("kv_heads", [4, "int4", "qwen3.5"])
def test_on_a_mesh_every_device_streams_its_part(data, model, kv_heads):
    process = Eight()
    found, expected = process(on_mesh, data=data, model=model, kv_heads=kv_heads)
    process.close()
    assert found == expected
