from types import SimpleNamespace

import numpy as np
import pytest

from experiments import corpus, prompts


class Letters:
    """A tokenizer of one token for each letter; 0 ends a text."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens, verbose):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_the_stream_is_the_modules_in_order_each_with_an_end():
    modules = [corpus.Module("a.py", "ab"), corpus.Module("b.py", "c")]
    stream = prompts.held_out_stream(Letters(), modules)
    np.testing.assert_array_equal(stream, [97, 98, 0, 99, 0])


def test_prompts_come_from_held_out_modules_only(monkeypatch):
    modules = [corpus.Module(f"{i}.py", chr(200 + i)) for i in range(200)]
    monkeypatch.setattr(corpus, "library", lambda: modules)
    trained_on, held_out = corpus.split(modules)
    stream = set(prompts.held_out_stream(Letters()).tolist()) - {0}
    assert stream == {ord(m.text) for m in held_out}
    assert not stream & {ord(m.text) for m in trained_on}


def test_stretches_are_of_the_asked_length_the_same_each_time_and_apart():
    stream = np.arange(100, dtype=np.int32)
    rows = prompts.cut(stream, count=2, context=60)
    np.testing.assert_array_equal(rows, [np.arange(10, 70), np.arange(30, 90)])
    np.testing.assert_array_equal(rows, prompts.cut(stream, 2, 60))
    many = prompts.cut(stream, 40, 60)
    assert many.shape == (40, 60) and len({tuple(row) for row in many}) == 40


def test_the_rows_are_those_that_repeat_themselves_least():
    candidates = np.arange(6, dtype=np.int32)[:, None]
    loops = np.array([9, 0, 5, 40, 1, 30])  # how much the continuation of each repeats

    def continue_(rows):
        assert rows.shape == (2, 1)
        fresh = 1000 + np.arange(64)
        return np.stack([np.where(np.arange(64) < loops[row[0]] + 8, 7, fresh) for row in rows])

    chosen = prompts.least_repetitive(candidates, 2, continue_)
    np.testing.assert_array_equal(chosen, [[1], [4]])


def test_without_a_choice_nothing_is_generated():
    candidates = np.arange(3, dtype=np.int32)[:, None]
    assert prompts.least_repetitive(candidates, 3, None) is candidates


def test_a_text_that_is_too_short_is_named_with_what_would_fit():
    stream = np.zeros(1000, np.int32)
    with pytest.raises(ValueError) as error:
        prompts.cut(stream, count=4, context=997)
    message = str(error.value)
    assert "4 prompts of context=997 need 1001 tokens" in message and "has 1000" in message
    assert "a context of at most 996" in message
    prompts.cut(stream, 4, 996)


def test_a_target_without_tokenizer_is_an_error():
    with pytest.raises(ValueError, match="no tokenizer"):
        prompts.held_out_stream(SimpleNamespace(tokenizer=None).tokenizer)
