"""Warping, drawing, and independent random numbers for each use."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import magicjax
from magicjax.decoding.rows import sampling_of
from magicjax.verification import sampling
from magicjax.verification.sampling import (
    Purpose,
    Sampling,
    accept_or_residual,
    remove_token,
    uniforms,
)
from tests.magicjax import keywords, tiny
from tests.magicjax.decoding.test_joint import warped
from tests.quick import quick

PARAMETERS = [
    (1.0, 0, 1.0),
    (0.5, 3, 1.0),
    (2.0, 0, 0.6),
    (0.8, 5, 0.7),
    (1.0, 1, 1.0),
    (3.0, 99, 0.01),
]
sample, warp = jax.jit(sampling.sample), jax.jit(sampling.warp)
draw = jax.jit(sampling.draw, static_argnums=(2, 3, 6))
PARAMETERS = [(*each, min_p) for each in PARAMETERS for min_p in (0.0, 0.2)]
PARAMETERS = [(*each, sigmas) for each in PARAMETERS for sigmas in (0.0, 0.5, 1.5)]


def per_row(parameters, filtered=True) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma")
    rows = [magicjax.SamplingParams(**dict(zip(names, each))) for each in parameters]
    return dataclasses.replace(sampling_of(rows), top_k_used=filtered, top_p_used=filtered)


def test_each_row_is_warped_by_its_parameters():
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(0, 2, (len(PARAMETERS), 3, 9)).astype(np.float32)
        found = np.asarray(warp(per_row(PARAMETERS), logits))
        for row, parameters in enumerate(PARAMETERS):
            for node in range(3):
                wanted = warped(logits[row, node].astype(np.float64), *parameters)
                np.testing.assert_allclose(found[row, node], wanted, atol=1e-6)


def test_excluded_tokens_do_not_count_for_the_standard_deviation():
    """Of 4, 2 and 0 it is 1.63, of the rest it would be larger."""
    logits = jnp.array([[4.0, 2.0, 0.0, -jnp.inf, -jnp.inf]])
    for sigmas, kept in ((1.2, 1), (1.25, 2), (2.4, 2), (2.5, 3)):
        p = warp(per_row([(0.5, 0, 1.0, 0.0, sigmas)]), logits)
        assert (np.asarray(p[0]) > 0).sum() == kept


def test_equal_logits_have_no_deviation_and_are_kept():
    p = warp(per_row([(1.0, 0, 1.0, 0.0, 1.0)]), jnp.full((1, 6), 7.5))
    np.testing.assert_allclose(p, 1 / 6)


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    p = warp(per_row([(1.0, 2, 1.0, 0.0, 0.0)]), jnp.array([[3.0, 1.0, 1.0, 0.0]]))
    assert (np.asarray(p[0]) > 0).tolist() == [True, True, True, False]


def test_filters_that_keep_all_change_nothing_and_unused_ones_cost_nothing():
    logits = jnp.linspace(0, -60, 50)[None]
    for filtered in (False, True):
        assert (warp(per_row([(1.0, 0, 1.0, 0.0, 0.0)], filtered), logits) > 0).all()
    text = warp.lower(per_row([(1.0, 0, 1.0, 0.0, 0.0)], False), logits).as_text()
    assert "while" not in text


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 6))
def test_a_token_of_probability_zero_is_never_sampled(seed, cut):
    rng = np.random.default_rng(seed)
    probs = rng.random((64, 7)).astype(np.float32) ** 8
    probs[:, rng.permutation(7)[:cut]] = 0
    u = rng.random((64, 2)).astype(np.float32)
    u[:4], u[4:8] = rng.permuted([[0.0, 1 - 2**-23], [2**-23, 0.5]] * 2, axis=1), 1 - 2**-23
    tokens = np.asarray(sample(jnp.asarray(probs), jnp.asarray(u)))
    assert (probs[np.arange(64), tokens] > 0).all()


def test_sampling_splits_the_unit_square_by_probability():
    probs = jnp.array([0.25, 0.0, 0.375, 0.25, 0.125])  # blocks of four tokens and one
    side = (jnp.arange(32) + 0.5) / 32
    u = jnp.stack(jnp.meshgrid(side, side), -1).reshape(-1, 2)
    counts = np.bincount(sample(jnp.broadcast_to(probs, (1024, 5)), u), minlength=5)
    np.testing.assert_allclose(counts / 1024, probs, atol=0.02)
    assert counts[1] == 0


@pytest.mark.parametrize("spread", [0.0, 2.0, 3.0])
def test_a_large_vocabulary_is_sampled_as_precisely_as_a_small_one(spread):
    """Compares the exact distribution that `sample` draws from."""
    vocab, size = 128_256, 512
    p = np.exp(np.random.default_rng(0).normal(0, spread, vocab)).astype(np.float32)
    p /= p.sum(dtype=np.float64)
    blocks = np.pad(p, (0, -vocab % size)).reshape(-1, size)

    def law(weights):
        """Returns for which share of the 2**23 values of a number `_pick` returns each entry."""
        reached = np.asarray(jax.jit(lambda w: jnp.cumsum(w, -1))(weights), np.float64)
        ends = np.ceil(reached / reached.max(-1, keepdims=True) * 2**23) / 2**23
        return np.diff(ends, axis=-1, prepend=0)

    effective = law(blocks.sum(-1))[:, None] * law(blocks)
    wanted = blocks.astype(np.float64) / blocks.sum(dtype=np.float64)
    assert 0.5 * np.abs(effective - wanted).sum() < 2e-4
    assert 0.5 * np.abs(law(p) - p).sum() > 1e-3  # the error of a single number


def test_draws_have_their_distribution_with_any_default_generator():
    """Joint counts of two draws."""
    q = np.array([0.5, 0.3, 0.15, 0.05])
    rows = 40_000
    for impl in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(impl):
            plain = sampling_of([magicjax.SamplingParams(temperature=1.0, seed=1)] * rows)
        shared = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (rows, 1, 4))
        for replacement in (True, False):
            tokens, live = draw(
                plain, shared, 2, replacement, jnp.zeros(rows, jnp.int32), jnp.zeros(1, int), 0
            )
            assert live.all()
            counts = np.zeros((4, 4))
            np.add.at(counts, tuple(np.asarray(tokens[:, 0]).T), 1)
            second = np.broadcast_to(q, (4, 4)).copy()
            if not replacement:
                np.fill_diagonal(second, 0)
                second /= second.sum(1, keepdims=True)
            wanted = q[:, None] * second * rows
            seen = wanted > 0
            assert counts[~seen].sum() == 0
            assert scipy.stats.chisquare(counts[seen], wanted[seen]).pvalue > 0.001


@pytest.mark.slow
def test_drafters_of_an_ensemble_draw_independently():
    """Two drafters with the same model would draw the same tokens if they shared numbers."""
    drafter = magicjax.Ensemble([magicjax.SmallModel(tiny.model("near"))] * 2)
    options = dict(drafter=drafter, tree=magicjax.chain(1), temperature=2.0)
    output = keywords.generate(tiny.model(), tiny.prompts(8), **options, max_tokens=tiny.NEW)
    assert 2.3 < output.stats.nodes_per_round <= 3


def test_every_use_has_an_independent_number():
    """No seed, row, position, purpose, drafter or draw shares a number with another."""
    found = []
    for seed, purpose, drafter in itertools.product(range(2), Purpose, (0, 1, 63)):
        keys = sampling.row_keys(seed, jnp.arange(3))
        position = jnp.broadcast_to(jnp.arange(8)[:, None], (3, 8, 20))
        number = jnp.broadcast_to(jnp.arange(20), position.shape)
        found.append(np.asarray(uniforms(keys, position, purpose, number, drafter)))
    numbers = np.concatenate(found, axis=None)
    # Of 17,280 numbers of 23 bits about 18 coincide by chance, and thousands if a key is shared.
    assert len(numbers) == 17_280
    assert len(numbers) - len(np.unique(numbers)) < 50
    assert abs(numbers.mean() - 0.5) < 0.02


def test_numbers_within_a_round_are_others_than_those_of_rounds():
    keys, position = sampling.row_keys(0, jnp.arange(3)), jnp.arange(8)
    of_rounds = [keys, *(sampling.keys_within_round(keys, jnp.full(3, p)) for p in position)]
    uses = itertools.product(of_rounds, Purpose, (0, 63))
    numbers = np.array(
        [
            uniforms(own, jnp.broadcast_to(position, (3, 8)), purpose, 1, drafter)
            for own, purpose, drafter in uses
        ]
    )
    assert numbers.size == 2_592 and len(np.unique(numbers)) > 2_585


def test_theorem_4_3_mss_accepts_at_least_as_often_as_naive_sampling():
    """SpecInfer, theorem 4.3, with one and two draws, for 1,000 random pairs of distributions."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(6, 0.5), (2, 1000))
    naive_one, naive_two, mss_one, mss_two = np.zeros((4, 1000))
    for token in range(6):
        tokens = np.full(1000, token)
        accept, left = (np.asarray(x) for x in accept_or_residual(p, q, tokens))
        mss_one += q[:, token] * accept
        naive_one += q[:, token] * p[:, token]
        rest = np.asarray(remove_token(q, tokens))
        for second in range(6):
            both = q[:, token] * rest[:, second]
            again = np.asarray(accept_or_residual(left, rest, np.full(1000, second))[0])
            mss_two += both * (accept + (1 - accept) * again)
            naive_two += both * (p[:, token] + p[:, second])
    assert (mss_one >= naive_one - 1e-6).all() and (mss_two >= naive_two - 1e-6).all()
    assert (mss_two >= mss_one - 1e-6).all()
    assert mss_two.mean() > 1.2 * naive_two.mean()


