"""Perplexity and answers of a compressed cache that decodes alone."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import magicjax
from experiments.runner import teacher
from experiments.studies import policies_alone
from magicjax.decoding import runner
from magicjax.drafters import FullCacheSpeculation, SelfSpeculation
from tests.magicjax import tiny

TEXT = np.random.default_rng(0).integers(0, tiny.model().config.vocab_size, 120).astype(np.int32)
SCORED = 20


def test_a_full_cache_has_the_perplexity_of_the_model():
    found = policies_alone.perplexity(tiny.model(), FullCacheSpeculation(), [TEXT], SCORED)
    index = jnp.arange(len(TEXT) - SCORED - 1, len(TEXT) - 1)[None]
    expected, _ = teacher.log_probs(tiny.model(), TEXT[None], index, TEXT[None, -SCORED:])
    assert found == pytest.approx(float(np.exp(-expected.mean())), rel=1e-5)
    sparse = SelfSpeculation("random", budget=24)
    assert policies_alone.perplexity(tiny.model(), sparse, [TEXT], SCORED) != pytest.approx(
        found, rel=1e-3
    )


def test_a_full_cache_alone_writes_the_text_of_plain_decoding():
    arguments = tiny.model(), FullCacheSpeculation(), magicjax.chain(11), TEXT, 12
    request = policies_alone.request_of(*arguments)
    state, _ = runner.prefill_and_init(request)
    found = policies_alone.drafted(request.settings, request.target, request.drafter, state)
    params = magicjax.SamplingParams(max_tokens=12)
    plain = magicjax.generate(tiny.model(), [TEXT], params, eos_token_id=[])
    np.testing.assert_array_equal(found, plain.tokens)


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_policy_and_budget(zoo, tmp_path):
    out = tmp_path / "alone.csv"
    sizes = "--context 200 --texts 1 --scored 8 --questions 1 --budgets 32 64 --dtype float32"
    options = ["--target", str(zoo / "target"), "--policies", "snapkv", *sizes.split()]
    assert policies_alone.main([*options, "--out", str(out)]) == 0
    table = pd.read_csv(out)
    assert table.policy.tolist() == ["full", "snapkv", "snapkv"]
    assert table["acceptance, texts"][0] == 1
    with pytest.raises(SystemExit):
        policies_alone.main([*options, "--questions", "0"])
