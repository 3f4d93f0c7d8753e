"""Prompts from local files in public formats, and errors for other files."""

import json

import pytest

from experiments import prompts
from experiments.prompts import excerpts
from experiments.prompts.prompt import encode, leading_tokens
from tests.experiments import prompt_cases


@pytest.fixture(scope="module")
def tokenizer():
    """One token per letter, after <s>."""
    return prompt_cases.letters()


def decoded(tokenizer, tokens):
    """Returns the letters of a prompt."""
    return tokenizer.decode(tokens, skip_special_tokens=True).replace(" ", "")


def numbered(name, count):
    return "".join(f"{name}{i:03}," for i in range(count))


def write_lines(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def record(context, **others):
    return {
        "input": "Who?",
        "context": context,
        "answers": ["me", "I"],
        "all_classes": None,
    } | others


def squad(path, **paragraphs):
    """Writes a file in SQuAD's format: articles by name, each of several texts with a question."""
    data = [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": text,
                    "qas": [
                        {
                            "question": f"What of {title} {i}?",
                            "id": f"{title}-{i}",
                            "answers": [{"text": text[:6], "answer_start": 0}] * 2,
                            "is_impossible": False,
                        },
                        {"question": "?", "id": "none", "answers": [], "is_impossible": True},
                    ],
                }
                for i, text in enumerate(texts)
            ],
        }
        for title, texts in paragraphs.items()
    ]
    path.write_text(json.dumps({"version": "v2.0", "data": data}))
    return str(path)


# Files of the user's own


