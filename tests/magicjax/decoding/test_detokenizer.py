"""Text that is decoded token by token, after a prompt, for tokenizers of each kind."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from magicjax.decoding.detokenizer import Detokenizer
from magicjax.grammars.matcher import tokenizer_of
from tests.magicjax import small_tokenizers
from tests.magicjax.small_tokenizers import (
    ANALYSIS,
    ANSWER,
    ASKED,
    BYTES,
    FOREIGN,
    KINDS,
    TEXT,
    TURN,
    make,
    with_channels,
)

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def ids(kind: str, *tokens: str) -> list[int]:
    return make(kind).convert_tokens_to_ids([*tokens])


def byte_tokens(text: str | bytes) -> list[str]:
    """Returns the byte tokens of a text."""
    return [BYTES[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def texts(kind: str, tokens, prompt=(), size=1, **options) -> tuple[str, str]:
    """Returns (the text of the prompt, the new text); asserts that its pieces are the text."""
    before, detokenizer = Detokenizer(make(kind)), Detokenizer(make(kind), prompt=prompt, **options)
    before.push(prompt)
    pieces = [detokenizer.push(tokens[i : i + size])[1] for i in range(0, len(tokens), size)]
    assert "".join([*pieces, detokenizer.finish()]) == detokenizer.text
    return before.text, detokenizer.text


def whole(kind: str, tokens) -> str:
    """Returns the text of tokens by the package `tokenizers`, and by hand with byte fallback.

    Its decoder ByteFallback replaces all bytes of a run with an incomplete character.
    """
    if kind != "byte-fallback":
        return make(kind).backend_tokenizer.decode(tokens, skip_special_tokens=True)
    names = make(kind).convert_ids_to_tokens(tokens)
    parts = [
        bytes([BYTES.index(name)]) if name in BYTES else name.replace("▁", " ").encode()
        for name in names
        if name is not None and name not in small_tokenizers.SPECIAL
    ]
    return b"".join(parts).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_text_of_a_prompt_and_the_new_one_are_that_of_all_tokens(kind, data):
    """For any tokens, special ones and bytes of no character included, and any cut."""
    vocabulary = range(len(make(kind)) + 2)  # embeddings have more tokens
    encoded = make(kind)(data.draw(st.text(TEXT + FOREIGN, max_size=30)))["input_ids"]
    tokens = data.draw(st.lists(st.sampled_from(vocabulary), max_size=12)) + encoded
    begin = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(begin, len(tokens)))
    size = data.draw(st.integers(1, 4))
    before, new = texts(kind, tokens[begin:end], tokens[:begin], size)
    assert before + new == whole(kind, tokens[:end])


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_text_is_what_grammars_read(kind, data):
    read = tokenizer_of(make(kind), 0, len(make(kind)))
    text_tokens = [token for token in range(len(make(kind))) if not read.is_special_token(token)]
    tokens = data.draw(st.lists(st.sampled_from(text_tokens), max_size=12))
    prompt = make(kind)("a")["input_ids"]
    expected = read.decode_bytes(tokens).decode(errors="replace")
    assert texts(kind, tokens, prompt) == ("a", expected)


def test_a_cut_leaves_all_complete_characters():
    text = "你好世界🙂"
    byte_level = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    names = {"byte-level": "".join(part for part, _ in byte_level)}
    names["byte-fallback"] = byte_tokens(text)
    for kind, tokens in names.items():
        for count in range(len(text.encode()) + 1):
            expected = text.encode()[:count].decode(errors="replace")
            assert texts(kind, ids(kind, *tokens[:count]))[1] == expected


@pytest.mark.parametrize("kind", ["byte-fallback", "metaspace", "suffixes"])
def test_the_space_before_the_first_new_word_stays(kind):
    prompt, both = (make(kind)(text)["input_ids"] for text in ("Hello", "Hello world"))
    assert both[: len(prompt)] == prompt
    assert texts(kind, both[len(prompt) :], prompt) == ("Hello", " world")
    assert texts(kind, prompt, ids(kind, "<s>")) == ("", "Hello")  # nothing to be apart from


def test_bytes_of_no_character_do_not_end_the_text():
    first = [*byte_tokens("\n"), BYTES[0xF0], "▁", "T", *byte_tokens("é")]
    found = texts("byte-fallback", ids("byte-fallback", *first), ids("byte-fallback", "a"))
    assert found == ("a", f"\n{UNKNOWN} Té")
    lost = [*byte_tokens("你")[:2], *byte_tokens("好\n"), BYTES[0xFF], BYTES[0xFE]]
    tokens = ids("byte-fallback", *lost)
    assert texts("byte-fallback", tokens)[1] == f"{UNKNOWN}好\n{UNKNOWN}{UNKNOWN}"


def test_a_character_that_begins_in_the_prompt_is_complete_in_the_text():
    tokens = ids("byte-fallback", "a", *byte_tokens("🙂"), "b")
    for begin in range(1, 5):
        assert texts("byte-fallback", tokens[begin:], tokens[:begin]) == ("a", "🙂b")


def test_special_tokens_in_stop_strings_end_the_text():
    kind = "byte-level"
    turn, a, b, newline, less = ids(kind, TURN, "a", "b", "Ċ", "<")
    spelled = [a, *ids(kind, *TURN)]
    cases = {  # stop strings, tokens, tokens of the text, the text
        "alone": ([TURN], [a, turn, b], 2, "a"),
        "with text": ([f"{TURN}\n"], [a, turn, b, turn, newline, b], 5, "ab"),
        "after text": ([f"b{TURN}"], [a, turn, b, turn, b], 4, "a"),
        "not found": ([f"{TURN}\n"], [a, turn, b], 3, "ab"),
        "spelled": ([TURN], [*spelled, b], len(spelled), "a"),
        "two": (["<", TURN], [a, less, turn], 2, "a"),
        "no part of it": (["<", "end"], [a, turn, b], 3, "ab"),
    }
    for stop, tokens, count, text in cases.values():
        detokenizer = Detokenizer(make(kind), stop)
        pieces = [detokenizer.push([token])[1] for token in tokens if not detokenizer.stopped]
        assert (len(detokenizer.tokens), detokenizer.text) == (count, text)
        assert "".join([*pieces, detokenizer.finish()]) == detokenizer.text == text


def test_the_token_that_ends_a_text_has_none():
    a, b = ids("byte-fallback", "a", "b")
    tokens = [a, *ids("byte-fallback", BYTES[0xF0]), b]
    assert texts("byte-fallback", tokens, ends=[b])[1] == f"a{UNKNOWN}"


@pytest.mark.parametrize(
    ("prompt", "new", "text", "reasoning"),
    [
        (ASKED, ANSWER, "Hello!", "A greeting. 你"),
        ("", ANSWER, "Hello!", "A greeting. 你"),
        (ASKED, ANALYSIS, "", "A greeting. 你"),
        (ASKED, ANSWER.replace("final", "commentary"), "", "A greeting. 你Hello!"),
        (f"{ASKED}{ANSWER}", " Bye", " Bye", ""),
        (f"{ASKED}<|channel|>fin", "al<|message|>Bye", "Bye", ""),
        (ASKED, "<|message|>Bye", "Bye", ""),
        (ASKED, '{"a": 1}', '{"a": 1}', ""),  # of a grammar, which excludes special tokens
        ("a", "b", "b", ""),
    ],
)
def test_the_text_of_an_answer_in_channels_is_the_final_one(prompt, new, text, reasoning):
    tokenizer = with_channels()
    detokenizer = Detokenizer(tokenizer, ["<|end|>?"], tokenizer(prompt)["input_ids"])
    pieces = [detokenizer.push([token])[1] for token in tokenizer(new)["input_ids"]]
    assert "".join([*pieces, detokenizer.finish()]) == detokenizer.text == text
    assert detokenizer.reasoning == reasoning


SHORT = st.text("ab", min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("ab", max_size=12), st.lists(SHORT, max_size=3))
def test_the_longest_end_that_begins_a_stop_string_is_held_back(text, stop):
    assume(not any(string in text for string in stop))
    detokenizer = Detokenizer(make("byte-level"), stop)
    returned = "".join(detokenizer.push([token])[1] for token in ids("byte-level", *text))
    ends = [n for n in range(len(text)) if any(s.startswith(text[n:]) for s in stop)]
    assert returned == (text[: ends[0]] if ends else text)
