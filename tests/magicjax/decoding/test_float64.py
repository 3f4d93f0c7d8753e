"""In float64 there are no ties: speculative and plain decoding give the same text."""

import itertools

import numpy as np
import pytest

from tests.magicjax import oracle, tiny

ALL = [*itertools.product(tiny.DRAFTERS, tiny.TREES, (1, 3, 8))]
pytestmark = pytest.mark.usefixtures("float64")


def check_without_ties(kind, tree, batch) -> None:
    tally, target = oracle.Tally(), tiny.model("target", "float64")
    for seed in range(2):
        plain = tiny.rows_of(tiny.generate(batch, seed, dtype="float64"))
        found = tiny.rows_of(tiny.generate(batch, seed, kind, tree, dtype="float64"))
        prompts = tiny.prompts(batch, seed)
        tally.compare(target, prompts, plain, found, ties_allowed=False)
        tally.compare(target, prompts, tiny.expected(batch, seed), plain, ties_allowed=False)
    for offset in range(0, tiny.NEW, 3):
        eos = int(plain[offset % batch][offset])
        found = tiny.generate(batch, seed, kind, tree, dtype="float64", eos_token_id=eos)
        wanted = [oracle.cut(row, eos) for row in plain]
        tally.compare(target, prompts, wanted, tiny.rows_of(found), ties_allowed=False)
    limits = [tiny.NEW - row for row in range(batch)]
    found = tiny.generate(batch, seed, kind, tree, dtype="float64", max_tokens=limits)
    wanted = [row[:limit] for row, limit in zip(plain, limits, strict=True)]
    tally.compare(target, prompts, wanted, tiny.rows_of(found), ties_allowed=False)
    assert tally.ties == 0
    print(f"\n{tally.rows} rows compared in float64, no ties")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree", "batch"), ALL)
def test_in_float64_every_drafter_with_every_tree_and_batch_is_exact(kind, tree, batch):
    check_without_ties(kind, tree, batch)


def test_the_loop_computes_in_float64_there():
    output = tiny.generate(8, 0, dtype="float64")
    float32 = tiny.model().params["params"]["embedding"].nbytes
    assert tiny.model("target", "float64").params["params"]["embedding"].nbytes == 2 * float32
    # Two layers of keys and values: 8 rows, 2 heads, 64 slots, 8 numbers of 8 bytes.
    assert output.stats.kv_bytes_target == 2 * 2 * 8 * 2 * 64 * 8 * 8
    assert output.tokens.dtype == np.int32
