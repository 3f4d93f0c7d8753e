import dataclasses
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import metrics
from models import Llama, abstract_params


def test_repeated_ngrams_of_a_text_counted_by_hand():
    # ab ba ab ba ab: three of five stood there before
    assert metrics.repeated_ngrams(np.array([[1, 2, 1, 2, 1, 2]]), n=2) == 3 / 5


def test_repeats_in_another_row_do_not_count():
    rows = np.array([[1, 2, 3, 4], [1, 2, 3, 4]])
    assert metrics.repeated_ngrams(rows, n=2) == 0.0


@pytest.mark.parametrize("length", [8, 9, 128])
def test_one_token_for_ever_is_all_repetition_but_the_first_8gram(length):
    grams = length - 7
    assert metrics.repeated_ngrams(np.ones((2, length), int)) == (grams - 1) / grams


def test_a_text_too_short_for_an_8gram_is_an_error():
    with pytest.raises(ValueError, match="7 new tokens hold no 8-gram: generate at least 8"):
        metrics.repeated_ngrams(np.ones((1, 7), int))


def test_agreement_counts_the_second_half_only():
    wanted = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    drafted = np.array([[0, 0, 3, 4], [0, 0, 7, 0]])
    assert metrics.agreement(wanted, drafted) == 3 / 4


def test_bytes_of_a_step_are_those_of_the_weights_it_reads_and_of_live_keys_and_values(tiny):
    c = tiny.config
    layer = (
        2 * c.hidden_size * c.num_heads * c.head_dim  # q, out
        + 2 * c.hidden_size * c.num_kv_heads * c.head_dim  # k, v
        + 3 * c.hidden_size * c.intermediate_size
        + 2 * c.hidden_size  # norms
    )
    weights = 4 * (c.num_layers * layer + c.hidden_size + c.vocab_size * c.hidden_size)
    assert metrics.weight_bytes(tiny) == weights  # the input embedding is looked up, not read
    kv = 4 * 2 * c.num_layers * c.num_kv_heads * c.head_dim
    assert metrics.kv_bytes_per_token(tiny) == kv
    # 3 new tokens after 10: the steps read 10, 11 and 12 tokens of each of 2 rows
    assert metrics.step_bytes(tiny, 2, 10, 3) == weights + 2 * 11 * kv


def test_a_tied_embedding_is_read_once_and_half_precision_halves_the_bytes(tiny):
    config = dataclasses.replace(tiny.config, tie_embeddings=True)
    sizes = []
    for dtype in (jnp.float32, jnp.bfloat16):
        params = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype),
            nn.unbox(abstract_params(Llama(config, dtype))),
        )
        model = SimpleNamespace(params=params, config=config)
        sizes.append((metrics.weight_bytes(model), metrics.kv_bytes_per_token(model)))
    assert sizes[0][0] == metrics.weight_bytes(tiny)
    assert sizes[0] == (2 * sizes[1][0], 2 * sizes[1][1])
