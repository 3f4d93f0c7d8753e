"""The ring of a draft cache: wrapped many times or never; texts around the budget."""

import numpy as np
import pytest

import magicjax
from tests.magicjax import keywords, oracle, tiny
from tests.magicjax.kv_cache.test_loop_caches import prompts_around_the_budget
from tests.quick import quick

LONG = 100


@pytest.mark.slow
def test_the_text_stays_exact_while_the_ring_wraps_around_many_times():
    drafter = magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=1), budget=8)
    output = keywords.generate(
        tiny.model(),
        tiny.prompts(3),
        drafter=drafter,
        tree=magicjax.chain(3),
        max_tokens=LONG,
        eos_token_id=tiny.NEVER,
    )
    assert LONG / (drafter.budget - 1) > 14  # times that the ring of 7 was overwritten
    tally, expected = oracle.Tally(), tiny.expected(3, 0, LONG)
    tally.compare(tiny.model(), tiny.prompts(3), expected, tiny.rows_of(output))
    assert 0 < output.stats.acceptance_rate < 1


@pytest.mark.parametrize("tree", quick(["chain4", "irregular"], "chain4"))
def test_prompts_shorter_than_of_and_just_over_the_budget_are_exact(tree):
    prompts = prompts_around_the_budget()
    assert {tiny.BUDGET - 1, tiny.BUDGET, tiny.BUDGET + 1} <= {len(prompt) for prompt in prompts}
    output = keywords.generate(
        tiny.model(),
        prompts,
        drafter=tiny.drafter("self"),
        tree=tiny.TREES[tree],
        max_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
    )
    expected = [oracle.greedy(tiny.model(), prompt, tiny.NEW) for prompt in prompts]
    oracle.Tally().compare(tiny.model(), prompts, expected, tiny.rows_of(output))


@pytest.mark.slow
def test_the_smallest_budget_that_is_allowed_is_exact():
    """Sinks, the tree's depth and one more: a round may fill the whole ring."""
    tree = tiny.TREES["irregular"]
    drafter = magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=1), budget=1 + tree.depth + 1)
    options = dict(tree=tree, max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    output = keywords.generate(tiny.model(), tiny.prompts(8), drafter=drafter, **options)
    found = tiny.rows_of(output)
    oracle.Tally().compare(tiny.model(), tiny.prompts(8), tiny.expected(8), found)
    smaller = magicjax.SelfSpeculation(drafter.policy, budget=drafter.budget - 1)
    with pytest.raises(ValueError, match=r"4 slots besides 1 pinned.*tree depth \(4\) \+ 1 = 5"):
        keywords.generate(tiny.model(), tiny.prompts(8), drafter=smaller, **options)


def test_the_draft_caches_size_depends_only_on_the_budget():
    output = tiny.generate(8, 0, "self", "chain4")
    config = tiny.model().config
    slot_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert output.stats.kv_bytes_draft == 8 * tiny.BUDGET * slot_bytes
    assert output.stats.kv_bytes_target == 8 * 64 * slot_bytes
    assert output.stats.emitted == 8 * (tiny.NEW - 1)
    assert np.isfinite(output.stats.tokens_per_s) and output.stats.decode_s > 0
