"""The store of texts keeps the newest tokens of a long list, in an array of fixed size."""

import numpy as np
import pytest

from magicjax.drafters import text_store


def test_the_store_is_the_end_of_a_list_after_ten_thousand_texts():
    rng, size = np.random.default_rng(0), 500
    store, tokens = text_store.empty(size), [-1] * size
    for number in range(10_000):
        text = rng.integers(0, 99, int(rng.choice([0, 1, 7, 60, 600], p=[0.1, 0.3, 0.3, 0.2, 0.1])))
        before = store
        store = text_store.with_text(store, text.tolist() if number % 2 else text)
        tokens += [*text.tolist(), -1] if len(text) else []
        del tokens[:-size]
        assert store.shape == (size,) and store.dtype == np.int32
        assert store.tolist() == tokens
        assert not np.shares_memory(store, before) or not len(text)


def test_a_text_longer_than_the_store_keeps_its_end():
    assert text_store.with_text(text_store.empty(4), [1, 2, 3, 4, 5]).tolist() == [3, 4, 5, -1]
    assert text_store.with_text(text_store.empty(0), [1, 2]).tolist() == []


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a text", TypeError, r"shape \(\) and dtype <U6: pass the token ids of one text"),
        ([0.5], TypeError, "dtype float64"),
        ([[1, 2]], TypeError, r"shape \(1, 2\)"),
        ([3, -1], ValueError, r"token -1: token ids are 0 to 2\*\*31 - 1"),
        ([2**31], ValueError, "token 2147483648"),
    ],
)
def test_what_is_no_text_is_an_error(text, error, message):
    with pytest.raises(error, match=message):
        text_store.with_text(text_store.empty(8), text)
