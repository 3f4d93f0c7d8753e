"""SpecInfer's success rates against values that are known by hand."""

import jax
import numpy as np
import pandas as pd
import pytest

from experiments.studies import success_rates


def test_success_of_a_window_against_counting_by_hand():
    """With the target as draft, the first draw is always accepted."""
    logits = jax.random.normal(jax.random.key(0), (1, 400, 8)) * 2
    rates = success_rates.window_rates(success_rates.sampling_of(1.0, 0), logits, logits, 3)
    np.testing.assert_allclose(rates[success_rates.MSS], 1, atol=1e-5)
    np.testing.assert_allclose(rates[success_rates.GREEDY], 1)
    p = np.sort(np.asarray(jax.nn.softmax(logits)), -1)[0, :, ::-1]
    np.testing.assert_allclose(rates[success_rates.TOP], p[:, :3].cumsum(-1).mean(0), rtol=1e-5)
    # one draw of q = p is the token sampled with probability sum p²
    assert float(rates[success_rates.NAIVE][0]) == pytest.approx((p**2).sum(-1).mean(), abs=0.03)


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_draft_and_kind(zoo, monkeypatch):
    monkeypatch.setattr(success_rates, "WINDOW", 64)
    target, out = str(zoo / "target"), zoo / "rates.csv"
    options = ["--target", target, "--drafts", target, str(zoo / "draft"), "--windows", "2"]
    assert success_rates.main([*options, "--tries", "2", "--out", str(out)]) == 0
    table = pd.read_csv(out)
    assert table.decoding.tolist() == [*success_rates.KINDS] * 2
    assert table.top1[0] == 1  # the target predicts its own tokens
