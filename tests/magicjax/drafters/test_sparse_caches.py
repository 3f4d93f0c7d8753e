"""Bytes of draft caches, and the backend that reads them; `test_exactness` compares the texts."""

import pytest

import magicjax
from pallas_kernels import attention, attention_mass
from tests.magicjax import keywords, tiny


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "h2o"])
def test_a_sparse_cache_has_the_bytes_of_its_budget(policy):
    drafter = magicjax.SmallModel(tiny.model("near"), policy=policy, budget=40)
    heads = 5 * 2 * 2  # of all rows and layers
    entries, pins = 40 * 2 * 8 * 4, drafter.sparse.num_pinned * 4
    assert drafter.cache_bytes(tiny.model(), 5, 512) == heads * (entries + pins)


def test_a_full_cache_allocates_nothing():
    assert magicjax.FullCacheSpeculation().cache_bytes(tiny.model(), 5, 512) == 0


@pytest.mark.slow
def test_the_chosen_backend_reads_every_cache(tally, changed):
    def other(*arguments):
        pytest.fail("another backend was used")

    changed.setattr(attention_mass.xla, "mass", other)
    changed.setitem(attention.BACKENDS, "xla", other)
    drafter = magicjax.SelfSpeculation("h2o", 24, refresh_every=2)
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, backend="reference")
    output = keywords.generate(
        tiny.model(), tiny.prompts(8), drafter=drafter, tree=tiny.TREES["chain3"], **options
    )
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), tiny.rows_of(output))