def test_a_folder_is_the_text_of_all_its_visible_files_by_path(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("second")
    write_lines(tmp_path / "c" / "d.jsonl", {"text": "third"}, {"text": ""}, {"text": "4th"})
    (tmp_path / "a.md").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    expected = excerpts.stream(tokenizer, ["first", "second", "third", "4th"])
    (prompt,) = prompts.make("files", tokenizer, str(tmp_path), 1, len(expected))
    leading = leading_tokens(tokenizer)
    assert prompt.tokens.tolist() == [*leading, *expected[: len(expected) - 1]]


REFUSED = [
    ("stdlib", "a.txt", b"x", "stdlib takes no path: remove"),
    ("files", ".a", b"x", "contains no visible file, which files needs"),
    ("pg19", "a.csv", b"x", "contains no .txt or .jsonl file, which pg19 needs"),
    ("longbench", "a.csv", b"x", "contains no .jsonl file, which longbench needs"),
    ("longbench", "trec.jsonl", b'{"input": "Who?"}', r"trec.jsonl:1: no field 'context'"),
    ("files", "a.txt", b"", "is empty: files needs text"),
    ("files", "a.bin", b"\x80\x81", "a.bin is not UTF-8 text: convert it, or remove it"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), REFUSED)
def test_folders_without_usable_files_are_refused(kind, name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prompts.check(kind, str(tmp_path))
    if name == "a.csv":
        with pytest.raises(ValueError, match=f"a.csv is not a .* file, which {kind} needs"):
            prompts.check(kind, str(tmp_path / name))


# PG-19


def test_every_prompt_is_from_one_book_and_books_are_interleaved(tmp_path, tokenizer):
    for book in "uvw":
        (tmp_path / f"{book}.txt").write_text(numbered(book, 100))  # 500 letters
    (tmp_path / "short.txt").write_text("x")
    (tmp_path / "metadata.csv").write_text("no book " * 100)
    made = prompts.make("pg19", tokenizer, str(tmp_path), 5, 201)
    books = [set(decoded(tokenizer, p.tokens)) - set("0123456789,") for p in made]
    assert books == [{"u"}, {"v"}, {"w"}, {"u"}, {"v"}]
    assert [p.source for p in made] == ["u.txt", "v.txt", "w.txt", "u.txt", "v.txt"]


def test_too_few_books_are_an_error_that_names_the_longest_context(tmp_path, tokenizer):
    for book, length in (("u", 60), ("v", 100)):
        (tmp_path / f"{book}.txt").write_text(numbered(book, length))  # 300 and 500 letters
    with pytest.raises(ValueError) as error:
        prompts.make("pg19", tokenizer, str(tmp_path), 3, 300)
    # Two excerpts of 250 letters from one book and one from the other, each after <s>.
    assert "have 2 of the 3 prompts of context=300: choose a context of at most 251, or" in str(
        error.value
    )
    assert len(prompts.make("pg19", tokenizer, str(tmp_path), 3, 251)) == 3
    with pytest.raises(ValueError):
        prompts.make("pg19", tokenizer, str(tmp_path), 3, 252)


# LongBench


def test_a_long_record_loses_its_middle_and_a_short_one_is_skipped(tmp_path, tokenizer):
    path = write_lines(tmp_path / "hotpotqa.jsonl", record("short"), record(numbered("u", 100)))
    (prompt,) = prompts.make("longbench", tokenizer, path, 1, 101)
    whole = encode(tokenizer, f"{numbered('u', 100)}\n\nWho?\n\nAnswer:")
    assert prompt.tokens.tolist() == [1, *whole[:50], *whole[-50:]]
    assert (prompt.answer, prompt.alternatives) == (("me", "I"), True)
    assert prompt.source == "hotpotqa.jsonl:2"


def test_templates_in_the_folder_of_the_tasks_format_the_prompts(tmp_path, tokenizer):
    write_lines(tmp_path / "qasper.jsonl", record("u" * 20, all_classes=["a"]))
    write_lines(tmp_path / "trec_e.jsonl", record("v" * 20))
    templates = {"qasper": "Q {input} of {context} in {all_classes}!", "trec": "T{context}{input}"}
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(templates))
    made = prompts.make("longbench", tokenizer, str(tmp_path), 2, 20)
    expected = [f"QWho?of{'u' * 20}in['a']!", f"T{'v' * 20}Who?"]
    assert [decoded(tokenizer, p.tokens) for p in made] == [e[:9] + e[-10:] for e in expected]


def test_tasks_are_interleaved_and_copies_of_records_are_skipped(tmp_path, tokenizer):
    for task in ("hotpotqa", "hotpotqa_e", "qasper"):
        write_lines(tmp_path / f"{task}.jsonl", *(record(f"{task}{i}" * 9) for i in range(3)))
    made = prompts.make("longbench", tokenizer, str(tmp_path), 4, 30)
    tasks = [p.source.split(":")[0] for p in made]
    assert tasks == ["hotpotqa.jsonl", "qasper.jsonl"] * 2
    assert len({p.source for p in made}) == 4


def test_too_few_records_are_an_error_that_names_the_longest_context(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "trec.jsonl", *(record(c * 100 * n) for c, n in zip("uvw", (1, 2, 3)))
    )
    with pytest.raises(
        ValueError, match=r"1 of the 3 records in .* are long enough.*at most 212, or"
    ):
        prompts.make("longbench", tokenizer, path, 2, 300)
    assert len(prompts.make("longbench", tokenizer, path, 2, 212)) == 2
    with pytest.raises(
        ValueError, match=r"3 of the 3 records in .* are long enough .*: give more tasks"
    ):
        prompts.make("longbench", tokenizer, path, 4, 50)


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ("{", r"dataset2prompt.json:1: invalid JSON"),
        ('{"qasper": "{context}"}', r"no template for 'trec' \(it has: qasper\): add one"),
        ('{"trec": "{text}"}', r"the template of 'trec' does not match the record .*trec.jsonl:1"),
    ],
)
def test_invalid_templates_are_refused(templates, message, tmp_path, tokenizer):
    write_lines(tmp_path / "trec.jsonl", record("u" * 50))
    (tmp_path / "dataset2prompt.json").write_text(templates)
    with pytest.raises(ValueError, match=message):
        prompts.make("longbench", tokenizer, str(tmp_path), 1, 30)


# Questions about paragraphs


