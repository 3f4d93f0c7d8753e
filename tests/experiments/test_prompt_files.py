"""Prompts from local files in public formats, and what is said of files that are not so."""

import json

import numpy as np
import pytest

from experiments import prompts
from experiments.prompts import stretches
from experiments.prompts.prompt import encode, opening
from tests.experiments import prompt_cases


@pytest.fixture(scope="module")
def tokenizer():
    """One token a letter, behind <s>."""
    return prompt_cases.letters()


def said(tokenizer, tokens):
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


def test_a_folder_is_the_text_of_all_its_files_by_path_hidden_ones_left_out(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("second")
    write_lines(tmp_path / "c" / "d.jsonl", {"text": "third"}, {"text": ""}, {"text": "4th"})
    (tmp_path / "a.md").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    wanted = stretches.stream(tokenizer, ["first", "second", "third", "4th"])
    (prompt,) = prompts.make("files", tokenizer, str(tmp_path), 1, len(wanted))
    begin = opening(tokenizer)
    assert prompt.tokens.tolist() == [*begin, *wanted[: len(wanted) - 1]]


def test_a_file_that_has_changed_is_read_again(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    rows = []
    for letter in "ab":
        path.write_text(letter * 100)
        rows.append(prompts.make("files", tokenizer, str(path), 1, 50)[0].tokens)
    assert (rows[0] != rows[1]).any()


# PG-19


def test_every_prompt_lies_within_one_book_and_comes_from_another_until_all_have_given_one(
    tmp_path, tokenizer
):
    for book in "uvw":
        (tmp_path / f"{book}.txt").write_text(numbered(book, 100))  # 500 letters
    (tmp_path / "short.txt").write_text("x")
    (tmp_path / "metadata.csv").write_text("no book " * 100)
    made = prompts.make("pg19", tokenizer, str(tmp_path), 5, 201)
    books = [set(said(tokenizer, p.tokens)) - set("0123456789,") for p in made]
    assert books == [{"u"}, {"v"}, {"w"}, {"u"}, {"v"}]
    assert [p.source for p in made] == ["u.txt", "v.txt", "w.txt", "u.txt", "v.txt"]


def test_stretches_of_one_book_do_not_overlap(tmp_path, tokenizer):
    (tmp_path / "1.txt").write_text(numbered("u", 100))
    made = prompts.make("pg19", tokenizer, str(tmp_path), 4, 121)
    numbers = [n for p in made for n in said(tokenizer, p.tokens[1:]).split("u")[1:-1]]
    assert len(numbers) == len(set(numbers)) > 80


def test_books_are_read_from_lines_too_and_one_that_is_there_twice_counts_once(tmp_path, tokenizer):
    books = [{"short_book_title": b, "text": numbered(b, 30)} for b in "uvu"]
    path = write_lines(tmp_path / "books.jsonl", *books)
    made = prompts.make("pg19", tokenizer, path, 2, 101)
    assert [p.source for p in made] == ["books.jsonl:1", "books.jsonl:2"]
    with pytest.raises(ValueError, match="the 3 books in .* have 2 stretches of that length"):
        prompts.make("pg19", tokenizer, path, 3, 101)


def test_no_more_books_are_read_than_needed(tmp_path, tokenizer):
    (tmp_path / "1.txt").write_text(numbered("u", 100))
    (tmp_path / "2.txt").write_bytes(b"\xff\xfe no text")
    prompts.make("pg19", tokenizer, str(tmp_path), 1, 100)
    with pytest.raises(ValueError, match="2.txt is no UTF-8 text"):
        prompts.make("pg19", tokenizer, str(tmp_path), 2, 100)


def test_books_that_are_too_few_are_told_with_the_context_that_would_do(tmp_path, tokenizer):
    for book, length in (("u", 60), ("v", 100)):
        (tmp_path / f"{book}.txt").write_text(numbered(book, length))  # 300 and 500 letters
    with pytest.raises(ValueError) as error:
        prompts.make("pg19", tokenizer, str(tmp_path), 3, 300)
    # Two stretches of 250 from one book and one from the other, behind <s>.
    assert "3 prompts of context=300 are asked for, but the 2 books" in str(error.value)
    assert "have 2 stretches of that length: choose a context of at most 251, or" in str(
        error.value
    )
    assert len(prompts.make("pg19", tokenizer, str(tmp_path), 3, 251)) == 3
    with pytest.raises(ValueError):
        prompts.make("pg19", tokenizer, str(tmp_path), 3, 252)


# LongBench


def test_a_long_record_loses_its_middle_and_a_short_one_is_left_out(tmp_path, tokenizer):
    path = write_lines(tmp_path / "hotpotqa.jsonl", record("short"), record(numbered("u", 100)))
    (prompt,) = prompts.make("longbench", tokenizer, path, 1, 101)
    whole = encode(tokenizer, f"{numbered('u', 100)}\n\nWho?\n\nAnswer:")
    assert prompt.tokens.tolist() == [1, *whole[:50], *whole[-50:]]
    assert (prompt.answer, prompt.alternatives) == (("me", "I"), True)
    assert prompt.source == "hotpotqa.jsonl:2"


def test_a_record_of_just_the_asked_length_is_whole(tmp_path, tokenizer):
    path = write_lines(tmp_path / "qasper.jsonl", record("u" * 90))
    whole = encode(tokenizer, f"{'u' * 90}Who?Answer:")
    (prompt,) = prompts.make("longbench", tokenizer, path, 1, 1 + len(whole))
    assert prompt.tokens.tolist() == [1, *whole]


def test_templates_beside_the_tasks_word_the_prompts(tmp_path, tokenizer):
    write_lines(tmp_path / "qasper.jsonl", record("u" * 20, all_classes=["a"]))
    write_lines(tmp_path / "trec_e.jsonl", record("v" * 20))
    templates = {"qasper": "Q {input} of {context} in {all_classes}!", "trec": "T{context}{input}"}
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(templates))
    made = prompts.make("longbench", tokenizer, str(tmp_path), 2, 20)
    wanted = [f"QWho?of{'u' * 20}in['a']!", f"T{'v' * 20}Who?"]
    assert [said(tokenizer, p.tokens) for p in made] == [w[:9] + w[-10:] for w in wanted]


def test_tasks_take_turns_and_records_that_are_asked_again_are_left_out(tmp_path, tokenizer):
    for task in ("hotpotqa", "hotpotqa_e", "qasper"):
        write_lines(tmp_path / f"{task}.jsonl", *(record(f"{task}{i}" * 9) for i in range(3)))
    made = prompts.make("longbench", tokenizer, str(tmp_path), 4, 30)
    tasks = [p.source.split(":")[0] for p in made]
    assert tasks == ["hotpotqa.jsonl", "qasper.jsonl"] * 2
    assert len({p.source for p in made}) == 4


@pytest.mark.parametrize("task", ["gov_report", "samsum_e", "lcc"])
def test_what_longbench_does_not_match_has_no_answer_to_match(task, tmp_path, tokenizer):
    path = write_lines(tmp_path / f"{task}.jsonl", record("u" * 50))
    assert prompts.make("longbench", tokenizer, path, 1, 30)[0].answer == ()


def test_records_that_are_too_few_are_told_with_the_context_that_would_do(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "trec.jsonl", *(record(c * 100 * n) for c, n in zip("uvw", (1, 2, 3)))
    )
    with pytest.raises(
        ValueError, match=r"of the 3 records in .* 1 are that long.*at most 212, or"
    ):
        prompts.make("longbench", tokenizer, path, 2, 300)
    assert len(prompts.make("longbench", tokenizer, path, 2, 212)) == 2
    with pytest.raises(
        ValueError, match=r"of the 3 records in .* 3 are that long: give more tasks"
    ):
        prompts.make("longbench", tokenizer, path, 4, 50)


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ("{", r"dataset2prompt.json:1: no JSON"),
        ('["a"]', "no JSON object of one template for each task"),
        ('{"qasper": "{context}"}', r"no template for 'trec' \(it has: qasper\): add one"),
        ('{"trec": "{text}"}', r"the template of 'trec' does not fit the record .*trec.jsonl:1"),
        ('{"trec": "{context"}', r"the template of 'trec' does not fit the record"),
    ],
)
def test_templates_that_do_not_fit_are_refused(templates, message, tmp_path, tokenizer):
    write_lines(tmp_path / "trec.jsonl", record("u" * 50))
    (tmp_path / "dataset2prompt.json").write_text(templates)
    with pytest.raises(ValueError, match=message):
        prompts.make("longbench", tokenizer, str(tmp_path), 1, 30)


