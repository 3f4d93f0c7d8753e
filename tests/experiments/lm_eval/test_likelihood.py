"""Log-likelihoods of continuations against a NumPy model, in batches of many shapes."""

import numpy as np
import pytest

from experiments.lm_eval.likelihood import log_likelihoods
from experiments.runner import teacher
from tests.magicjax import oracle
from tests.magicjax import tiny as tinies


def expected(model, context, continuation):
    """Returns the log-probability of a continuation in float64, and whether it is greedy."""
    text = [*context, *continuation]
    logits = oracle.logits(model, np.array(text))[len(context) - 1 : -1]
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    chosen = logs[np.arange(len(continuation)), continuation]
    return chosen.sum(), bool((logits.argmax(-1) == continuation).all())


def random_pairs(count, seed=0):
    rng = np.random.default_rng(seed)
    shapes = zip(rng.integers(1, 90, count), rng.integers(1, 20, count))
    return [(rng.integers(0, 47, a).tolist(), rng.integers(0, 47, b).tolist()) for a, b in shapes]


def test_likelihoods_equal_the_oracles_in_request_order():
    model = tinies.model()
    pairs = random_pairs(7)  # the last batch is not full
    pairs[2] = (pairs[2][0], oracle.greedy(model, pairs[2][0], 5).tolist())
    pairs[4] = (pairs[4][0], [*oracle.greedy(model, pairs[4][0], 3), 46])
    oracle_values = [expected(model, *pair) for pair in pairs]
    scored = log_likelihoods(model, pairs, batch=3)
    np.testing.assert_allclose([x.log for x in scored], [x for x, _ in oracle_values], rtol=1e-5)
    assert [x.greedy for x in scored] == [greedy for _, greedy in oracle_values]
    assert scored[2].greedy and not scored[4].greedy


def test_a_text_off_by_one_differs():
    model, (context, continuation) = tinies.model(), random_pairs(1, seed=3)[0]
    value = log_likelihoods(model, [(context, continuation)], batch=3)[0].log
    shifted = expected(model, context[:-1], [context[-1], *continuation[:-1]])[0]
    assert abs(value - shifted) > 1e-2


def test_a_text_may_fill_the_models_positions_and_no_more():
    model = tinies.model()  # of 512 positions
    context = random_pairs(1)[0][0] * 512
    scored = log_likelihoods(model, [(context[:511], [3, 4])], batch=1)
    assert scored[0].log == pytest.approx(expected(model, context[:511], [3, 4])[0], rel=1e-5)
    with pytest.raises(ValueError, match="text 0 has 513 input tokens, but the model has 512"):
        log_likelihoods(model, [(context[:512], [3, 4])], batch=1)


def test_texts_of_a_benchmark_share_a_few_shapes(monkeypatch):
    shapes = set()

    def log_probs(model, tokens, index, following):
        shapes.add((tokens.shape, index.shape))
        return np.zeros(index.shape), np.zeros(index.shape, bool)

    monkeypatch.setattr(teacher, "log_probs", log_probs)
    log_likelihoods(tinies.model(), random_pairs(200), batch=4)
    assert {tokens[0] for tokens, _ in shapes} == {4}
    assert len(shapes) <= 4


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([([1], [2]), ([], [2])], "text 1 has an empty context"),
        ([([1], [])], "text 0 has an empty continuation"),
    ],
)
def test_invalid_input_is_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        log_likelihoods(tinies.model(), pairs, batch=1)
