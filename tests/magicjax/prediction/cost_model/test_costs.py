"""Bytes that a step reads, counted by hand."""

import jax

from magicjax.prediction.planner.candidates import model_sizes
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
