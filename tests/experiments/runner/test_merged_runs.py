"""The merged output of two batches has the statistics of one batch with all rows."""

import dataclasses

import numpy as np
import pytest

import magicjax
from experiments.runner import workload
from tests.magicjax import keywords, tiny
from tests.quick import quick

SUMS = ("prefill_s", "decode_s", "compile_s", "compilations", "rounds")
UNEQUAL = ("target_passes", "acceptance_rate")
OF_THE_CALL = (*SUMS, "kv_bytes_target", "kv_bytes_draft")


@pytest.mark.slow
@pytest.mark.parametrize("tree", quick(["expansion:2,1", None], None))
def test_merged_batches_have_the_statistics_of_one(tree):
    rows = np.random.default_rng(3).integers(tiny.VOCAB, size=(4, 20)).astype(np.int32)
    drafter = magicjax.PromptLookup() if tree is None else magicjax.SelfSpeculation(budget=20)
    options = {"drafter": drafter, "tree": magicjax.parse_tree(tree or "chain:2")}

    def run(rows):
        return keywords.generate(tiny.model(), list(rows), max_tokens=12, **options)

    whole, parts = run(rows), [run(rows[:2]), run(rows[2:])]
    passes, rates = ([getattr(part.stats, name) for part in parts] for name in UNEQUAL)
    assert len({*passes}) == len({*rates}) == 2  # else a wrong mean would be right
    merged = workload.merge(parts)
    np.testing.assert_array_equal(merged.tokens, whole.tokens)
    np.testing.assert_array_equal(merged.lengths, whole.lengths)
    assert all(map(np.array_equal, merged.sequences, whole.sequences))
    for name in {field.name for field in dataclasses.fields(whole.stats)} - {*OF_THE_CALL}:
        assert getattr(merged.stats, name) == getattr(whole.stats, name), name
    assert merged.stats.tau_by_request == whole.stats.tau_by_request
    for name in SUMS:
        assert getattr(merged.stats, name) == sum(getattr(part.stats, name) for part in parts)