@pytest.mark.parametrize("answers", [None, "me", [1]])
def test_answers_that_are_no_texts_are_refused(answers, tmp_path, tokenizer):
    path = write_lines(tmp_path / "trec.jsonl", record("u" * 50, answers=answers))
    with pytest.raises(ValueError, match=r"trec.jsonl:1: answers=.* must be a list of texts"):
        prompts.make("longbench", tokenizer, path, 1, 30)


# Questions about paragraphs


def test_the_paragraph_with_the_answer_is_whole_among_those_of_its_article_first(
    tmp_path, tokenizer
):
    articles = {name: [numbered(f"{name}{i}", 10) for i in "kl"] for name in "uvwxy"}
    path = squad(tmp_path / "squad.json", **articles)
    made = prompts.make("qa", tokenizer, path, 10, 250)
    assert len({p.source for p in made}) == 10
    for prompt in made:
        text = said(tokenizer, prompt.tokens)
        name, number = prompt.source.split()[1].split("-")
        asked = articles[name][int(number)]
        assert asked in text and text.endswith(f"Question:Whatof{name}{number}?Answer:")
        assert prompt.answer == (asked[:6],) and prompt.alternatives
        assert articles[name][1 - int(number)] in text  # there is room for both, and a part


def test_paragraphs_come_again_in_a_context_longer_than_the_file(tmp_path, tokenizer):
    path = squad(tmp_path / "squad.json", u=[numbered("u", 10), numbered("v", 10)])
    (prompt,) = prompts.make("qa", tokenizer, path, 1, 1000)
    text = said(tokenizer, prompt.tokens)
    (answered,) = prompt.answer
    other = "v" if answered.startswith("u") else "u"
    assert len(prompt.tokens) == 1000
    assert text.count(answered) == 1 and text.count(f"{other}009,") > 5


