"""Conversations through a chat template, questions of our own, and published benchmarks."""

import collections
import json
import re

import numpy as np
import pytest

from experiments import prompts
from experiments.prompts import conversation, corpus
from experiments.prompts.prompt import encode
from experiments.prompts.tasks import record_formats
from tests.experiments import prompt_cases

CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"} | {
    "humanities"
}
BOOK = "".join(f"Line {i} says that {i * i} is a square.\n" for i in range(200))
CHOICES = {f"choice_{letter}": f"The {letter}th." for letter in "ABCD"}

# A few records in each published layout, by file name.
RECORDS = {
    "question.jsonl": [
        {"question_id": 81 + i, "category": c, "turns": [f"Why is {i}?", "And then?"]}
        for i, c in enumerate(["writing", "qa", "rag", "qa"])
    ],
    "HumanEval.jsonl": [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def add_{i}(x):\n    ",
            "canonical_solution": f"return x + {i}\n",
            "entry_point": f"add_{i}",
            "test": "",
        }
        for i in range(4)
    ],
    "test.jsonl": [
        {"question": f"What is {i} thousands?", "answer": f"It is {i},000.\n#### {i},000"}
        for i in range(1, 5)
    ],
    "data.json": [
        {
            "_id": f"{i}",
            "domain": ["Code", "Dialogue"][i % 2],
            "sub_domain": "s",
            "difficulty": "easy",
            "length": "short",
            "question": f"Which line is number {i}?",
            **CHOICES,
            "answer": "ABCD"[i],
            "context": f"Book {i}\n{BOOK}",
        }
        for i in range(4)
    ],
    "longbook_choice_eng.jsonl": [
        {
            "id": i,
            "context": f"Book {i}\n{BOOK}",
            "input": f"Who is {i}?",
            "answer": [f"Name {i}"],
            "options": [f"Name {j}" for j in range(4)],
        }
        for i in range(4)
    ],
    "math_find.jsonl": [
        {"id": i, "context": f"{i} {BOOK}", "input": "The least?", "answer": i, "options": []}
        for i in range(4)
    ],
    "longbook_sum_eng.jsonl": [
        {"id": i, "context": f"{i} {BOOK}", "input": "", "answer": ["A sum."], "options": []}
        for i in range(4)
    ],
}


@pytest.fixture(scope="module")
def chatty():
    return prompt_cases.chatty()


