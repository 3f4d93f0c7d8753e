import numpy as np
import pytest

from experiments.prompts import metrics


def test_repeated_ngrams_of_a_text_counted_by_hand():
    # ab ba ab ba ab: three of five occurred before
    assert metrics.repeated_ngrams(np.array([[1, 2, 1, 2, 1, 2]]), n=2) == 3 / 5


def test_repeats_in_another_row_do_not_count():
    rows = np.array([[1, 2, 3, 4], [1, 2, 3, 4]])
    assert metrics.repeated_ngrams(rows, n=2) == 0.0


@pytest.mark.parametrize("length", [8, 9, 128])
def test_a_repeated_token_is_all_repetition_except_the_first_8gram(length):
    grams = length - 7
    assert metrics.repeated_ngrams(np.ones((2, length), int)) == (grams - 1) / grams


def test_a_text_too_short_for_an_8gram_is_an_error():
    with pytest.raises(ValueError, match="7 new tokens contain no 8-gram: generate at least 8"):
        metrics.repeated_ngrams(np.ones((1, 7), int))


def test_agreement_counts_the_second_half_only():
    target = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    draft = np.array([[0, 0, 3, 4], [0, 0, 7, 0]])
    assert metrics.agreement(target, draft) == 3 / 4
