"""Log-likelihoods of continuations beside a model written in numpy, in batches of many shapes."""

import numpy as np
import pytest

from experiments.lm_eval import likelihood
from experiments.lm_eval.likelihood import bucket, log_likelihoods
from experiments.runner import teacher
from tests.magicjax import oracle
from tests.magicjax import tiny as tinies


def expected(model, context, continuation):
    """Returns (log-probability, greedy) of a continuation, in float64."""
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


def test_likelihoods_are_those_of_the_oracle_in_the_order_asked():
    model = tinies.model()
    pairs = random_pairs(7)  # the last batch is not full
    pairs[2] = (pairs[2][0], oracle.greedy(model, pairs[2][0], 5).tolist())
    pairs[4] = (pairs[4][0], [*oracle.greedy(model, pairs[4][0], 3), 46])
    wanted = [expected(model, *pair) for pair in pairs]
    found = log_likelihoods(model, pairs, batch=3)
    np.testing.assert_allclose([x.log for x in found], [log for log, _ in wanted], rtol=1e-5)
    assert [x.greedy for x in found] == [greedy for _, greedy in wanted]
    assert found[2].greedy and not found[4].greedy


def test_a_text_off_by_one_would_be_seen():
    model, (context, continuation) = tinies.model(), random_pairs(1, seed=3)[0]
    found = log_likelihoods(model, [(context, continuation)], batch=3)[0].log
    shifted = expected(model, context[:-1], [context[-1], *continuation[:-1]])[0]
    assert abs(found - shifted) > 1e-2


def test_a_text_may_fill_the_models_positions_and_no_more():
    model = tinies.model()  # of 512 positions
    context = random_pairs(1)[0][0] * 512
    found = log_likelihoods(model, [(context[:511], [3, 4])], batch=1)
    assert found[0].log == pytest.approx(expected(model, context[:511], [3, 4])[0], rel=1e-5)
    with pytest.raises(ValueError, match="text 0 has 513 tokens to read, and the model has 512"):
        log_likelihoods(model, [(context[:512], [3, 4])], batch=1)


def test_texts_of_a_benchmark_share_a_few_shapes(monkeypatch):
    shapes = set()

    def log_probs_of(model, tokens, index, following):
        shapes.add((tokens.shape, index.shape))
        return np.zeros(index.shape), np.zeros(index.shape, bool)

    monkeypatch.setattr(teacher, "log_probs_of", log_probs_of)
    log_likelihoods(tinies.model(), random_pairs(200), batch=4)
    assert {tokens[0] for tokens, _ in shapes} == {4}
    assert len(shapes) <= 4


def test_scores_come_in_chunks_without_a_trace(monkeypatch):
    model, pair = tinies.model(), ([1, 2, 3], list(range(40)))
    whole = log_likelihoods(model, [pair], batch=1)[0]
    monkeypatch.setattr(teacher, "CHUNK", 24)  # 64 places: the last chunk is not full
    teacher._scored.clear_cache()
    teacher._hidden.clear_cache()
    assert log_likelihoods(model, [pair], batch=1)[0].log == pytest.approx(whole.log, rel=1e-6)


@pytest.mark.parametrize(
    ("pairs", "batch", "message"),
    [
        ([([1], [2]), ([], [2])], 1, "text 1 has an empty context"),
        ([([1], [])], 1, "text 0 has an empty continuation"),
        ([([1], [2])], 0, "batch=0: it must be at least 1"),
    ],
)
def test_what_has_no_likelihood_is_refused(pairs, batch, message):
    with pytest.raises(ValueError, match=message):
        log_likelihoods(tinies.model(), pairs, batch)


def test_nothing_asked_is_nothing_answered():
    assert log_likelihoods(tinies.model(), [], batch=2) == []


@pytest.mark.parametrize(("length", "wanted"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_lengths_round_up_to_powers_of_two(length, wanted):
    assert bucket(length, likelihood.LEAST) == wanted
