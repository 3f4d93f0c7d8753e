"""Independent readers find every answer in the decoded prompt."""

import collections
import re

import numpy as np
import pytest

from experiments import prompts
from experiments.prompts import corpus
from experiments.prompts.tasks import needles
from tests.experiments import prompt_cases

TOKENIZERS = {
    "embedded": prompt_cases.embedded,
    "spaced": prompt_cases.spaced,  # puts <s> and a space before every text
}


@pytest.fixture
def short_library(monkeypatch):
    """Replaces the standard library by a part of its held-out modules, to save time."""
    modules = prompt_cases.short_library()
    monkeypatch.setattr(corpus, "library", lambda: modules)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def embedded():
    return TOKENIZERS["embedded"]()


def lines_of(tokenizer, tokens):
    """Returns the lines of the decoded tokens, stripped."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return [line.strip() for line in text.split("\n")]


def assignments(lines):
    """Returns (name, value) of every assignment."""
    found = (re.fullmatch(r"([A-Z]{5}) = ([1-9]+|[A-Z]{5})", line) for line in lines)
    return [match.groups() for match in found if match]


def read_needles(lines):
    """Returns the values of the names in the question's comment."""
    asked = set(re.findall(r"\b[A-Z]{5}\b", lines[-2]))
    return {value for name, value in assignments(lines[:-2]) if name in asked}


def read_variable_tracking(lines):
    assert lines[-1] == "variables = ["
    value = re.fullmatch(r"# All variables above whose value is (\d+):", lines[-2]).group(1)
    held = {}
    for name, source in assignments(lines[:-2]):
        if source.isdigit() or source in held:
            held[name] = held.get(source, source)
    return {name for name, of in held.items() if of == value}


def read_words(lines):
    assert lines[0] == 'words = """' and lines[-1] == "answer = ["
    asked = int(re.search(r"\d+", lines[-2]).group())
    listed = [line for line in lines[1:-3] if line != "..."]
    counts = collections.Counter(listed).most_common()
    assert counts[asked - 1][1] > counts[asked][1]
    return {word for word, _ in counts[:asked]}


READERS = {
    **dict.fromkeys(needles.NEEDLES, read_needles),
    "variable_tracking": read_variable_tracking,
    "common_words": read_words,
    "frequent_words": read_words,
}
TASKS = pytest.mark.parametrize("task", READERS)
pytestmark = pytest.mark.usefixtures("short_library")


@TASKS
@pytest.mark.parametrize("context", [3200, 8193])
def test_a_prompt_has_exactly_the_context_and_contains_its_answer(task, context, tokenizer):
    (prompt,) = prompts.make(task, tokenizer, "", 1, context)
    assert (prompt.tokens.shape, prompt.tokens.dtype) == ((context,), np.int32)
    read = READERS[task](lines_of(tokenizer, prompt.tokens))
    assert read == set(prompt.answer) and len(read) == len(prompt.answer)


@TASKS
def test_the_error_names_the_shortest_context_for_all_rows(task, tokenizer):
    with pytest.raises(ValueError, match=f"context=20 is too short for {task}") as error:
        prompts.make(task, tokenizer, "", 5, 20)
    least = int(re.search(r"at least (\d+)", str(error.value)).group(1))
    for prompt in prompts.make(task, tokenizer, "", 5, least):
        assert READERS[task](lines_of(tokenizer, prompt.tokens)) == set(prompt.answer)
    with pytest.raises(ValueError, match="too short"):
        prompts.make(task, tokenizer, "", 5, least - 1)


def test_the_kinds_of_needles_differ_in_names_values_and_answers(embedded):
    counted = {}
    for task in needles.NEEDLES:
        (prompt,) = prompts.make(task, embedded, "", 1, 2048)
        found = assignments(lines_of(embedded, prompt.tokens)[:-2])
        counted[task] = (len({name for name, _ in found}), len(found), len(prompt.answer))
    assert counted == {
        "needle": (1, 1, 1),
        "needle_multikey": (4, 4, 1),
        "needle_multivalue": (1, 4, 4),
        "needle_multiquery": (4, 4, 4),
    }


def test_needles_are_at_all_depths(tokenizer):
    depths = []
    for prompt in prompts.make("needle", tokenizer, "", 20, 2048):
        text = tokenizer.decode(prompt.tokens)
        depths.append(re.search(r"^ ?[A-Z]{5} = \d{7}$", text, re.M).start() / len(text))
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_the_readers_find_no_answer_in_plain_text(embedded):
    (filler,) = prompts.make("stdlib", embedded, "", 1, 8192)
    for task in (*needles.NEEDLES, "variable_tracking"):
        (prompt,) = prompts.make(task, embedded, "", 1, 8192)
        asked = lines_of(embedded, prompt.tokens)[-2:]
        assert READERS[task]([*lines_of(embedded, filler.tokens), *asked]) == set()


def test_the_haystack_is_the_text_of_the_path(tmp_path, embedded):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"Sentence {i} of my own text.\n" for i in range(500)))
    (prompt,) = prompts.make("needle", embedded, str(path), 1, 1024)
    lines = lines_of(embedded, prompt.tokens)
    own = [line for line in lines if re.fullmatch(r"Sentence \d+ of my own text\.", line)]
    assert len(own) > 20
    path.write_text("".join(f"Another sentence, {i}.\n" for i in range(500)))
    (prompt,) = prompts.make("needle", embedded, str(path), 1, 1024)
    assert any("Another" in line for line in lines_of(embedded, prompt.tokens))


def test_a_tokenizer_that_cannot_encode_the_words_is_refused():
    with pytest.raises(ValueError, match="decodes 'ABC.*plain text"):
        prompts.make("needle", prompt_cases.words(), "", 1, 1024)
