"""Text that is decoded token by token, with a vocabulary that falls back to bytes."""

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from magicjax.decoding.text_stream import TextStream

PIECES = ["<unk>", "▁the", "x", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
BYTE = {byte: PIECES.index(f"<0x{byte:02X}>") for byte in range(256)}


@pytest.fixture(scope="module")
def tokenizer():
    """Returns a tokenizer like LLaMA's, without merges."""
    vocabulary = {piece: i for i, piece in enumerate(PIECES)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def pieces(tokenizer, tokens):
    """Returns the pieces of a text, and the whole."""
    stream = TextStream(tokenizer)
    found = [stream.push([token])[1] for token in tokens] + [stream.finish()]
    assert "".join(found) == stream.text
    return stream.text


@pytest.mark.parametrize(
    "tokens",
    [
        [BYTE[0xC3], BYTE[0xA9], 1, 2],  # é in two bytes
        [2, BYTE[0xE2], BYTE[0x82], BYTE[0xAC], 1],  # € in three
        [2, 1, BYTE[0xF0]],  # ends within a character
    ],
)
def test_the_pieces_add_up_to_the_whole_text(tokenizer, tokens):
    assert pieces(tokenizer, tokens) == tokenizer.decode(tokens)


def test_bytes_of_no_character_do_not_end_the_text(tokenizer):
    # The whole text has a replacement for the newline as well, which the stream has returned.
    first = [2, BYTE[0x0A], BYTE[0xF0], 1, 2]
    assert pieces(tokenizer, first) == "x\n thex"
    again = [*first, BYTE[0x0A], BYTE[0xC3], 1, 1]
    assert pieces(tokenizer, again) == "x\n thex\n the the"


SHORT = st.text("ab", min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("ab", max_size=12), st.lists(SHORT, max_size=3))
def test_the_longest_end_that_begins_a_stop_string_is_held_back(text, stop):
    assume(not any(string in text for string in stop))
    stream = TextStream(None, stop)
    stream.text = text
    ends = [n for n in range(len(text)) if any(s.startswith(text[n:]) for s in stop)]
    assert stream._held() == (len(text) - ends[0] if ends else 0)
