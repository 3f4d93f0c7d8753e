"""Texts are exact with every policy, budget, refresh and precision of the draft cache."""

import itertools

import numpy as np
import pytest

import magicjax
from magicjax.policies import POLICIES
from pallas_kernels import attention, attention_mass
from tests.magicjax import keywords, oracle, tiny
from tests.quick import quick

# Longer than the largest budget, about a budget, and short.
LENGTHS = (700, 512, 130, 33, 7)
LARGE = 768  # its ring alone holds the longest text
BUDGETS = (32, 128, 512)
TREES = {
    "chain3": magicjax.chain(3),
    "2,2,1": magicjax.expansion((2, 2, 1)),
    "dynamic": magicjax.DynamicTree(9, 4, 3),
}
REFRESHES, KV_DTYPES = (None, 4), (None, "int8", "int4")
QUEST = "quest"  # page retrieval, which reads the target's own cache
ALL = [
    case
    for case in itertools.product([*POLICIES, QUEST], BUDGETS, TREES, REFRESHES, KV_DTYPES)
    if not (case[0] == "streaming" and case[3]) and not (case[0] == QUEST and case[4])
]
QUICK = ("h2o", 32, "dynamic", 4, "int8")


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, tiny.VOCAB, n).astype(np.int32) for n in LENGTHS]


def wide() -> magicjax.Model:
    """Returns the tiny target with room for long prompts."""
    return tiny.model("long")


def run(drafter=None, tree=None, **options):
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return keywords.generate(wide(), prompts(), drafter=drafter, tree=tree, **options)


@pytest.fixture(scope="module")
def wanted() -> list[np.ndarray]:
    """Returns the texts of plain decoding, which one pass of the oracle over each confirms."""
    rows = tiny.rows_of(run())
    for prompt, row in zip(prompts(), rows, strict=True):
        best = oracle.logits(wide(), [*prompt, *row])[len(prompt) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(row, best)
    return rows


def policy_of(name: str):
    """Returns the policy, with few sinks so that a budget of 32 is enough."""
    return magicjax.StreamingLLM(sinks=4) if name == "streaming" else name


@pytest.mark.parametrize(
    ("policy", "budget", "tree", "refresh", "kv_dtype"), quick(ALL, QUICK), ids=str
)
def test_every_combination_of_settings_is_exact(
    tally, wanted, policy, budget, tree, refresh, kv_dtype
):
    drafter = magicjax.PageRetrieval(budget, refresh_every=refresh or 1, page_size=8)
    if policy != QUEST:
        drafter = magicjax.SelfSpeculation(
            policy_of(policy), budget, refresh_every=refresh, kv_dtype=kv_dtype
        )
    output = run(drafter, TREES[tree])
    tally.compare(wide(), prompts(), wanted, tiny.rows_of(output))
    print(f"{policy} {budget}, {tree}, refresh {refresh}, {kv_dtype}: tau {output.stats.tau:.2f}")


@pytest.mark.parametrize(
    ("policy", "tree"), quick([("streaming", "chain3"), ("snapkv", "2,2,1"), ("h2o", "dynamic")])
)
def test_small_models_on_sparse_caches_are_exact(tally, wanted, policy, tree):
    drafter = magicjax.SmallModel(tiny.model("long near"), policy=policy_of(policy), budget=40)
    output = run(drafter, TREES[tree])
    tally.compare(wide(), prompts(), wanted, tiny.rows_of(output))
    assert output.stats.kv_bytes_draft == 5 * 40 * 2 * 2 * 2 * 8 * 4


@pytest.mark.slow
def test_the_chosen_backend_reads_every_cache(tally, wanted, changed):
    def other(*arguments):
        pytest.fail("another backend was used")

    changed.setattr(attention_mass.xla, "mass", other)
    changed.setitem(attention.BACKENDS, "xla", other)
    drafter = magicjax.SelfSpeculation("h2o", 48, refresh_every=2)
    output = run(drafter, TREES["chain3"], backend="reference")
    tally.compare(wide(), prompts(), wanted, tiny.rows_of(output))


@pytest.mark.parametrize("policy", quick(["streaming", "snapkv", "pyramidkv", "random"]))
def test_a_budget_that_covers_the_text_accepts_everything(policy):
    drafter = magicjax.SelfSpeculation(policy_of(policy), 2 * LARGE)
    output = run(drafter, TREES["chain3"])
    assert output.stats.acceptance_rate == 1


def test_a_full_cache_accepts_everything_and_allocates_nothing():
    output = run(magicjax.FullCacheSpeculation(), TREES["chain3"])
    assert output.stats.acceptance_rate == 1
    assert output.stats.kv_bytes_draft == 0