def test_the_place_of_the_answer_differs(tmp_path, tokenizer):
    path = squad(tmp_path / "squad.json", u=[numbered(a, 20) for a in "abcdefghijkl"])
    places = []
    for prompt in prompts.make("qa", tokenizer, path, 12, 1000):
        text = said(tokenizer, prompt.tokens)
        places.append(text.index(prompt.answer[0]) / len(text))
    assert min(places) < 0.4 and max(places) > 0.6


def test_more_prompts_than_questions_are_refused(tmp_path, tokenizer):
    path = squad(tmp_path / "squad.json", u=[numbered("u", 10), numbered("v", 10)])
    with pytest.raises(
        ValueError, match="the file has 2 questions with answers, and prompt 2 needs"
    ):
        prompts.make("qa", tokenizer, path, 3, 500)


def test_the_shortest_context_of_the_error_is_enough_for_every_paragraph(tmp_path, tokenizer):
    path = squad(tmp_path / "squad.json", u=[numbered("u", 10), numbered("v", 50)])
    with pytest.raises(ValueError, match="context=100 is too short for qa.*at least 322"):
        prompts.make("qa", tokenizer, path, 2, 100)
    prompts.make("qa", tokenizer, path, 2, 322)
    with pytest.raises(ValueError):
        prompts.make("qa", tokenizer, path, 2, 321)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": [', r"squad.json:1: no JSON"),
        ('{"data": [{"title": "u"}]}', r"not in SQuAD's format, .*KeyError\('paragraphs'\)"),
        ('{"data": 3}', "not in SQuAD's format"),
        ('{"data": []}', "has 0 questions with answers about 0 paragraphs: there must be"),
        ("[]", "begins with '\\[\\]': a file in SQuAD's format is a JSON object"),
    ],
)
def test_a_file_in_another_format_than_squad_is_refused(text, message, tmp_path, tokenizer):
    (tmp_path / "squad.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        prompts.make("qa", tokenizer, str(tmp_path / "squad.json"), 1, 500)


# What is wrong with a path is said before anything is made


def test_a_kind_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="'needles' is no kind of prompts; did you mean 'needle'?"):
        prompts.check("needles", "")
    with pytest.raises(ValueError, match=r"did you mean 'stdlib'\? \(kinds: stdlib, files, pg19"):
        prompts.check("std_lib", "")


