"""Bytes that a step reads, counted by hand."""

import dataclasses
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from magicjax import cost_model
from models import Llama, abstract_params
from tests.magicjax import tiny


def test_a_step_reads_the_weights_and_the_live_kv_cache():
    model = tiny.model()
    c = model.config
    layer = (
        2 * c.hidden_size * c.num_heads * c.head_dim  # q, out
        + 2 * c.hidden_size * c.num_kv_heads * c.head_dim  # k, v
        + 3 * c.hidden_size * c.intermediate_size
        + 2 * c.hidden_size  # norms
    )
    weights = 4 * (c.num_layers * layer + c.hidden_size + c.vocab_size * c.hidden_size)
    assert cost_model.weight_bytes(model) == weights  # without the input embedding
    kv = 4 * 2 * c.num_layers * c.num_kv_heads * c.head_dim
    assert cost_model.kv_bytes_per_token(model) == kv
    # 3 new tokens after 10: the steps read 10, 11 and 12 tokens of each of 2 rows
    assert cost_model.step_bytes(model, 2, 10, 3) == weights + 2 * 11 * kv


def test_a_tied_embedding_is_read_once_and_half_precision_halves_the_bytes():
    untied = tiny.model()
    config = dataclasses.replace(untied.config, tie_embeddings=True)
    sizes = []
    for dtype in (jnp.float32, jnp.bfloat16):
        params = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype),
            nn.unbox(abstract_params(Llama(config, dtype))),
        )
        model = SimpleNamespace(params=params, layout=None, config=config)
        sizes.append((cost_model.weight_bytes(model), cost_model.kv_bytes_per_token(model)))
    assert sizes[0][0] == cost_model.weight_bytes(untied)
    assert sizes[0] == (2 * sizes[1][0], 2 * sizes[1][1])
