"""Negative controls of `test_policies.py`: rules that are almost right pin other entries.

They use the same prompts and the same comparison.
"""

import dataclasses

import numpy as np
import pytest

from tests.magicjax import policy_reference as reference
from tests.magicjax.policy_cases import (
    KV_HEADS,
    SETTINGS,
    check_pins,
    check_scores,
    frequencies,
    prompts,
    wanted,
)


def one_head(row, setting):
    """Attention of the first head of each group instead of the sum."""
    q = np.stack([row.q[:, row.heads_of(k)[0]] for k in range(KV_HEADS)], axis=1)
    return reference.snapkv(dataclasses.replace(row, q=q), setting.window)


def interleaved(row, setting):
    """Head h with KV head h % K, instead of neighbouring heads with one KV head."""
    order = np.arange(row.heads).reshape(-1, KV_HEADS).T.ravel()
    return reference.snapkv(dataclasses.replace(row, q=row.q[:, order]), setting.window)


def shifted_pooling(row, setting):
    """Pooling that is shifted by one position."""
    scores = reference.snapkv(row, setting.window)
    return np.concatenate([scores[:, :1], scores[:, :-1]], axis=1)


def pooling_of_all(row, setting):
    """The last candidates pooled with entries of the ring."""
    scores = reference.pooled(reference.mass(row, setting.window), 7, "max")
    return scores[:, : row.candidates]


def without_the_newest(row, setting):
    """A window that is one token older."""
    paid = reference.mass(row, setting.window + 1) - reference.mass(row, 1)
    return reference.pooled(paid[:, : row.candidates], 7, "max")


def softmax_of_candidates(row, setting):
    """Probabilities among the candidates alone."""
    paid = reference.attention(row)[-setting.window :, :, : row.candidates]
    paid = (paid / paid.sum(-1, keepdims=True)).sum(0)
    paid = paid.reshape(KV_HEADS, -1, row.candidates).sum(1)
    return reference.pooled(paid, 7, "max")


def divided_ends(row, setting):
    """Averages over existing neighbours only."""
    paid = reference.mass(row, setting.window)[:, : row.candidates]
    ones = reference.pooled(np.ones_like(paid), 5, "avg")
    return reference.pooled(paid, 5, "avg") / ones


def mean_of_queries(row, setting):
    """Attention divided by how many queries see the position, as kvpress's ObservedAttention."""
    return reference.h2o(row) / (row.length - np.arange(row.candidates))


def unnormalized_mean(row, setting):
    """KeyDiff with the mean of unnormalized keys."""
    keys = row.keys[: row.candidates]
    mean = keys.mean(0)
    cosine = np.einsum("nkd,kd->kn", keys, mean) / np.linalg.norm(keys, axis=-1).T
    return -cosine / np.linalg.norm(mean, axis=-1)[:, None]


def mean_with_the_ring(row, setting):
    """KeyDiff with the mean of all keys."""
    return reference.keydiff(dataclasses.replace(row, recent=0))[:, : row.candidates]


def as_they_stand(row, setting):
    """Expected attention of queries whose rotation was not undone."""
    n, first = row.length, max(row.length - setting.window, 0)
    turns = [reference.rotation(p, frequencies()) for p in range(n)]
    q = row.q.copy()
    for p in range(first, n):
        q[p] = row.q[p] @ turns[p].T
    return reference.expected_attention(
        dataclasses.replace(row, q=q), frequencies(), setting.window, 24
    )


def one_later(row, setting):
    """Expected attention from position n + 1 on."""
    turn = reference.rotation(1, frequencies())
    return reference.expected_attention(
        dataclasses.replace(row, q=row.q @ turn.T), frequencies(), setting.window, 24
    )


def expected(row, setting, **changes):
    return reference.expected_attention(
        row, frequencies(), **(dict(window=setting.window, future=24) | changes)
    )


def of_any_value(row, setting):
    """Expected attention without the norm of the values."""
    return expected(dataclasses.replace(row, values=np.ones_like(row.values)), setting)


WRONG = {
    "one head of a group": ("snapkv", one_head),
    "groups interleaved": ("snapkv", interleaved),
    "pooling off by one": ("snapkv", shifted_pooling),
    "another kernel": ("snapkv", lambda row, s: reference.snapkv(row, s.window, 5)),
    "average for maximum": ("snapkv", lambda row, s: reference.snapkv(row, s.window, 7, "avg")),
    "the ring pooled too": ("snapkv", pooling_of_all),
    "a longer window": ("snapkv", lambda row, s: reference.snapkv(row, s.window + 1)),
    "a shorter window": ("snapkv", lambda row, s: reference.snapkv(row, s.window - 1)),
    "an older window": ("snapkv", without_the_newest),
    "softmax of candidates": ("snapkv", softmax_of_candidates),
    "unscaled": ("snapkv", lambda row, s: reference.snapkv(row, s.window, scaled=False)),
    "scaled": ("snapkv-unscaled", lambda row, s: reference.snapkv(row, s.window, 3)),
    "ends divided by less": ("snapkv-avg", divided_ends),
    "the window for all": ("h2o", lambda row, s: reference.snapkv(row, s.window, 1)),
    "the mean of queries": ("h2o", mean_of_queries),
    "each head for itself": ("tova", lambda row, s: reference.snapkv(row, 1, 1)),
    "mean of raw keys": ("keydiff", unnormalized_mean),
    "mean with the ring": ("keydiff", mean_with_the_ring),
    "similar keys": ("keydiff", lambda row, s: -reference.keydiff(row)),
    "long keys": ("knorm", lambda row, s: -reference.knorm(row)),
    "not turned back": ("expected", as_they_stand),
    "one position later": ("expected", one_later),
    "no rotation at all": (
        "expected",
        lambda row, s: reference.expected_attention(row, None, s.window),
    ),
    "another future": ("expected", lambda row, s: expected(row, s, future=23)),
    "no spread": ("expected", lambda row, s: expected(row, s, covariance=False)),
    "no value": ("expected", of_any_value),
    "no epsilon": ("expected-epsilon", lambda row, s: expected(row, s, future=3)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_rule_that_is_almost_right_pins_other_entries(wrong):
    name, rule = WRONG[wrong]
    caught = 0
    for setting in SETTINGS[1:3]:
        count = setting.budget - setting.ring
        for row in prompts(setting):
            if row.length > setting.budget:
                scores = wanted(name, setting, row, frequencies())
                check_pins(np.array(reference.pinned(scores, count)), scores)
                try:
                    check_pins(np.array(reference.pinned(rule(row, setting), count)), scores)
                except AssertionError:
                    caught += 1
    assert caught


def test_ties_are_tolerated_only_within_float32_precision():
    scores = np.array([[1.0, 2.0, 2.0 * (1 + 1e-7), 3.0, 0.5, 3.0]])
    check_pins(np.array([[2, 3, 5]]), scores)
    check_pins(np.array([[1, 3, 5]]), scores)
    check_pins(np.array([[3]]), scores)
    for found in ([[0, 3, 5]], [[5]], [[3, 3, 5]], [[5, 3, 2]], [[3, 5, 6]]):
        with pytest.raises(AssertionError):
            check_pins(np.array(found), scores)
    check_scores(2 * scores, scores)
    for found in (scores + 0.001, -scores, scores[:, ::-1]):
        with pytest.raises(AssertionError):
            check_scores(found, scores)
