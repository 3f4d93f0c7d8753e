"""Mixtures of experts against loops over tokens; what a token gets depends on no other."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from models import experts
from models.build import blocks_in
from models.decoder import MixtureOfExperts
from models.quantized import WeightFormat
from pallas_kernels.cpu import build
from tests.models.conftest import GOLDEN
from tests.quick import quick

CONFIG = models.DecoderConfig(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=16,
    num_experts=6,
    experts_per_token=2,
)
OSS = dict(router_bias=True, mlp_bias=True, swiglu_limit=0.7)
SETTINGS = {
    "normalized": {},
    "one expert": dict(experts_per_token=1, normalize_experts=False),
    "all experts": dict(experts_per_token=6, normalize_experts=False),
    "gpt-oss": OSS,
    "not gated": dict(gated=False, activation="relu"),
}
FORMATS = (None, "int8", "int8:32", "int4:32")


def module_of(weights: str | None = None, backend: str | None = None, **changes):
    form = None if weights is None else WeightFormat.parse(weights)
    config = dataclasses.replace(CONFIG, **changes)
    formats = blocks_in(config, form).within("layers_0/mlp")
    return MixtureOfExperts(config, jnp.float32, weights=formats, backend=backend)


def params_of(module: MixtureOfExperts):
    """Returns random parameters, biases included."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1, CONFIG.hidden_size)))
    rng = np.random.default_rng(1)

    def draw(path, x):
        if jnp.issubdtype(x.dtype, jnp.integer):  # quantized values
            limit = 7 if x.dtype == jnp.int4 else 127
            return rng.integers(-limit, limit, x.shape, np.int8).astype(x.dtype)
        if path[-1].key == "scale":
            return rng.uniform(0.001, 0.003, x.shape).astype(x.dtype)
        spread = 0.3 if path[-1].key == "bias" else x.shape[-1] ** -0.5
        return (spread * rng.standard_normal(x.shape)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(shapes))


def tokens(count: int) -> np.ndarray:
    rng = np.random.default_rng(2)
    return rng.standard_normal((1, count, CONFIG.hidden_size)).astype(np.float32)


def oracle(module: MixtureOfExperts, params, x, normalize: bool | None = None) -> np.ndarray:
    """Returns the result token by token in float64, from the equations."""
    c = module.config
    normalize = c.normalize_experts if normalize is None else normalize
    params = models.dequantize_params(params, jnp.float32)["params"]
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    out = np.zeros(x.shape)
    for t, token in enumerate(np.asarray(x, np.float64)[0]):
        logits = p["router"]["weight"] @ token + p["router"].get("bias", 0)
        chosen = np.argsort(-logits, kind="stable")[: c.experts_per_token]
        weights = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        weights = weights[chosen] / (weights[chosen].sum() if normalize else 1)
        for expert, weight in zip(chosen, weights, strict=True):

            def apply(name, x, expert=expert):
                bias = p[name]["bias"][expert] if "bias" in p[name] else 0
                return p[name]["weight"][expert] @ x + bias

            hidden = apply("up", token)
            if c.swiglu_limit is not None:
                gate = np.minimum(apply("gate", token), c.swiglu_limit)
                hidden = np.clip(hidden, -c.swiglu_limit, c.swiglu_limit) + 1
                hidden = hidden * gate / (1 + np.exp(-1.702 * gate))
            elif c.gated:
                gate = apply("gate", token)
                hidden = hidden * gate / (1 + np.exp(-gate))
            else:
                hidden = np.maximum(hidden, 0)
            out[0, t] += weight * apply("down", hidden)
    return out


ALL = [(name, form, n) for name in SETTINGS for form in FORMATS for n in (1, 5, 150)]
QUICK = [(name, None, 5) for name in SETTINGS] + [("gpt-oss", "int4:32", 5), ("gpt-oss", None, 150)]


ALL = [(backend, *case) for backend in ("xla", None) for case in ALL]
QUICK = [("xla", *case) for case in QUICK] + [
    (None, "gpt-oss", None, 150),
    (None, "gpt-oss", "int4:32", 5),
]


