"""The planner against enumeration and simulation: it returns the best of all options."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import models
from magicjax.drafters import (
    FullCacheSpeculation,
    PageRetrieval,
    PromptLookup,
    SelfSpeculation,
    SmallModel,
)
from magicjax.loading import abstract_model
from magicjax.prediction import cost_model, planner
from magicjax.prediction.cost_model import Draft, Machine, round_cost
from magicjax.prediction.planner import Candidate, plan
from magicjax.prediction.planner.candidates import footprint_on, free_memory, make_draft
from magicjax.trees.sequoia import expected_tokens, optimal
from magicjax.trees.token_tree import chain

LLAMA = cost_model.sizes_of(models.preset("llama-3.1-8b"), "bfloat16", "llama-3.1-8b")
SMALL = cost_model.sizes_of(models.preset("llama-3.2-1b"), "bfloat16", "llama-3.2-1b")
H100 = Machine(cost_model.find_device("h100"), model=8)
rates = st.floats(0.0, 1.0)


def self_speculation(budget=512, *acceptance, **more) -> Candidate:
    return Candidate(f"self:streaming:{budget}", Draft(LLAMA, budget), (acceptance,), **more)


def test_a_draft_on_pages_reads_the_targets_cache_and_a_copy_is_not_streamed():
    streamed = dataclasses.replace(LLAMA, streamed=True)
    drafter = PageRetrieval(512, refresh_every=4, page_size=32)
    assert make_draft(drafter, streamed, None) == Draft(streamed, 512, page_size=32, every=4)
    assert make_draft(PageRetrieval(512), LLAMA, None).every == 1
    copy = make_draft(dataclasses.replace(drafter, weights="int8"), streamed, None)
    assert not copy.sizes.streamed and copy.page_size == 32


@given(rates, st.integers(1, 8), st.integers(0, 5))
@settings(deadline=None)
def test_tokens_of_a_chain_are_those_that_a_simulation_counts(rate, gamma, seed):
    closed = gamma + 1 if rate == 1 else (1 - rate ** (gamma + 1)) / (1 - rate)
    assert expected_tokens(chain(gamma), [rate]) == pytest.approx(closed)
    right = np.random.default_rng(seed).random((20_000, gamma)) < rate
    simulated = 1 + np.cumprod(right, 1).sum(1).mean()
    assert simulated == pytest.approx(closed, abs=0.12)


@given(rates, st.integers(1, 200), st.integers(600, 60_000))
@settings(deadline=None, max_examples=30)
def test_the_best_is_the_fastest_of_all_chains(rate, batch, context):
    machine = Machine(dataclasses.replace(H100.device, memory=1e15), model=8)
    candidates = [self_speculation(128, 0.9 * rate), self_speculation(512, rate)]
    found = plan(LLAMA, candidates, machine, batch, context)
    speedups = {}
    for c, a in zip(candidates, (0.9 * rate, rate), strict=True):
        for depth in range(1, planner.MAX_DEPTH + 1):
            cost = round_cost(LLAMA, c.draft, machine, batch, context, depth + 1, depth)
            tokens = sum(a**i for i in range(depth + 1))
            round_s = depth * cost.draft + cost.verify + machine.device.round_seconds
            speedups[c.name, depth] = tokens * cost.target / round_s
    assert found.best.speedup == pytest.approx(max(speedups.values()))
    assert speedups[found.best.drafter, found.best.tree.depth] == pytest.approx(found.best.speedup)
    other = max(s for (name, _), s in speedups.items() if name != found.best.drafter)
    assert found.runner_up.speedup == pytest.approx(other)
    assert found.speculate == (max(speedups.values()) > 1)


@given(rates, rates, st.integers(1, 128))
@settings(deadline=None, max_examples=30)
def test_higher_acceptance_never_makes_a_plan_slower(a, b, batch):
    low, high = (
        plan(LLAMA, [self_speculation(512, rate)], H100, batch, 32_000).best.speedup
        for rate in sorted((a, b))
    )
    assert low <= high


def test_speculation_is_faster_above_the_break_even_only():
    at = plan(LLAMA, [self_speculation(512, 0.8)], H100, 32, 32_000).break_even
    assert 0.2 < at < 0.8
    assert plan(LLAMA, [self_speculation(512, at + 1e-6)], H100, 32, 32_000).speculate
    assert not plan(LLAMA, [self_speculation(512, at - 1e-6)], H100, 32, 32_000).speculate


def test_acceptance_by_rank_leads_to_trees_where_they_are_faster():
    ranks = (0.5, 0.3, 0.1)
    draft = Draft(SMALL, 512)
    wide = plan(LLAMA, [Candidate("s", draft, (ranks,))], H100, 16, 32_000)
    narrow = plan(LLAMA, [Candidate("s", draft, (ranks[:1],))], H100, 16, 32_000)
    assert wide.best.tree.width > 1 and narrow.best.tree.width == 1
    assert wide.best.speedup > 1.05 * narrow.best.speedup
    tree = wide.best.tree
    assert tree == optimal(ranks, tree.num_nodes, tree.depth)
    # the draft runs its widest level's inner nodes, in every level
    width = tree.levels.shape[1]
    cost = round_cost(LLAMA, draft, H100, 16, 32_000, tree.num_nodes, tree.depth, width)
    assert wide.best.cost == cost and width > 1


def test_candidates_that_do_not_fit_are_excluded():
    where = H100, 10, 32_000
    small, huge = (self_speculation(budget, 0.5, memory=budget) for budget in (512, 60_000))
    assert plan(LLAMA, [small, huge], *where, 512).too_large == ("self:streaming:60000",)
    assert plan(LLAMA, [small, huge], *where).too_large == ()
    with pytest.raises(ValueError, match="no draft fits beside the target: self:streaming:60000"):
        plan(LLAMA, [huge], *where, 512)


def test_the_memory_of_candidates_is_their_footprint():
    target, machine = abstract_model("llama-3.1-8b", "bfloat16"), Machine(H100.device, model=2)
    slot, where = 131072 / 2, (3, 100)  # bytes of a token on each device
    weights = 2 * models.count_params(models.preset("llama-3.1-8b")) / 2
    assert free_memory(target, machine, *where) == H100.device.memory - weights - 3 * 100 * slot
    expected = {
        SelfSpeculation(budget=64): 3 * (64 * slot + 16 * 32 * 4 * 4),  # 16 sinks' positions
        FullCacheSpeculation(): 0,  # the target's own cache
        PageRetrieval(512, page_size=16): 3 * 6 * slot,
        PromptLookup(): 0,
    }
    for drafter, memory in expected.items():
        assert footprint_on(machine, target, drafter, *where).draft == memory
    small = abstract_model("llama-3.2-1b", "bfloat16")
    draft = footprint_on(machine, target, SmallModel(small), *where).draft
    assert draft == footprint_on(machine, small, None, *where).resident


def test_a_small_model_is_on_as_many_devices_as_its_heads_divide_over():
    target = abstract_model("llama-2-7b", "bfloat16")
    small = abstract_model("llama-68m", "bfloat16")  # 12 heads
    eight, four = (
        footprint_on(Machine(H100.device, model=n), target, SmallModel(small), 3, 100).draft
        for n in (8, 4)
    )
    assert eight == four


def test_the_remedy_is_the_most_rows_that_fit():
    target, h100 = abstract_model("llama-3.1-8b", "bfloat16"), cost_model.find_device("h100")
    with pytest.raises(ValueError, match="at most 15 rows fit; use a smaller batch"):
        free_memory(target, Machine(h100), 16, 32_000)
    assert free_memory(target, Machine(h100), 15, 32_000) >= 0
    with pytest.raises(ValueError, match="at most 30 rows fit"):
        free_memory(target, Machine(h100, data=2), 32, 32_000)
    a10 = Machine(cost_model.find_device("a10"))
    with pytest.raises(ValueError, match="not one row fits; use more devices"):
        free_memory(target, a10, 1, 100_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1, 1), "no candidate"),
        (([self_speculation(512, 0.5)], 0, 1), "batch=0 must be at least 1"),
        (([self_speculation(512, 0.5)], 1, 0), "context=0 must be at least 1"),
        (([self_speculation(512, 1.5)], 1, 1), "give probabilities"),
        (([self_speculation(512, 0.7, 0.6)], 1, 1), "sums to 1.3"),
    ],
)
def test_invalid_arguments_are_errors(arguments, message):
    candidates, batch, context = arguments
    with pytest.raises(ValueError, match=message):
        plan(LLAMA, candidates, H100, batch, context)
