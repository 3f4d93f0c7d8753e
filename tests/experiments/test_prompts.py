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


def test_prompts_are_of_the_asked_length_the_same_each_time_and_apart():
    stream = np.arange(1000, dtype=np.int32)
    rows = prompts.cut(stream, batch=4, context=200, offset=20)
    assert rows.shape == (4, 200)
    np.testing.assert_array_equal(rows, prompts.cut(stream, 4, 200, 20))
    assert len(set(rows.ravel().tolist())) == 800  # no token of the text is used twice
    np.testing.assert_array_equal(rows[1], np.arange(280, 480))


def test_a_longer_context_is_the_same_place_with_more_before_it():
    stream = np.arange(1000, dtype=np.int32)
    short, long = prompts.cut(stream, 3, 50, 7), prompts.cut(stream, 3, 300, 7)
    np.testing.assert_array_equal(long[:, -50:], short)


def test_a_text_that_is_too_short_is_named_with_what_would_fit():
    stream = np.zeros(1000, np.int32)
    with pytest.raises(ValueError) as error:
        prompts.cut(stream, batch=4, context=300, offset=20)
    message = str(error.value)
    assert "batch=4" in message and "context=300" in message
    assert "need 1280 tokens" in message and "has 1000" in message
    assert "a batch of at most 3 or a context of at most 230" in message
    prompts.cut(stream, 3, 300, 20)
    prompts.cut(stream, 4, 230, 20)


def test_a_target_without_tokenizer_is_an_error():
    with pytest.raises(ValueError, match="no tokenizer"):
        prompts.held_out_stream(SimpleNamespace(tokenizer=None).tokenizer)
