"""Fixtures for tests of models: reference attention, and the golden models."""

import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.quick import quick
from tests.reference_attention import attend_of

GOLDEN = pathlib.Path(__file__).parent / "golden"


attend_causally = attend_of(None)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(module, params, tokens):
    """Logits [B,T,V] of whole texts, each starting at position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = module.apply(params, tokens, positions, attend_of(module.config))
    return module.apply(params, hidden, method="unembed")


@pytest.fixture(name="attend_causally")
def _attend_causally():
    return attend_causally


@pytest.fixture(name="logits_of")
def _logits_of():
    return logits_of


def random_params(module, seed=0):
    """Parameters drawn by numpy, norms and biases included, without compilation."""
    draw = np.random.default_rng(seed)

    def leaf(shape):
        return jax.device_put(draw.normal(0.0, 0.5, shape.shape).astype(shape.dtype))

    return jax.tree.map(leaf, nn.meta.unbox(models.abstract_params(module)))


@pytest.fixture(name="random_params")
def _random_params():
    return random_params


CASES = sorted(p.name for p in GOLDEN.iterdir())
# The others differ from one of these in few settings.
QUICK = ("falcon_40b", "llama_llama3", "mpt", "gemma3", "gpt_oss", "qwen3_moe")
QUICK += ("opt_post_norm", "phi3_longrope", "starcoder", "smollm3")
QUICK += ("qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_shared", "gemma4_experts")


@pytest.fixture(params=quick(CASES, *QUICK))
def golden(request):
    """Each directory of `golden/`."""
    return GOLDEN / request.param


@pytest.fixture
def tiny():
    """A module and its random parameters, the smallest with every kind of tensor but a q norm."""
    config = models.DecoderConfig(
        vocab_size=19,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_positions=16,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    module = models.build(config)
    return module, random_params(module)
