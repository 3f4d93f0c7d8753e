"""The contract between models and the decoding loop, for every family and config."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.linear import mean
from pallas_kernels.cpu import build
from sharding import axes
from tests.quick import quick

LOGICAL = {value for name, value in vars(axes).items() if name.isupper()}
LLAMA = models.DecoderConfig(
    vocab_size=19,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=16,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
OPT = models.family_config(
    "opt",
    vocab_size=19,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=2,
    max_positions=16,
    tie_embeddings=False,
)
FALCON = models.family_config(
    "falcon",
    vocab_size=19,
    hidden_size=8,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    max_positions=16,
    parallel=True,
    shared_norm=True,
    positions=models.Alibi(scaled=True),
    activation="gelu",
)
CONFIGS = {
    "llama": LLAMA,
    "llama tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "llama draft vocabulary": dataclasses.replace(LLAMA, draft_vocab_size=7),
    "opt": OPT,
    "falcon": FALCON,
    "falcon with two norms": dataclasses.replace(
        FALCON, shared_norm=False, positions=models.Rope(partial_rotary_factor=0.5)
    ),
    "some layers without rotation": dataclasses.replace(
        LLAMA, unrotated_layers=(1,), norm_before=False, norm_after=True, joint_qk_norm=True
    ),
    "opt post-norm": dataclasses.replace(
        OPT, embedding_size=4, norm_before=False, final_norm=False, tie_embeddings=True
    ),
}


CHECKED = ("llama draft vocabulary", "some layers without rotation", "falcon", "opt post-norm")


@pytest.fixture(params=quick(CONFIGS, *CHECKED))
def module(request):
    return models.build(CONFIGS[request.param])


def tokens_and_positions(batch=2, length=5):
    tokens = np.random.default_rng(0).integers(0, 19, (batch, length))
    return tokens, np.broadcast_to(np.arange(length), (batch, length))


def test_every_parameter_names_its_logical_axes(module):
    leaves = jax.tree_util.tree_leaves_with_path(
        models.abstract_params(module), is_leaf=lambda x: hasattr(x, "names")
    )
    for path, box in leaves:
        named = [name for name in box.names if name is not None]
        assert len(box.names) == box.value.ndim, path
        assert set(named) <= LOGICAL, path
        assert named or box.value.dtype == jnp.int32, path  # maps of tokens are replicated
        assert len(set(named)) == len(named), f"{path}: one mesh axis cannot split two axes"


@pytest.mark.slow
def test_a_layer_runs_alone_on_its_slice_of_the_parameters(module, attend_causally, random_params):
    params = random_params(module)
    _, positions = tokens_and_positions()
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    whole, _ = module.apply(params, x, positions, attend_causally, 1, method="block")
    one = {"params": params["params"]["layers_1"]}
    apply = jax.jit(models.layer_module(module).apply, static_argnums=4)
    alone, _ = apply(one, x, positions, attend_causally(1), module.config.rotations[1])
    np.testing.assert_array_equal(alone, whole)


def test_logits_are_float32_even_of_a_bfloat16_model(module, random_params):
    narrow = models.build(module.config, "bfloat16")
    params = random_params(narrow)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} - {"int32"} == {"bfloat16"}
    hidden = jnp.ones((2, 8), jnp.bfloat16)
    assert narrow.apply(params, hidden, method="unembed").dtype == jnp.float32


def test_opt_positions_beyond_the_table_stay_finite(random_params):
    """Nodes beyond the last position are never emitted, but must be finite for other nodes."""
    module = models.build(OPT)
    params, token = random_params(module), np.zeros((1, 1), np.int32)
    at = [module.apply(params, token, token + i, method="embed") for i in (15, 16, 1000)]
    np.testing.assert_array_equal(at[0], at[1])
    np.testing.assert_array_equal(at[0], at[2])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"sliding_window": 0}, "sliding_window=0: it must be 1 or more"),
        ({"full_layers": (1,)}, "without sliding_window no layer has a window"),
        ({"sliding_window": 8, "full_layers": (2, 1)}, "full_layers=.* each once, in order"),
        ({"unrotated_layers": (3,)}, "unrotated_layers=.* each once, in order"),
        ({"unrotated_layers": (1,), "positions": models.Alibi()}, "requires rotary positions"),
        ({"joint_qk_norm": True, "qk_norm": False}, "it requires qk_norm=True and norm='rms'"),
        ({"norm_after": True, "parallel": True}, "norm_after=True requires parallel=False"),
        ({"sliding_window": 8, "positions": models.Alibi()}, "with ALiBi is not supported"),
        (
            {"positions": models.Alibi(), "max_positions": 2**17},
            "max_positions=131072 is too large: ALiBi has at most 65536",
        ),
    ],
)
def test_llama_sizes_that_do_not_fit_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"norm": "batch"}, "norm='batch' is not supported: use rms or rms_plus_one or"),
        ({"activation": "tanh"}, "activation='tanh' is not supported: use silu or relu or gelu"),
        ({"norm_before": False}, "final_norm=True requires norm_before=True"),
        ({"draft_vocab_size": 1}, "=1 must be at least 2 .*vocab_size=19"),
        ({"draft_vocab_size": 19}, "=19 must be at least 2 .*vocab_size=19"),
    ],
)
def test_opt_settings_that_do_not_fit_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(OPT, **change)


def test_a_family_divides_its_width_by_its_heads():
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 3}
    with pytest.raises(ValueError, match="hidden_size=8 is not a multiple of num_heads=3"):
        models.family_config("opt", **sizes)
    with pytest.raises(ValueError, match="family='gemma' is not supported: use one of llama"):
        models.family_config("gemma", **sizes)


@pytest.mark.slow
def test_one_token_in_bfloat16_has_the_logits_of_a_token_in_a_batch(module, attend_causally):
    """On a CPU a single row is multiplied as two."""
    module = models.build(module.config, "bfloat16")
    params = models.init_params(module, 0)

    def logits(tokens):
        hidden, _, _ = module.apply(params, tokens, jnp.zeros_like(tokens), attend_causally)
        return module.apply(params, hidden, method="unembed")

    one, both = logits(jnp.array([[3]])), logits(jnp.array([[3], [5]]))
    assert one.shape == (1, 1, module.config.vocab_size)
    np.testing.assert_allclose(one, both[:1], rtol=2e-2, atol=2e-2)


def sums_of_rows(backend: str, x) -> list[np.ndarray]:
    """Returns the means of the first rows, for several numbers of rows."""
    program = jax.jit(functools.partial(mean, backend=backend))
    return [np.asarray(program(x[:rows]))[:1] for rows in (1, 3, 4, 5, 8, 40)]


@pytest.mark.skipif(not build.is_default(), reason="needs the CPU kernels")
def test_the_mean_of_a_row_has_the_same_bits_in_any_number_of_rows():
    """XLA sums rows that fill a vector, and the remaining rows, in different orders."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 576)) ** 2, jnp.float32)
    first, *others = sums_of_rows("cpu", x)
    assert all((other == first).all() for other in others)
    np.testing.assert_allclose(first, np.asarray(x, np.float64)[:1].mean(-1, keepdims=True), 1e-6)
    zeros = jnp.zeros((0, 576), jnp.float32)
    assert mean(zeros).shape == (0, 1)
