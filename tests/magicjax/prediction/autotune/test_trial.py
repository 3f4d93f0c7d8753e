"""Trials count exactly, estimate tokens per round of the slowest row, and reset the prompts."""

import jax
import numpy as np
import pytest

import magicjax
from magicjax.decoding import runner
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.prediction.autotune.trial import (
    POOLED_ROUNDS,
    row_rates,
    row_tokens,
    run_trial,
    tried_and_accepted,
)
from magicjax.trees.token_tree import ROOT_ONLY
from tests.magicjax import keywords, tiny

TREE = tiny.TREES["chain4"]


def request_of(drafter, **options):
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return keywords.prepare(tiny.model(), tiny.prompts(8), drafter=drafter, tree=TREE, **arguments)


def prefilled_of(request, *drafters):
    return PrefilledPrompts.create(request, drafters or [request.drafter])


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


def test_a_donated_cache_cannot_be_used_again():
    request = request_of(tiny.drafter("near"))
    prefilled = prefilled_of(request)
    run_trial(request, "name", prefilled, 5)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        prefilled.start(request)


@pytest.mark.slow
def test_a_trial_stops_when_all_rows_have_ended():
    request = request_of(tiny.drafter("same"), max_tokens=8)
    trial, *_ = run_trial(request, "name", prefilled_of(request), 50)
    assert trial.rounds == 2  # 7 tokens, 5 per round
    assert trial.seconds > 0
    assert trial.tree_tokens == 7 / 2


@pytest.mark.slow
def test_tokens_of_a_tree_are_those_of_a_whole_run_if_all_rows_end_in_the_trial():
    request = request_of(tiny.drafter("near"))
    prefilled = prefilled_of(request)
    for tree in (TREE, tiny.TREES["chain2"]):
        trial, prefilled = run_trial(request, "name", prefilled, 50, tree)
        rounds = tiny.generate(8, 0, "near", f"chain{tree.depth}").stats.rounds
        assert trial.tree_tokens == pytest.approx((tiny.NEW - 1) / rounds)
        assert len(trial.chain_tokens) == tree.depth


@pytest.mark.slow
def test_a_sampled_trial_draws_other_numbers_than_the_run():
    """The naive text of a run is that of plain sampling; a trial's text differs in every row."""
    request = request_of(tiny.drafter("near"), temperature=1.0, seed=3, verifier="naive")
    prefilled, outputs, run = prefilled_of(request), [], runner.run

    def recorded(*arguments):
        results = run(*arguments)
        outputs.append(np.array(results[0].output))
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", recorded)
        _, prefilled = run_trial(request, "name", prefilled, 50)
    state = prefilled.start(request)
    state, *_ = runner.run(request, request.settings, state)
    output = np.asarray(state.output)[:, : tiny.NEW]
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, temperature=1.0, seed=3)
    plain = keywords.generate(tiny.model(), tiny.prompts(8), **arguments)
    for row, (length, expected) in enumerate(zip(plain.lengths, plain.tokens, strict=True)):
        np.testing.assert_array_equal(output[row, :length], expected[:length])
        if length > 4:
            assert (outputs[-1][row, 1:length] != expected[1:length]).any()
    np.testing.assert_array_equal(outputs[-1][:, 0], output[:, 0])  # prefill's token


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


def test_depths_beyond_the_tree_have_no_counts():
    tried, accepted = tried_and_accepted([[1, 2, 3, 0]], 2, 3)
    assert tried.tolist() == [[6, 5, 0]] and accepted.tolist() == [[5, 3, 0]]