@pytest.mark.parametrize(("backend", "settings", "weights", "count"), quick(ALL, *QUICK))
def test_equals_loops_over_tokens(backend, settings, weights, count):
    module = module_of(weights, backend, **SETTINGS[settings])
    params, x = params_of(module), tokens(count)
    found, expected = jax.jit(module.apply)(params, x), oracle(module, params, x)
    size = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-5 * size)
    if module.config.experts_per_token < 6:
        wrong = oracle(module, params, x, not module.config.normalize_experts)
        assert np.abs(found - wrong).max() > 1e-2 * size


@pytest.mark.parametrize("backend", ["xla", None])
@pytest.mark.slow
def test_experts_that_no_token_chooses_are_not_read(backend):
    module, x = module_of(backend=backend), tokens(2)
    params = params_of(module)
    logits = x[0] @ params["params"]["router"]["weight"].T
    chosen, _ = experts.choose(logits, CONFIG.experts_per_token, True)
    idle = np.setdiff1d(np.arange(CONFIG.num_experts), chosen)
    assert len(idle)
    poisoned = jax.tree.map(lambda x: x, params)
    for name in ("gate", "up", "down"):
        weight = poisoned["params"][name]["weight"].copy()
        weight[idle] = np.nan
        poisoned["params"][name] = {"weight": weight}
    expected, found = (jax.jit(module.apply)(p, x) for p in (params, poisoned))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours():
    """Not so in float32: XLA fuses the sums of experts and biases by the number of rows."""
    config = dataclasses.replace(CONFIG, **OSS)
    module = MixtureOfExperts(config, jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(module_of(**OSS)))
    x = tokens(70).astype(jnp.bfloat16)
    apply = jax.jit(module.apply)
    whole, few = apply(params, x), apply(params, x[:, 3:8])
    np.testing.assert_array_equal(few[0], whole[0, 3:8])
    for t in (0, 1, 69):
        np.testing.assert_array_equal(apply(params, x[:, t : t + 1])[0, 0], whole[0, t])


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
@pytest.mark.slow
def test_quantized_experts_survive_a_round_trip(case, tmp_path):
    first = models.load_checkpoint(GOLDEN / case, weights="int8")
    models.save_checkpoint(tmp_path / "x", first.module, first.params)
    second = models.load_checkpoint(tmp_path / "x")
    assert second.module == first.module
    assert jax.tree.all(jax.tree.map(np.array_equal, second.params, first.params))
    exact = models.load_checkpoint(GOLDEN / case).params["params"]["layers_0"]["mlp"]
    mlp = first.params["params"]["layers_0"]["mlp"]
    np.testing.assert_array_equal(mlp["router"]["weight"], exact["router"]["weight"])
    for name in ("gate", "up", "down"):
        values = models.dequantize(mlp[name]["weight"], mlp[name]["scale"])
        error = np.abs(values - exact[name]["weight"]).max(-1)
        assert (error <= np.abs(exact[name]["weight"]).max(-1) / 128).all()


@given(st.data())
def test_every_pair_is_in_one_block_of_its_expert(data):
    count, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    pairs = data.draw(st.lists(st.integers(-1, count), min_size=20, max_size=20))
    blocks = experts.blocks_of(jnp.array(pairs), count, size)
    found = []
    for i in range(int(blocks.ends[-1])):
        expert = int(np.searchsorted(blocks.ends, i, side="right"))
        place = (i - int(blocks.ends[expert]) + -(-int(blocks.counts[expert]) // size)) * size
        places = range(place, min(place + size, int(blocks.counts[expert])))
        members = [int(blocks.pairs[int(blocks.first[expert]) + j]) for j in places]
        assert members and all(pairs[pair] == expert for pair in members)
        found += members
    assert sorted(found) == [i for i, expert in enumerate(pairs) if 0 <= expert < count]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_experts=None), "without experts, omit both"),
        (dict(experts_per_token=7), "a token uses from 1 to num_experts experts"),
        (dict(experts_per_token=0), "a token uses from 1 to num_experts experts"),
        (dict(swiglu_limit=7.0, gated=False), "requires gated=True"),
    ],
)
def test_settings_that_do_not_fit_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