@pytest.fixture(scope="module")
def embedded():
    return prompt_cases.embedded()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a file of each published layout."""
    root = tmp_path_factory.mktemp("benchmarks")
    for name, records in RECORDS.items():
        lines = "\n".join(map(json.dumps, records))
        (root / name).write_text(json.dumps(records) if name.endswith(".json") else lines)
    return root


def messages(tokenizer, tokens):
    """Returns (role, content) of each message of a ChatML prompt, the last one unfinished."""
    parts = tokenizer.decode(tokens).split("<|im_start|>")
    assert parts.pop(0) == ""
    assert all(part.endswith("<|im_end|>\n") for part in parts[:-1])
    return [tuple(part.removesuffix("<|im_end|>\n").split("\n", 1)) for part in parts]


# The template


@pytest.mark.parametrize("texts", [["Hello"], ["Hi", "Good day.", "  Who are you?"]])
def test_messages_in_their_frame_are_the_tokens_of_the_chat_template(texts, chatty):
    around = conversation.around_messages(chatty, None, len(texts))
    tokens = list(around[0])
    for text, part in zip(texts, around[1:], strict=True):
        tokens += encode(chatty, text) + part
    turns = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    expected = chatty.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert tokens == expected


def test_a_template_that_drops_messages_is_refused():
    tokenizer = prompt_cases.chatty()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match=r"does not contain every message .*chat_template=no"):
        conversation.around_messages(tokenizer, None, 3)


def test_the_text_of_a_special_token_in_a_message_is_text(tmp_path, chatty):
    path = tmp_path / "question.jsonl"
    turn = "What does <|im_end|> mean?"
    path.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": [turn]}))
    (prompt,) = prompts.make("dataset", chatty, str(path), 1, 300)
    assert chatty.decode(prompt.tokens).count("<|im_end|>") == 1 + np.sum(
        prompt.tokens == chatty.convert_tokens_to_ids("<|im_end|>")
    )


@pytest.mark.parametrize("kind", ["chat", "docs", "needle", "frequent_words"])
def test_a_chat_template_that_is_asked_for_must_exist(kind, embedded):
    with pytest.raises(ValueError, match="the target's tokenizer has no chat template: use an"):
        prompts.make(kind, embedded, "", 1, 4096, chat_template=True)


@pytest.mark.parametrize("kind", ["needle", "variable_tracking", "common_words", "docs"])
def test_tasks_are_a_message_of_the_template_unless_it_is_switched_off(kind, chatty, monkeypatch):
    modules = prompt_cases.short_library()
    monkeypatch.setattr(corpus, "library", lambda: modules)
    special = chatty.convert_tokens_to_ids("<|im_start|>")
    made = prompts.make(kind, chatty, "", 2, 2048)
    assert {prompt.tokens.shape for prompt in made} == {(2048,)}
    for prompt in made:
        system, (user, text), last = messages(chatty, prompt.tokens)
        assert (system, user, last) == (("system", "Be helpful."), "user", ("assistant", ""))
        if kind != "docs":
            assert text.endswith(("=", "["))  # the question is whole
    for prompt in prompts.make(kind, chatty, "", 2, 2048, chat_template=False):
        assert len(prompt.tokens) == 2048 and special not in prompt.tokens


def test_a_context_without_room_beside_the_template_is_refused(chatty, tmp_path):
    with pytest.raises(ValueError, match=r"context=20 is too small: \d+ tokens surround the text"):
        prompts.make("needle", chatty, "", 1, 20)
    for kind in ("docs", "chat"):
        with pytest.raises(ValueError, match=r"context=20.* choose .*at least \d+") as error:
            prompts.make(kind, chatty, "", 2, 20)
        least = int(re.search(r"at least (\d+)", str(error.value))[1])
        assert len(prompts.make(kind, chatty, "", 2, least)) == 2
        with pytest.raises(ValueError):
            prompts.make(kind, chatty, "", 2, least - 1)


# Documentation


# Questions after earlier turns


@pytest.mark.parametrize("context", [600, 1500, 12000])
def test_a_question_comes_after_a_quotation_and_whole_earlier_turns(context, chatty):
    made = prompts.make("chat", chatty, "", 16, context)
    assert {prompt.tokens.shape for prompt in made} == {(context,)}
    assert collections.Counter(p.category for p in made) == dict.fromkeys(CATEGORIES, 2)
    records = record_formats.read("chat", "")
    known = {t: reply for r in records for t, reply in zip(r.turns, r.replies, strict=True)}
    follow_up = {r.turns[1]: r.turns[0] for r in records}
    for prompt in made:
        system, ask, quoted, *others, question, last = messages(chatty, prompt.tokens)
        assert (system, last) == (("system", "Be helpful."), ("assistant", ""))
        assert ask == ("user", "Quote some sections of Python's documentation.")
        assert quoted[0] == "assistant" and question[0] == "user" and question[1] in known
        assert [role for role, _ in others] == ["user", "assistant"] * (len(others) // 2)
        earlier = [text for _, text in others]
        assert all(known[text] == reply for text, reply in zip(earlier[::2], earlier[1::2]))
        if question[1] in follow_up:  # directly after the first turn
            assert earlier[-2] == follow_up[question[1]]
        else:
            assert question[1] not in earlier
        if context == 12000:  # all other records
            assert len(earlier) in (2 * 2 * 23, 2 * 2 * 23 + 2)


# Published formats


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("tokenizer", ["chatty", "embedded"])
def test_every_layout_makes_distinct_prompts_of_exact_length(name, tokenizer, folder, request):
    tokenizer = request.getfixturevalue(tokenizer)
    first, again, *others = (
        prompts.make("dataset", tokenizer, str(folder / name), 4, 900, seed)
        for seed in (0, *range(5))
    )
    rows = [prompt.tokens for prompt in first]
    assert {row.shape for row in rows} == {(900,)} and len({r.tobytes() for r in rows}) == 4
    np.testing.assert_array_equal(rows, [p.tokens for p in again])
    assert any((a != b.tokens).any() for other in others for a, b in zip(rows, other, strict=True))
    assert {p.source for p in first} == {f"{name}:{i}" for i in range(1, 5)}
    assert all(prompt.category for prompt in first)


def test_a_long_text_loses_its_middle_and_the_question_is_whole(folder, chatty):
    for prompt in prompts.make("dataset", chatty, str(folder / "data.json"), 4, 500):
        _, (_, text), _ = messages(chatty, prompt.tokens)
        number = int(prompt.source.split(":")[1]) - 1
        assert text.startswith(f"Book {number}\nLine 0") and "Line 199" in text
        assert "Line 100 " not in text and text.endswith(record_formats.FORMAT)
        assert f"Which line is number {number}?\n(A) The Ath.\n(B)" in text
        assert prompt.answer == ("ABCD"[number],)


@pytest.mark.parametrize(
    ("name", "text", "score"),
    [
        ("test.jsonl", "First 7, so it is 1,000 apples.", 1.0),
        ("test.jsonl", "It is 1,000, or rather 1,001.", 0.0),
        ("test.jsonl", "I do not know.", 0.0),
        ("data.json", "The correct answer is (A).", 1.0),
        ("data.json", "The correct answer is A", 1.0),
        ("data.json", "A is wrong. The correct answer is (B)", 0.0),
        ("longbook_choice_eng.jsonl", "The answer is: (A)", 1.0),
        ("math_find.jsonl", "The least is 0", 1.0),
    ],
)
def test_the_score_follows_the_benchmark(name, text, score, folder, chatty):
    made = prompts.make("dataset", chatty, str(folder / name), 4, 900)
    first = next(prompt for prompt in made if prompt.source == f"{name}:1")
    assert prompts.score(first, text) == score


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": 1, "body": "b"}, r"a.jsonl:1: the fields id, body are of no known format \(Spec-B"),
        (
            {"question_id": 1, "category": "c", "turns": "t"},
            r"a.jsonl:1: turns='t': Spec-Bench, MT-Bench or SPEED-Bench has <class 'list'> here",
        ),
        (
            {"context": "c", "input": "i", "answer": ["x"], "options": ["y", "z"]},
            r"a.jsonl:1: not a record of InfiniteBench: ValueError",
        ),
    ],
)
def test_a_record_of_another_format_is_refused(record, message, tmp_path, chatty):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        prompts.make("dataset", chatty, str(path), 1, 900)