@pytest.mark.parametrize("kind", ["files", "pg19", "longbench", "qa"])
def test_a_path_that_is_missing_or_does_not_exist_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=f"{kind} needs a path: give "):
        prompts.check(kind, "")
    with pytest.raises(ValueError, match=f"nothing does not exist: {kind} reads from a file"):
        prompts.check(kind, str(tmp_path / "nothing"))


@pytest.mark.parametrize("kind", ["stdlib", "frequent_words"])
def test_a_path_that_would_be_ignored_is_refused(kind, tmp_path):
    prompts.check(kind, "")
    with pytest.raises(ValueError, match=f"{kind} takes no path, and .* would be ignored: remove"):
        prompts.check(kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["needle", "variable_tracking", "common_words"])
def test_a_haystack_may_be_given(kind, tmp_path):
    prompts.check(kind, "")
    (tmp_path / "a.txt").write_text("text")
    prompts.check(kind, str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        prompts.check(kind, str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("kind", "known"), [("files", "visible"), ("pg19", ".txt or .jsonl"), ("longbench", ".jsonl")]
)
def test_a_folder_without_files_of_the_kind_is_refused(kind, known, tmp_path):
    (tmp_path / ("a.csv" if kind != "files" else ".a")).write_text("text")
    with pytest.raises(
        ValueError, match=f"there is no {known} file in .*, from which {kind} reads"
    ):
        prompts.check(kind, str(tmp_path))


def test_a_file_or_folder_of_the_wrong_kind_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a.txt is no .jsonl file, and longbench reads no other"):
        prompts.check("longbench", str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match=r"is a folder: qa reads from a file"):
        prompts.check("qa", str(tmp_path))


@pytest.mark.parametrize("kind", ["files", "pg19", "needle"])
def test_an_empty_file_is_refused(kind, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=f"a.txt is empty: {kind} needs text"):
        prompts.check(kind, str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError):
        prompts.make(kind, tokenizer, str(tmp_path / "a.txt"), 1, 100)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\x80\x81")
    with pytest.raises(ValueError, match=r"a.bin is no UTF-8 text: convert it, or take it out"):
        prompts.check("files", str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", r"a.jsonl:3: no JSON \(.* at character 2\): each line"),
        ('["text"]', r"a.jsonl:3: JSON of type list: each line"),
        ('{"body": "b", "id": 1}', r"a.jsonl:3: no field 'text' \(fields: body, id\)"),
        ('{"text": null}', r"a.jsonl:3: text=None must be text"),
        ('{"text": "\\ud83d"}', r"a.jsonl:3: text has half a character"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(line, message, tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    prompts.check("files", str(path))  # reads no further than the first line
    for kind in ("files", "pg19", "needle"):
        with pytest.raises(ValueError, match=message):
            prompts.make(kind, tokenizer, str(path), 1, 500)
    path.write_text(f"\n\n{line}\n")
    with pytest.raises(ValueError, match=message):
        prompts.check("files", str(path))


def test_a_record_without_its_fields_is_named_at_once(tmp_path):
    path = write_lines(tmp_path / "trec.jsonl", {"input": "Who?"})
    with pytest.raises(ValueError, match=r"trec.jsonl:1: no field 'context' \(fields: input\)"):
        prompts.check("longbench", path)


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


def test_prompts_without_files_have_no_fingerprint():
    assert {prompts.fingerprint(kind, "") for kind in ("stdlib", "needle", "frequent_words")} == {
        ""
    }


def test_a_file_with_a_byte_order_mark_and_windows_lines_is_read(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "abcdefghij"}\r\n{"text": "klmno"}\r\n')
    (prompt,) = prompts.make("files", tokenizer, str(path), 1, 16)
    np.testing.assert_array_equal(
        prompt.tokens, [1, *stretches.stream(tokenizer, ["abcdefghij", "klmno"])[1:16]]
    )
