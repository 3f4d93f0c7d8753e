"""Targets with states: what the loop compiles, and options that they rule out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from magicjax import placement
from magicjax.decoding.decoder import Decoder
from magicjax.kv_cache import full_cache, state_layers
from magicjax.parallel import pipeline_stages
from sharding import abstract_mesh, factored
from tests.fuzz import checks
from tests.magicjax import keywords, recomputation, tiny
from tests.magicjax.decoding import test_compiled
from tests.quick import quick

OPTIONS = dict(max_tokens=8, eos_token_id=tiny.NEVER)
# States that outweigh everything else: 2 rows, 8 heads of 128 x 128.
LARGE = models.DeltaNetShape(key_heads=4, value_heads=8, key_dim=128, value_dim=128, conv_width=4)
ROWS, SIZE = 2, 2 * 8 * 128 * 128


def loop_of(drafter, tree) -> jax.stages.Compiled:
    config = tiny.config(**tiny.HYBRID | dict(delta_net=LARGE, num_layers=3, linear_layers=(0, 2)))
    prompts = [np.zeros(20, np.int32)] * ROWS
    target = test_compiled.shaped(config)
    request = keywords.prepare(target, prompts, drafter=drafter, tree=tree, **OPTIONS)
    return Decoder(request).loop(Decoder(request).state_shapes())


def copies(program: jax.stages.Compiled) -> dict[str, int]:
    """Returns the moves of whole states; broadcasts of decays are parts of fused operations."""
    found = test_compiled.moves(program.as_text(), SIZE)
    return {name: count for name, count in found.items() if name != "broadcast"}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
def test_the_loop_copies_no_state_and_has_none_for_each_node():
    program = loop_of(magicjax.PromptLookup(), magicjax.expansion((15,)))
    assert copies(program) == {}
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < 6 * 4 * SIZE  # states of 16 nodes would be 16 times as much, in each layer


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
def test_a_product_of_grouped_heads_that_copies_a_state_is_detected(changed):
    """Negative control."""

    def grouped(queries, s, decays):
        every = jnp.concatenate(queries, 1)
        batch, length, key_heads, size = every.shape
        states = s.reshape(batch, key_heads, -1, size, s.shape[-1])
        out = jnp.einsum("btkd,bkrdv->btkrv", every, states).reshape(batch, length, -1, size)
        return [x * jnp.exp(decays.from_state)[..., None] for x in jnp.split(out, len(queries), 1)]

    changed.setattr(state_layers, "_from_state", grouped)
    assert copies(loop_of(None, None)) != {}


def test_bytes_of_states_are_those_of_the_arrays():
    target = tiny.model("hybrid")
    for rows, slots in ((1, 64), (3, 192)):
        cache = full_cache.empty(target, rows, slots)
        found = sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v, cache.states)))
        assert target.kv_bytes(rows, slots) == found
    # A float32 state [4, 8, 6], and three inputs of 2 * 16 + 24 channels.
    assert target.state_bytes == 4 * (4 * 8 * 6 + 3 * 56)


@pytest.mark.slow
def test_a_target_without_attention_drafts_by_a_policy_that_has_nothing_to_choose():
    module = models.build(tiny.config(**tiny.HYBRID | dict(linear_layers=(0, 1))))
    params = tiny.loud(tiny.drawn(module.config, 0), np.random.default_rng(0), 0.0)
    target = magicjax.Model(module, tiny.put(params), name="states")
    drafter, prompts = magicjax.SelfSpeculation("h2o", 24), tiny.prompts(3)
    output = keywords.generate(target, prompts, drafter=drafter, **OPTIONS)
    assert output.stats.acceptance_rate == 1  # a draft has all that the target has
    for prompt, tokens in zip(prompts, output.tokens, strict=True):
        checks.greedy(target, prompt, tokens, recomputation.logits)


@pytest.mark.parametrize("weights", quick(["int8", "int4:8"], "int4:8"))
def test_quantized_matrices_are_those_of_each_kind_of_layer(weights):
    """The logits are those of the dequantized model; decays and beta are not quantized."""
    target = tiny.quantized(tiny.model("hybrid"), weights)
    names = {name.partition("/")[2] for name, _ in target.weights.texts}
    assert names >= {"delta_net/z", "delta_net/out", "attention/gate", "attention/out", "mlp/up"}
    assert not names & {"delta_net/a", "delta_net/b", "delta_net/conv"}
    text = np.arange(40) * 7 % tiny.VOCAB
    found, plain = (recomputation.logits(x, text) for x in (target, tiny.dequantized(target)))
    rounded = np.abs(plain - recomputation.logits(tiny.model("hybrid"), text)).max()
    assert np.abs(found - plain).max() < 1e-4 * np.abs(plain).max() < rounded


def test_shapes_that_do_not_fit_are_errors():
    shape = dict(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_width=4)
    for wrong, message in (
        (
            dict(value_heads=3),
            "value_heads=3 of a gated delta net is not a multiple of key_heads=2",
        ),
        (dict(conv_width=1), "conv_width=1 of a gated delta net: at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            models.DeltaNetShape(**shape | wrong)
    for wrong, message in (
        (dict(delta_net=None), "linear layers need their shapes"),
        (dict(linear_layers=(2,)), "linear_layers=(2,): name layers from 0 to 1"),
        (dict(sliding_window=8), "sliding_window=8 with linear_layers is not supported"),
        (dict(shared_expert_size=8), "shared_expert_size=8 without num_experts"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            tiny.config(**tiny.HYBRID | wrong)


def test_options_that_states_rule_out_are_errors():
    target, near = tiny.model("hybrid"), tiny.model("hybrid near")
    for drafter, message in (
        (magicjax.PageRetrieval(64, layers="0"), "has a sliding window or a state"),
        (magicjax.SmallModel(near, policy="streaming"), "layers with a state .* omit policy="),
    ):
        with pytest.raises(ValueError, match=message):
            keywords.generate(target, [[1, 2, 3]], drafter=drafter, **OPTIONS)
    with pytest.raises(ValueError, match="stage=2 gives .* or gated delta nets, .* alike: use 1"):
        pipeline_stages.check_layers(target.config, 2)
    with pytest.raises(
        ValueError, match="2 key heads of gated delta nets are not a multiple of 4; use model=1, 2"
    ):
        placement.split_of(target.config, None, factored(abstract_mesh(1, 4)))