def options_of(kind=None, tree=None, **options):
    """Returns options of `generate` that use every filter, so that all tests share programs."""
    options = dict(temperature=1.2, top_k=30, top_p=0.95, seed=5) | options
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    if kind is not None:
        options |= dict(drafter=tiny.drafter(kind), tree=(tiny.TREES | tiny.SPECIAL)[tree])
    return options


def generate(kind=None, tree=None, **options):
    return keywords.generate(tiny.model(), tiny.prompts(8), **options_of(kind, tree, **options))


CASES = [
    *itertools.product(tiny.DRAFTERS, tiny.TREES),
    ("near", "dynamic"),
    ("prompt-lookup", "branches"),
    ("suffix", "dynamic"),
]


@pytest.mark.parametrize(("kind", "tree"), quick(CASES, ("prompt-lookup", "branches")))
def test_naive_gives_the_tokens_of_plain_sampling(kind, tree):
    plain, found = generate(), generate(kind, tree, verifier="naive")
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    if kind == "near":  # it accepts drafted tokens
        assert found.stats.target_passes < plain.stats.target_passes


@pytest.mark.slow
def test_filters_and_seeds_change_nothing_in_greedy_decoding():
    greedy = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    plain = keywords.generate(tiny.model(), tiny.prompts(8), **greedy)
    found = generate(temperature=0, top_k=5, top_p=0.5, min_p=0.9, top_n_sigma=1.0, seed=7)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    # Beside sampled rows, greedy rows are sampled ones of one token.
    mixed = generate("near", "2,2,1", temperature=[0, 1] * 4, top_p=0.5, min_p=0.9)
    np.testing.assert_array_equal(mixed.tokens[::2], plain.tokens[::2])


