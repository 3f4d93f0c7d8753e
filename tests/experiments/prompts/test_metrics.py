import numpy as np

from experiments.prompts import metrics


def test_repeated_ngrams_of_a_text_counted_by_hand():
    # ab ba ab ba ab: three of five occurred before
    assert metrics.repeated_ngrams(np.array([[1, 2, 1, 2, 1, 2]]), n=2) == 3 / 5


def test_agreement_counts_the_second_half_only():
    target = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    draft = np.array([[0, 0, 3, 4], [0, 0, 7, 0]])
    assert metrics.agreement(target, draft) == 3 / 4
