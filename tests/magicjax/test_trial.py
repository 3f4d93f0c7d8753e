"""What a trial counts becomes tokens of rounds to come, and leaves the prompts' cache as it was."""

import jax
import numpy as np
import pytest

import magicjax
from magicjax.autotune.trial import behind_prompts, run_trial
from magicjax.decoding import runner
from magicjax.decoding.request import prepare
from magicjax.trees.token_tree import ROOT_ONLY
from tests.magicjax import tiny

TREE = tiny.TREES["chain4"]


def request_of(drafter, **options):
    given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return prepare(tiny.model(), tiny.prompts(8), drafter=drafter, tree=TREE, **given)


def test_trials_of_several_drafters_leave_the_cache_as_the_prompts_made_it():
    drafters = [
        tiny.drafter("self"),
        magicjax.SelfSpeculation("snapkv", budget=16),
        tiny.drafter("near"),
    ]
    requests = [request_of(drafter) for drafter in drafters]
    behind, _, _ = behind_prompts(requests[0], drafters)
    before = jax.tree.map(np.array, behind.cache)
    found = [run_trial(request, "it", behind, 5)[0] for request in requests]
    run_trial(requests[0], "", behind, 5, ROOT_ONLY)
    for layer in range(2):
        for row, length in enumerate(before.lengths):
            kept = np.asarray(behind.cache.k[layer])[row, :, :length]
            np.testing.assert_array_equal(kept, before.k[layer][row, :, :length])
    np.testing.assert_array_equal(behind.cache.lengths, before.lengths)
    # Each is what the same rounds behind a prefill of its own give.
    for request, trial in zip(requests, found, strict=True):
        state, *_ = runner.start(request)
        state, *_ = runner.run(request, request.settings, state, 5)
        counted = np.asarray(state.histogram).sum(0)
        reached = counted[::-1].cumsum()[::-1]
        assert trial.rounds == np.asarray(state.histogram).sum(1).mean()
        for depth, rates in enumerate(trial.acceptance):
            assert rates == pytest.approx([reached[depth + 1] / reached[depth]])


def test_a_trial_that_reaches_the_end_of_all_rows_stops_there():
    drafter = tiny.drafter("same")
    request = request_of(drafter, max_new_tokens=8)
    behind, _, _ = behind_prompts(request, [drafter])
    trial, _ = run_trial(request, "it", behind, 50)
    assert trial.rounds == 2  # 7 tokens, 5 a round
    assert trial.seconds > 0
    assert trial.of_tree == 7 / 2


def test_tokens_of_a_trial_with_a_shallower_tree_are_those_of_a_run_with_it():
    """All rows end in the trial, so its rounds are what such a run takes: nothing is drawn."""
    drafter = tiny.drafter("near")
    request = request_of(drafter)
    behind, _, _ = behind_prompts(request, [drafter])
    for tree in (TREE, tiny.TREES["chain2"]):
        trial, _ = run_trial(request, "it", behind, 50, tree)
        given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER, drafter=drafter, tree=tree)
        steps = magicjax.generate(tiny.model(), tiny.prompts(8), **given).stats.steps
        assert trial.of_tree == pytest.approx((tiny.NEW - 1) / steps)
        assert len(trial.tokens) == tree.depth


def test_a_trial_draws_other_numbers_than_the_run():
    """The naive text of a run is that of plain sampling; a trial's must be another, in every row.

    What a trial drew decides what runs: with the run's own numbers, drafts that happen to be right
    would be chosen, and the text would lean towards them.
    """
    drafter = tiny.drafter("near")
    request = request_of(drafter, do_sample=True, seed=3, verifier="naive")
    behind, _, _ = behind_prompts(request, [drafter])
    states = []
    run = runner.run

    def kept(*given):
        found = run(*given)
        states.append(np.array(found[0].output))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", kept)
        run_trial(request, "it", behind, 50)
    state, _ = behind.state(request)
    state, *_ = runner.run(request, request.settings, state)
    of_run = np.asarray(state.output)[:, : tiny.NEW]
    given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER, do_sample=True, seed=3)
    plain = magicjax.generate(tiny.model(), tiny.prompts(8), **given)
    for row, (length, wanted) in enumerate(zip(plain.lengths, plain.tokens, strict=True)):
        np.testing.assert_array_equal(of_run[row, :length], wanted[:length])
        if length > 4:
            assert (states[-1][row, 1:length] != wanted[1:length]).any()
    np.testing.assert_array_equal(states[-1][:, 0], of_run[:, 0])  # prefill's, of both
