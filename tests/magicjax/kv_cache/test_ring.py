"""The size of a draft cache; `decoding/test_exactness.py` compares texts around the budget."""

import numpy as np
import pytest

import magicjax
from tests.magicjax import keywords, tiny


def test_a_budget_below_the_smallest_is_an_error():
    """Sinks, the tree's depth and one more: a round may fill the whole ring."""
    drafter = magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=1), budget=5)
    with pytest.raises(ValueError, match=r"4 slots besides 1 pinned.*tree depth \(4\) \+ 1 = 5"):
        keywords.prepare(tiny.model(), [[1]], drafter=drafter, tree=tiny.TREES["irregular"])


def test_the_draft_caches_size_depends_only_on_the_budget():
    output = tiny.generate(8, 0, "self", "chain4")
    config = tiny.model().config
    heads = config.num_layers * config.num_kv_heads
    slot_bytes = 2 * heads * config.head_dim * 4
    pin_bytes = tiny.drafter("self").sparse.num_pinned * heads * 4
    assert output.stats.kv_bytes_draft == 8 * (tiny.BUDGET * slot_bytes + pin_bytes)
    assert output.stats.kv_bytes_target == 8 * 64 * slot_bytes
    assert output.stats.emitted == 8 * (tiny.NEW - 1)
    assert np.isfinite(output.stats.tokens_per_s) and output.stats.decode_s > 0
