"""Properties of every kind of prompts, with different tokenizers."""

import json

import numpy as np
import pytest

from experiments import prompts
from experiments.prompts import corpus
from experiments.prompts.prompt import encode, leading_tokens
from tests.experiments import prompt_cases

MADE = [kind for kind in prompts.KINDS if kind != prompts.RANDOM]


class Letters:
    """A tokenizer with a token for each letter, and the end token 0."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens=True, **options):
        return [ord(letter) for letter in text]


TOKENIZERS = {
    "embedded": prompt_cases.embedded,
    "letters": prompt_cases.letters,
    "spaced": prompt_cases.spaced,
}


@pytest.fixture
def short_library(monkeypatch):
    """Replaces the standard library by a part of its held-out modules, to save time."""
    modules = prompt_cases.short_library()
    monkeypatch.setattr(corpus, "library", lambda: modules)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def prose(name, lines):
    """Returns a text of numbered lines without repetition."""
    return "".join(f"Line {i} of {name} says that {i * i} is not prime.\n" for i in range(lines))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Returns small files in the public formats, by kind."""
    root = tmp_path_factory.mktemp("data")
    (root / "texts" / "more").mkdir(parents=True)
    (root / "texts" / "a.txt").write_text(prose("a", 600))
    lines = [json.dumps({"text": prose(f"j{i}", 100)}) for i in range(3)]
    (root / "texts" / "more" / "b.jsonl").write_text("\n".join(lines) + "\n")
    (root / "books").mkdir()
    for i in range(5):
        (root / "books" / f"{1000 + i}.txt").write_text(prose(f"book {i}", 600))
    (root / "tasks").mkdir()
    for task in ("hotpotqa", "gov_report"):
        records = [
            {
                "input": f"What is {i}?" if task == "hotpotqa" else "",
                "context": prose(f"{task} {i}", 400 + 50 * i),
                "answers": [f"answer {i}", "none"],
                "all_classes": None,
                "_id": f"{i}",
            }
            for i in range(4)
        ]
        (root / "tasks" / f"{task}.jsonl").write_text("\n".join(map(json.dumps, records)))
    paragraphs = [
        {
            "context": prose(f"paragraph {i}", 4),
            "qas": [{"question": f"Who is {i}?", "id": f"{i}", "answers": [{"text": "Line"}]}],
        }
        for i in range(8)
    ]
    data = [
        {"title": "t", "paragraphs": paragraphs[:4]},
        {"title": "u", "paragraphs": paragraphs[4:]},
    ]
    (root / "squad.json").write_text(json.dumps({"data": data}))
    questions = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(40)]
    (root / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return {
        "dataset": str(root / "gsm8k.jsonl"),
        "files": str(root / "texts"),
        "pg19": str(root / "books"),
        "longbench": str(root / "tasks"),
        "qa": str(root / "squad.json"),
    }


@pytest.mark.usefixtures("short_library")
@pytest.mark.parametrize("kind", MADE)
def test_prompts_have_exactly_the_context_differ_and_begin_with_leading_tokens(
    kind, tokenizer, paths
):
    made = prompts.make(kind, tokenizer, paths.get(kind, ""), 4, 4097)
    assert len(made) == 4
    assert {(p.tokens.shape, p.tokens.dtype) for p in made} == {((4097,), np.dtype(np.int32))}
    assert len({p.tokens.tobytes() for p in made}) == 4
    leading = leading_tokens(tokenizer)
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    for prompt in made:  # no other special tokens
        assert prompt.tokens[: len(leading)].tolist() == leading
        others = prompt.tokens[len(leading) :]
        if kind in (prompts.STDLIB, "files"):  # only between texts
            assert np.isin(others, list(ends)).mean() < 0.01
        else:
            assert not np.isin(others, list(ends)).any()


@pytest.fixture(scope="module")
def twins():
    """Returns two equal tokenizers."""
    return prompt_cases.letters(), prompt_cases.letters()


@pytest.mark.usefixtures("short_library")
@pytest.mark.parametrize("kind", MADE)
def test_prompts_are_deterministic_and_depend_on_the_seed(kind, paths, twins):
    path = paths.get(kind, "")
    first, again, other = (
        [p.tokens for p in prompts.make(kind, tokenizer, path, 3, 4096, seed)]
        for tokenizer, seed in ((twins[0], 0), (twins[1], 0), (twins[0], 1))
    )
    np.testing.assert_array_equal(first, again)
    assert any((a != b).any() for a, b in zip(first, other))


@pytest.mark.usefixtures("short_library")
@pytest.mark.parametrize("kind", [k for k in MADE if k not in ("stdlib", "files")])
def test_prompts_do_not_depend_on_their_count(kind, paths, twins):
    one, three = (prompts.make(kind, twins[0], paths.get(kind, ""), n, 4096) for n in (1, 3))
    np.testing.assert_array_equal(one[0].tokens, three[0].tokens)


def test_the_text_of_a_special_token_is_encoded_as_text(tmp_path, tokenizer):
    text = " ".join([tokenizer.eos_token, "<s>"]) + " 1 2 3"
    (tmp_path / "a.txt").write_text(text * 300)
    whole = encode(tokenizer, text)
    assert tokenizer.eos_token_id in tokenizer.encode(text, add_special_tokens=False)
    assert not {tokenizer.eos_token_id, tokenizer.bos_token_id} & set(whole)
    (prompt,) = prompts.make("files", tokenizer, str(tmp_path / "a.txt"), 1, 300)
    leading = leading_tokens(tokenizer)
    assert not np.isin(prompt.tokens[len(leading) :], tokenizer.all_special_ids).any()


def test_prompts_come_from_held_out_modules_only(monkeypatch):
    modules = [corpus.Module(f"{i}.py", chr(200 + i)) for i in range(200)]
    monkeypatch.setattr(corpus, "library", lambda: modules)
    trained_on, held_out = corpus.split(modules)
    stream = set(prompts.stdlib_stream(Letters()).tolist()) - {0}
    assert stream == {ord(m.text) for m in held_out}
    assert not stream & {ord(m.text) for m in trained_on}


def test_the_least_repetitive_candidates_are_chosen():
    candidates = np.arange(6, dtype=np.int32)[:, None]
    loops = np.array([9, 0, 5, 40, 1, 30])  # how much the continuation of each repeats

    def continue_(rows):
        assert rows.shape == (2, 1)
        fresh = 1000 + np.arange(64)
        return np.stack([np.where(np.arange(64) < loops[row[0]] + 8, 7, fresh) for row in rows])

    assert prompts.least_repetitive(candidates, 2, continue_).tolist() == [1, 4]


def test_candidates_whose_answers_end_early_come_last():
    candidates = np.arange(4, dtype=np.int32)[:, None]
    rows = np.arange(4 * 32).reshape(4, 32) + 10
    rows[0, 20:] = 1  # the end, again and again
    rows[1, 4:] = 1
    rows[2] = 5  # repeats one token, but does not end
    rows[3, 30] = 1

    def choose(count, end_tokens=()):
        numbers = prompts.least_repetitive(
            candidates, count, lambda part: rows[part[:, 0]], end_tokens
        )
        return numbers.tolist()

    assert [choose(1, {1}), choose(2, {1})] == [[2], [2, 3]]
    assert choose(1) == [3]


def test_a_short_text_is_an_error_that_names_the_longest_context():
    stream = np.arange(1000, dtype=np.int32)
    with pytest.raises(ValueError) as error:
        prompts.cut(stream, count=4, context=997)
    message = str(error.value)
    assert (
        "4 prompts (rows × candidates) of context=997 need 1001 tokens" in message
        and "has 1000" in message
    )
    assert "a context of at most 996" in message
    prompts.cut(stream, 4, 996)
    with pytest.raises(ValueError, match="a context of at most 998, or"):
        prompts.cut(stream, 4, 999, leading=[7, 8])
    prompts.cut(stream, 4, 998, leading=[7, 8])


def test_prompts_that_are_copies_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("again " * 500)
    with pytest.raises(ValueError, match=r"prompts \d+ and \d+ of files are the same 50 tokens"):
        prompts.make("files", prompt_cases.letters(), str(tmp_path / "a.txt"), 11, 50)
