"""The loop is independent of family and dtype: OPT, 16 bits, a drafter of another dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from tests.magicjax import tiny
from tests.quick import quick

OPTIONS = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER)


@functools.cache
def opt(noise: float = 0.0) -> magicjax.Model:
    """Returns an OPT with learned positions and biases, and noise in its weights."""
    module = models.build(
        models.family_config(
            "opt",
            vocab_size=tiny.VOCAB,
            hidden_size=32,
            intermediate_size=40,
            num_layers=2,
            num_heads=4,
            max_positions=64,
        )
    )
    rng = np.random.default_rng(2)

    def disturb(x):
        # Biases start at 0 and embeddings are small; larger ones affect the text.
        x = 2 * np.asarray(x) + 0.3 * rng.standard_normal(x.shape)
        return jnp.asarray(x * (1 + noise * rng.standard_normal(x.shape)), jnp.float32)

    return magicjax.Model(module, jax.tree.map(disturb, models.init_params(module, 0)))


@functools.cache
def forward_of(module):
    """Returns a compiled forward over whole texts of 64 tokens, without any cache."""

    def attend(layer, q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        sees = np.tril(np.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", weights, v), None

    @jax.jit
    def run(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = module.apply(params, tokens, positions, attend)
        return module.apply(params, hidden, method="unembed").argmax(-1)

    return run


def rerun(target, prompts, new_tokens) -> list[np.ndarray]:
    """Returns greedy texts; each token is computed by a forward pass over the whole text."""
    run, tokens = forward_of(target.module), np.zeros((len(prompts), 64), np.int32)
    ends = np.array([len(prompt) for prompt in prompts])
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    rows = np.arange(len(prompts))
    for _ in range(new_tokens):
        tokens[rows, ends] = np.asarray(run(target.params, tokens))[rows, ends - 1]
        ends += 1
    return [row[end - new_tokens : end] for row, end in zip(tokens, ends, strict=True)]


@pytest.mark.parametrize("drafting", quick(["plain", "self", "near"], "near"))
def test_an_opt_with_learned_positions_equals_full_recomputation(drafting):
    drafters = {
        "plain": {},
        "self": dict(drafter=tiny.drafter("self"), tree=tiny.TREES["2,2,1"]),
        "near": dict(drafter=magicjax.SmallModel(opt(0.05)), tree=tiny.TREES["irregular"]),
    }
    output = magicjax.generate(opt(), tiny.prompts(8), **OPTIONS, **drafters[drafting])
    expected = rerun(opt(), tiny.prompts(8), tiny.NEW)
    assert len({row.tobytes() for row in expected}) == 8
    for row, text in zip(tiny.rows_of(output), expected, strict=True):
        np.testing.assert_array_equal(row, text)
    if drafting != "plain":
        assert 0.05 < output.stats.acceptance_rate < 0.95


@pytest.mark.slow
def test_a_text_up_to_the_last_learned_position_is_exact():
    prompts = [np.arange(40) % tiny.VOCAB, np.arange(3)]
    expected = rerun(opt(), prompts, tiny.NEW)
    for drafting in (
        {},
        dict(drafter=magicjax.SmallModel(opt(0.05)), tree=tiny.TREES["irregular"]),
        dict(drafter=tiny.drafter("self"), tree=tiny.TREES["chain8"]),
    ):
        output = magicjax.generate(opt(), prompts, **OPTIONS, **drafting)
        for row, text in zip(tiny.rows_of(output), expected, strict=True):
            np.testing.assert_array_equal(row, text)
    with pytest.raises(ValueError, match="needs 65 positions, and the target has 64"):
        magicjax.generate(opt(), [[1] * 41], **OPTIONS)


@pytest.mark.slow
def test_a_drafter_in_16_bits_keeps_a_float32_text_exact():
    drafter = tiny.drafter("near", "bfloat16")
    tree = tiny.TREES["chain3"]
    output = magicjax.generate(tiny.model(), tiny.prompts(8), drafter=drafter, tree=tree, **OPTIONS)
    for row, expected in zip(tiny.rows_of(output), tiny.expected(8), strict=True):
        np.testing.assert_array_equal(row, expected)
    assert output.stats.acceptance_rate > 0.05
    assert output.stats.kv_bytes_draft * 2 == output.stats.kv_bytes_target


def test_a_target_in_16_bits_has_16_bit_caches_and_ends_its_rows():
    """Programs of different shapes round differently in 16 bits, so texts are not compared."""
    wide = tiny.generate(8, 0, "self", "chain4").stats
    output = tiny.generate(8, 0, "self", "chain4", dtype="bfloat16")
    assert output.lengths.tolist() == [tiny.NEW] * 8
    assert output.stats.kv_bytes_target * 2 == wide.kv_bytes_target
    assert output.stats.kv_bytes_draft * 2 == wide.kv_bytes_draft
    # The first tokens come from prefill, where the dtypes differ only by rounding.
    firsts = [row[0] for row in tiny.expected(8)]
    assert np.mean(output.tokens[:, 0] == firsts) > 0.5
