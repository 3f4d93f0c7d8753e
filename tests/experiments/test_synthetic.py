"""Every answer is found again in the decoded prompt, by readers that know nothing of its making."""

import collections
import re

import numpy as np
import pytest

import models
from experiments import prompts, synthetic

TASKS = pytest.mark.parametrize("name", synthetic.TASKS)


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("experiments/zoo/target")


@pytest.fixture(scope="module")
def stream(tokenizer):
    return prompts.held_out_stream(tokenizer)


@pytest.fixture
def make(tokenizer, stream):
    def make(name, context, row=0, seed=0):
        return synthetic.TASKS[name](tokenizer, stream, context, seed, row)

    return make


def assignments(lines):
    """Returns what each variable holds behind the lines, read in order; others are skipped."""
    held = {}
    for line in lines:
        if found := re.fullmatch(r"([A-Z]{5}) = ([1-9]+|[A-Z]{5})", line):
            name, source = found.groups()
            if source.isdigit() or source in held:
                held[name] = held.get(source, source)
    return held


def read_needle(lines):
    name = lines[-1].removesuffix(" =")
    held = assignments(lines[:-1])
    return {held[name]} if name in held else set()


def read_variable_tracking(lines):
    assert lines[-1] == "variables = ["
    value = re.fullmatch(r"# All variables above whose value is (\d+):", lines[-2]).group(1)
    return {name for name, held in assignments(lines[:-2]).items() if held == value}


def read_common_words(lines):
    assert lines[0] == 'words = """' and lines[-1] == "common = ["
    asked = int(re.search(r"\d+", lines[-2]).group())
    counts = collections.Counter(lines[1:-3]).most_common()
    assert counts[asked - 1][1] >= 2 * counts[asked][1]
    return {word for word, _ in counts[:asked]}


READERS = {
    "needle": read_needle,
    "variable_tracking": read_variable_tracking,
    "common_words": read_common_words,
}


@TASKS
@pytest.mark.parametrize("context", [1500, 2048, 2049, 8192, 32768])
def test_a_prompt_is_exactly_as_long_as_asked_and_its_answer_is_in_it(
    name, context, make, tokenizer
):
    prompt = make(name, context)
    assert (prompt.tokens.shape, prompt.tokens.dtype) == ((context,), np.int32)
    read = READERS[name](tokenizer.decode(prompt.tokens).split("\n"))
    assert read == set(prompt.answer) and len(read) == len(prompt.answer)


@TASKS
def test_every_row_has_an_answer_of_its_own_and_gives_it(name, make, tokenizer):
    rows = [make(name, 1500, row) for row in range(6)]
    for prompt in rows:
        assert READERS[name](tokenizer.decode(prompt.tokens).split("\n")) == set(prompt.answer)
    assert len({prompt.answer for prompt in rows}) == len(rows)


@TASKS
def test_a_prompt_is_the_same_each_time_and_another_with_another_seed_or_row(name, make):
    first = make(name, 1500)
    np.testing.assert_array_equal(first.tokens, make(name, 1500).tokens)
    for other in (make(name, 1500, row=1), make(name, 1500, seed=1)):
        assert (first.tokens != other.tokens).any() and first.answer != other.answer


@TASKS
def test_the_shortest_context_that_the_error_names_is_enough(name, make, tokenizer):
    with pytest.raises(ValueError, match=f"context=20 is too short for {name}") as error:
        make(name, 20)
    least = int(re.search(r"at least (\d+)", str(error.value)).group(1))
    prompt = make(name, least)
    assert READERS[name](tokenizer.decode(prompt.tokens).split("\n")) == set(prompt.answer)
    with pytest.raises(ValueError, match="too short"):
        make(name, least - 1)


def test_needles_lie_at_all_depths(make, tokenizer):
    texts = [tokenizer.decode(make("needle", 2048, row).tokens) for row in range(20)]
    depths = [re.search(r"^[A-Z]{5} = \d{7}$", text, re.M).start() / len(text) for text in texts]
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_two_chains_are_scattered_among_each_other_and_only_one_is_asked_for(make, tokenizer):
    prompt = make("variable_tracking", 2048)
    lines = tokenizer.decode(prompt.tokens).split("\n")
    held = assignments(lines)
    assert len(held) == 10 and len(prompt.answer) == 5
    assert read_variable_tracking([*lines[:-2][::-1], *lines[-2:]]) != set(prompt.answer)
    asked = [name in prompt.answer for name in held]
    assert asked not in (sorted(asked), sorted(asked)[::-1])


def test_the_reader_finds_no_answer_where_none_was_hidden(stream, tokenizer, make):
    filler = tokenizer.decode(prompts.cut(stream, 1, 8192)[0]).split("\n")
    for name in ("needle", "variable_tracking"):
        lines = tokenizer.decode(make(name, 8192).tokens).split("\n")
        assert READERS[name]([*filler, *lines[-2:]]) == set()


def test_a_context_longer_than_the_held_out_text_reads_it_again(tokenizer, stream):
    prompt = synthetic.needle(tokenizer, stream[:500], 2048, 0, 0)
    assert len(prompt.tokens) == 2048
    assert READERS["needle"](tokenizer.decode(prompt.tokens).split("\n")) == set(prompt.answer)


def test_the_longest_context_that_the_error_names_has_enough_rare_words(tokenizer, stream):
    with pytest.raises(ValueError, match="context=60000 is too long for common_words") as error:
        synthetic.common_words(tokenizer, stream[:8000], 60000, 0, 0)
    most = int(re.search(r"fill (\d+) tokens", str(error.value)).group(1))
    prompt = synthetic.common_words(tokenizer, stream[:8000], most, 0, 0)
    assert len(prompt.tokens) == most
    lines = tokenizer.decode(prompt.tokens).split("\n")
    assert read_common_words(lines) == set(prompt.answer)
    with pytest.raises(ValueError, match="too long"):
        synthetic.common_words(tokenizer, stream[:8000], most + 1, 0, 0)
