"""Trials count exactly, estimate tokens per round of the slowest row, and reset the prompts."""

import jax
import numpy as np
import pytest

import magicjax
from magicjax.decoding import runner
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.decoding.request import prepare
from magicjax.prediction.autotune.trial import (
    POOLED_ROUNDS,
    row_rates,
    row_tokens,
    run_trial,
    tried_and_accepted,
)
from magicjax.trees.token_tree import ROOT_ONLY
from tests.magicjax import tiny

TREE = tiny.TREES["chain4"]


def request_of(drafter, **options):
    arguments = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return prepare(tiny.model(), tiny.prompts(8), drafter=drafter, tree=TREE, **arguments)


def prefilled_of(request, *drafters):
    return PrefilledPrompts.create(request, drafters or [request.drafter])


@pytest.mark.slow
def test_trials_leave_the_prompts_as_prefill_made_them():
    drafters = [
        tiny.drafter("self"),
        magicjax.SelfSpeculation("snapkv", budget=16),
        tiny.drafter("near"),
    ]
    requests = [request_of(drafter) for drafter in drafters]
    prefilled = prefilled_of(requests[0], *drafters)
    before, trials = jax.tree.map(np.array, prefilled.cache), []
    for request in requests:
        trial, prefilled = run_trial(request, "name", prefilled, 5)
        trials.append(trial)
    _, prefilled = run_trial(requests[0], "", prefilled, 5, ROOT_ONLY)
    for layer in range(2):
        for row, length in enumerate(before.lengths):
            kept = np.asarray(prefilled.cache.k[layer])[row, :, :length]
            np.testing.assert_array_equal(kept, before.k[layer][row, :, :length])
    np.testing.assert_array_equal(prefilled.cache.lengths, before.lengths)
    # Each trial counts what the same rounds after their own prefill count.
    for request, trial in zip(requests, trials, strict=True):
        state, *_ = runner.prefill_and_init(request)
        state, *_ = runner.run(request, request.settings, state, 5)
        counted = np.asarray(state.histogram).sum(0)
        reached = counted[::-1].cumsum()[::-1]
        assert trial.rounds == np.asarray(state.histogram).sum(1).mean()
        for depth, rates in enumerate(trial.acceptance):
            assert rates == pytest.approx([reached[depth + 1] / reached[depth]])


def test_a_row_that_always_and_one_that_never_accepts_keep_their_rates():
    histogram = np.array([[10_000, 0, 0, 0, 0], [0, 0, 0, 0, 10_000]])
    rates = row_rates(*tried_and_accepted(histogram, 4, 4))
    np.testing.assert_allclose(row_tokens(rates, 4), [1, 5], rtol=0.01)
    np.testing.assert_allclose(row_tokens(rates, 2), [1, 3], rtol=0.01)


def test_a_row_with_few_rounds_gets_rates_close_to_the_batch():
    """The pooled rate is 1/2: one row accepts nothing in 8 rounds, one all, one runs none."""
    rates = row_rates(*tried_and_accepted([[8, 0], [0, 8], [0, 0]], 1, 1))
    assert POOLED_ROUNDS == 8
    np.testing.assert_allclose(rates[:, 0], [4 / 16, 12 / 16, 1 / 2])
