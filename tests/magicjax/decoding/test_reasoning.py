"""Reasoning between <think> and </think>, apart from the answer, for markers of each kind."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicjax.decoding.detokenizer import Detokenizer
from magicjax.decoding.prompts import chat_tokens
from magicjax.grammars.grammar import Grammar
from tests.magicjax.small_tokenizers import DEEPSEEK, QWEN3, TURN, TURNS, make, with_thinking

MARKERS = ("text", "added", "special")
# What texts are made of: markers, parts of them, and what is omitted around them.
PIECES = ["<think>", "</think>", "<", "</", "think>", "\n", "\n\n", " ", "a", "Hello!", "你"]
ASKED = {True: "[assistant]<think>\n", False: "[assistant]"}


def divided(text: str, inside: bool) -> tuple[str, str]:
    """Returns (the reasoning, the answer) of a whole text."""
    if begin := re.match(r"\s*<think>", text):
        text = text[begin.end() :]
    elif not inside:
        return "", text
    reasoning, end, answer = text.partition("</think>")
    return reasoning.strip("\n"), answer.lstrip("\n") if end else ""


def streamed(detokenizer: Detokenizer, tokens, sizes=(1,)) -> tuple[str, str]:
    """Returns (the reasoning, the text) of tokens that arrive in pieces; both only grow."""
    text, begin, i = "", 0, 0
    while begin < len(tokens) and not detokenizer.stopped:
        before = detokenizer.reasoning
        size = sizes[i % len(sizes)]
        text += detokenizer.push(tokens[begin : begin + size])[1]
        assert detokenizer.reasoning.startswith(before)
        begin, i = begin + size, i + 1
    text += detokenizer.finish()
    assert text == detokenizer.text
    return detokenizer.reasoning, text


def answer(tokenizer, prompt: str, text: str, **options) -> tuple[str, str]:
    """Returns (the reasoning, the text) after a prompt."""
    before, new = (tokenizer(x)["input_ids"] for x in (prompt, text))
    return streamed(Detokenizer(tokenizer, prompt=before, **options), new)


@pytest.mark.parametrize("markers", MARKERS)
@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    inside=st.booleans(),
    cut=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_any_cut_of_the_tokens_gives_the_parts_of_the_whole(markers, pieces, inside, cut, sizes):
    tokenizer = with_thinking(markers)
    prompt, tokens = (tokenizer(x)["input_ids"] for x in (ASKED[inside], "".join(pieces)))
    for new in (tokens, tokens[:cut]):
        whole = tokenizer.backend_tokenizer.decode(new, skip_special_tokens=False)
        assert streamed(Detokenizer(tokenizer, prompt=prompt), new, sizes) == divided(whole, inside)


def test_only_what_may_become_a_marker_is_held_back():
    tokenizer = with_thinking("text")
    detokenizer = Detokenizer(tokenizer, prompt=tokenizer(ASKED[True])["input_ids"])
    arrived = []
    for character in "a<b</tc\n</think>d</":
        text = detokenizer.push(tokenizer(character)["input_ids"])[1]
        arrived.append(text or detokenizer.reasoning)
    assert arrived[:8] == ["a", "a", "a<b", "a<b", "a<b", "a<b", "a<b</tc", "a<b</tc"]
    assert {*arrived[8:-3]} == {"a<b</tc"} and arrived[-3:] == ["d", "<", "/"]


@pytest.mark.parametrize("markers", MARKERS)
@pytest.mark.parametrize(
    ("template", "kwargs", "new", "expected"),
    [
        (QWEN3, {}, "<think>\nHm.\n</think>\n\nHello!", ("Hm.", "Hello!")),
        (QWEN3, {}, "<think>\n\n</think>\n\nHello!", ("", "Hello!")),  # for /no_think
        (QWEN3, {}, "<think>\nHm.", ("Hm.", "")),
        (QWEN3, {}, "Hello </think>", ("", "Hello </think>")),
        (QWEN3, dict(enable_thinking=False), "Hello!", ("", "Hello!")),
        (QWEN3, dict(enable_thinking=False), "\n a", ("", "\n a")),
        (DEEPSEEK, {}, "Hm.\n\nOr?\n</think>\n\nHello!", ("Hm.\n\nOr?", "Hello!")),
        (DEEPSEEK, {}, "Hm", ("Hm", "")),
        (DEEPSEEK, {}, "<think>\nHm.</think>Hello!", ("Hm.", "Hello!")),
        (DEEPSEEK, {}, "</think>\n  a</think>", ("", "  a</think>")),
        (TURNS, {}, "<think>\nHm.\n</think>", None),  # no markers in the template
    ],
)
def test_the_template_says_where_reasoning_begins(markers, template, kwargs, new, expected):
    tokenizer = with_thinking(markers, template)
    messages = [{"role": "user", "content": "What is <think>"}]
    detokenizer = Detokenizer(tokenizer, prompt=chat_tokens(tokenizer, messages, kwargs))
    if expected is None:
        expected = "", new if markers != "special" else "\nHm.\n"
    assert streamed(detokenizer, tokenizer(new)["input_ids"]) == expected


def test_stop_strings_are_searched_for_in_the_answer_only():
    tokenizer, text = with_thinking(), "<think>\n\nOne.\n\nTwo.\n</think>\n\nOne.\n\nTwo."
    parts = "One.\n\nTwo.", "One."
    assert answer(tokenizer, "a", text, stop=["\n\n"]) == parts
    assert answer(tokenizer, "a", text, stop=["\n\n", f"x{TURN}"]) == parts
    assert answer(tokenizer, "a", text, stop=["</think>"]) == ("One.\n\nTwo.", "One.\n\nTwo.")
    assert answer(tokenizer, "a", f" \n{text}", stop=["\n"]) == parts
    assert answer(tokenizer, "a", " \n", stop=["\n"]) == ("", " ")
    text = f"<think>Yes{TURN}</think>No Yes{TURN} or"
    assert answer(tokenizer, "a", text, stop=[f"Yes{TURN}"]) == ("Yes", "No ")


def test_a_token_that_ends_the_text_may_end_the_reasoning():
    tokenizer = with_thinking()
    ends = tokenizer.convert_tokens_to_ids(["</think>"])
    assert answer(tokenizer, "a", "<think>Hm.\n</think>", ends=ends) == ("Hm.", "")


def test_the_marker_of_a_call_that_a_grammar_constrains_ends_reasoning():
    tokenizer = with_thinking("added", DEEPSEEK)
    prompt, call = ASKED[True], "<tool_call>\n{}\n</tool_call>"
    calls = Grammar("start: /.*/", "<tool_call>")
    for text, *parts in (
        (f"Hm.\n</think>\n\nI look. {call}", "Hm.", f"I look. {call}"),
        (f"Hm. <tool.\n{call}", "Hm. <tool.", call),
        ("Hm. <tool", "Hm. <tool", ""),
    ):
        assert [*answer(tokenizer, prompt, text, grammar=calls)] == parts
    assert answer(tokenizer, prompt, f"Hm.{call}</think>a") == (f"Hm.{call}", "a")


def test_a_text_that_is_not_split_is_whole():
    tokenizer, text = with_thinking(), "<think>\nHm.\n</think>\n\nHello!"
    assert answer(tokenizer, "a", text, split=False) == ("", text)
    assert answer(tokenizer, "<think> is a tag.", " Yes</think>") == ("", " Yes</think>")
    assert answer(make("byte-level"), "a", text) == ("", text)


def test_the_named_templates_of_a_tokenizer_are_all_read():
    tokenizer = with_thinking("added", TURNS)
    named = {"default": TURNS, "reasoning": QWEN3}
    tokenizer.chat_template = named
    assert answer(tokenizer, "a", "<think>Hm.</think>Hello!") == ("Hm.", "Hello!")
    tokenizer.chat_template = TURNS