@pytest.mark.slow
def test_the_comparison_with_plain_sampling_detects_another_seed():
    assert (generate(seed=6).tokens != generate().tokens).any(1).all()
    assert (generate("near", "2,2,1").tokens != generate().tokens).any()  # mss uses other numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tree"),
    [(None, None), ("near", "2,2,1"), ("ensemble", "2,2,1")],
)
def test_a_row_does_not_depend_on_other_rows_or_their_parameters(kind, tree):
    temperatures = np.linspace(0.5, 2, 8)
    whole = generate(kind, tree, temperature=temperatures, top_k=9)
    again = generate(kind, tree, temperature=temperatures, top_k=9)
    np.testing.assert_array_equal(whole.tokens, again.tokens)
    # The same rows beside others that end at once; each row keeps its index, its request id.
    kept = np.arange(8) % 2 == 1
    others = dict(
        temperature=np.where(kept, temperatures, 1.0),
        top_k=np.where(kept, 9, 3),
        top_p=np.where(kept, 0.95, 0.5),
        max_tokens=[tiny.NEW if row % 2 else 1 for row in range(8)],
    )
    prompts = [p if row % 2 else p[::-1] for row, p in enumerate(tiny.prompts(8))]
    other = keywords.generate(tiny.model(), prompts, **options_of(kind, tree, **others))
    np.testing.assert_array_equal(whole.tokens[1::2], other.tokens[1::2])
