"""Bytes that a step reads, counted by hand."""

import dataclasses

import jax
import pytest

import magicjax
import models
from magicjax.prediction import cost_model, planner
from magicjax.prediction.planner.candidates import make_candidate, model_sizes
from tests.magicjax import tiny


def test_a_step_reads_the_weights_and_the_kv_cache():
    model = tiny.model()
    c = model.config
    layer = (
        2 * c.hidden_size * c.num_heads * c.head_dim  # q, out
        + 2 * c.hidden_size * c.num_kv_heads * c.head_dim  # k, v
        + 3 * c.hidden_size * c.intermediate_size
        + 2 * c.hidden_size  # norms
    )
    weights = 4 * (c.num_layers * layer + c.hidden_size + c.vocab_size * c.hidden_size)
    sizes = model_sizes(model, None)
    assert sizes.weight_bytes == weights  # without the input embedding
    embedding = 4 * c.vocab_size * c.hidden_size
    assert weights + embedding == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert sizes.kv_bytes == 4 * 2 * c.num_layers * c.num_kv_heads * c.head_dim


def test_layers_with_a_window_read_no_more_than_it():
    config = dataclasses.replace(tiny.config(num_layers=4), sliding_window=64, full_layers=(1,))
    sizes = cost_model.sizes_of(config)
    assert sizes.slots_per_layer(40) == 40
    assert sizes.slots_per_layer(1000) == (1000 + 3 * 64) / 4
    assert sizes.key != cost_model.sizes_of(tiny.config(num_layers=4)).key


def test_more_tokens_read_more_experts():
    mixture = tiny.config(num_experts=8, experts_per_token=2)
    sizes, dense = cost_model.sizes_of(mixture), cost_model.sizes_of(tiny.config())
    assert sizes.active_share(1) == 2 / 8
    assert sizes.active_share(2) == pytest.approx(1 - (6 / 8) ** 2)
    assert dense.active_share(1) == dense.active_share(9) == 1
    expert = 3 * mixture.hidden_size * mixture.intermediate_size
    router = mixture.num_layers * mixture.num_experts * mixture.hidden_size
    assert sizes.mlp == mixture.num_layers * 8 * expert + router
    idle = sizes.itemsize * 3 / 4 * sizes.mlp
    assert sizes.read_bytes(1) == pytest.approx(sizes.weight_bytes - idle)
    shared = cost_model.sizes_of(dataclasses.replace(mixture, shared_expert_size=24))
    gate = mixture.num_layers * mixture.hidden_size
    assert shared.mlp == sizes.mlp + gate
    shared_expert = 3 * 24 * mixture.hidden_size * mixture.num_layers  # which each token uses
    assert shared.attention == sizes.attention + shared_expert


def test_a_mixture_is_planned_a_shorter_chain_than_a_dense_model():
    machine = cost_model.Machine(cost_model.find_device("h100"))
    depths = {}
    for name in ("qwen3-30b-a3b", "llama-3.1-8b"):
        sizes = cost_model.sizes_of(models.preset(name))
        lookup = make_candidate(magicjax.PromptLookup(), sizes, "bfloat16", [[0.6]])
        depths[name] = planner.plan(sizes, [lookup], machine, 1, 8192).best.tree.depth
    assert 1 <= depths["qwen3-30b-a3b"] < depths["llama-3.1-8b"] / 2