def test_the_paragraph_with_the_answer_is_whole_and_near_its_article(tmp_path, tokenizer):
    articles = {name: [numbered(f"{name}{i}", 10) for i in "kl"] for name in "uvwxy"}
    path = squad(tmp_path / "squad.json", **articles)
    made = prompts.make("qa", tokenizer, path, 10, 250)
    assert len({p.source for p in made}) == 10
    for prompt in made:
        text = decoded(tokenizer, prompt.tokens)
        name, number = prompt.source.split()[1].split("-")
        asked = articles[name][int(number)]
        assert asked in text and text.endswith(f"Question:Whatof{name}{number}?Answer:")
        assert prompt.answer == (asked[:6],) and prompt.alternatives
        assert articles[name][1 - int(number)] in text  # both fit, and a part of another


def test_the_error_names_the_shortest_context_for_every_paragraph(tmp_path, tokenizer):
    path = squad(tmp_path / "squad.json", u=[numbered("u", 10), numbered("v", 50)])
    with pytest.raises(ValueError, match="context=100 is too short for qa.*at least 322"):
        prompts.make("qa", tokenizer, path, 2, 100)
    prompts.make("qa", tokenizer, path, 2, 322)
    with pytest.raises(ValueError):
        prompts.make("qa", tokenizer, path, 2, 321)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": [{"title": "u"}]}', r"not in SQuAD's format, .*KeyError\('paragraphs'\)"),
        ("[]", "begins with '\\[\\]': a file in SQuAD's format is a JSON object"),
    ],
)
def test_a_file_in_another_format_than_squad_is_refused(text, message, tmp_path, tokenizer):
    (tmp_path / "squad.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        prompts.make("qa", tokenizer, str(tmp_path / "squad.json"), 1, 500)


# Paths are checked before prompts are made


def test_an_unknown_kind_is_an_error_that_names_the_nearest():
    with pytest.raises(
        ValueError, match="'needles' is not a kind of prompts; did you mean 'needle'?"
    ):
        prompts.check("needles", "")
    with pytest.raises(ValueError, match=r"did you mean 'stdlib'\? \(kinds: stdlib, files, pg19"):
        prompts.check("std_lib", "")


@pytest.mark.parametrize("kind", ["files", "pg19", "longbench", "qa"])
def test_a_path_that_is_missing_or_does_not_exist_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=f"{kind} needs a path: give "):
        prompts.check(kind, "")
    with pytest.raises(ValueError, match=f"nothing does not exist: {kind} reads a file"):
        prompts.check(kind, str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", r"a.jsonl:3: invalid JSON \(.* at character 2\): each line"),
        ('["text"]', r"a.jsonl:3: JSON of type list: each line"),
        ('{"body": "b", "id": 1}', r"a.jsonl:3: no field 'text' \(fields: body, id\)"),
        ('{"text": null}', r"a.jsonl:3: text=None must be a string"),
        ('{"text": "\\ud83d"}', r"a.jsonl:3: text is not valid Unicode"),
    ],
)
def test_the_error_of_an_invalid_line_names_file_and_line(line, message, tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    prompts.check("files", str(path))  # reads no further than the first line
    for kind in ("files", "pg19", "needle"):
        with pytest.raises(ValueError, match=message):
            prompts.make(kind, tokenizer, str(path), 1, 500)
    path.write_text(f"\n\n{line}\n")
    with pytest.raises(ValueError, match=message):
        prompts.check("files", str(path))


# Fingerprints


def test_a_fingerprint_follows_the_files_that_prompts_are_made_from(tmp_path):
    path = str(tmp_path)
    write_lines(tmp_path / "trec.jsonl", record("u"))
    (tmp_path / "notes.txt").write_text("a")
    seen = [prompts.fingerprint("longbench", path)]
    (tmp_path / "notes.txt").write_text("b")
    assert prompts.fingerprint("longbench", path) == seen[0]
    (tmp_path / "dataset2prompt.json").write_text("{}")
    seen.append(prompts.fingerprint("longbench", path))
    write_lines(tmp_path / "trec.jsonl", record("v"))
    seen.append(prompts.fingerprint("longbench", path))
    assert len(set(seen)) == 3 and {len(s) for s in seen} == {16}
    assert prompts.fingerprint("files", path) not in seen
