"""The formats of published benchmarks: how a record of a local file becomes a conversation.

`FORMATS` is the table. The fields of a file's first record select the format.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from types import UnionType
from typing import Any

from experiments.prompts import sources

LETTER = r"answer is:?\s*\(?([A-D])\b"  # LongBench v2's rule
NUMBER = r"-?\d+(?:\.\d+)?"
FORMAT = 'End with "The correct answer is (X)", where X is the letter.'
# InfiniteBench scores these by ROUGE or by the leading numbers, so string match does not apply.
NOT_MATCHED = ("longbook_sum_eng", "math_calc")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # of SPEED-Bench

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
    """A conversation of a benchmark.

    Attributes:
      turns: the user's messages.
      replies: right answers to the first of them, none if the benchmark has no such text.
      context: a long text that comes before the first message in it, "" if there is none.
      answer, final: see `Prompt`; right answers are alternatives.
      category: what is asked for.
      source: file name and number of the record.
    """

    turns: tuple[str, ...]
    replies: tuple[str, ...]
    context: str
    answer: tuple[str, ...]
    final: str
    category: str
    source: str


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """What a benchmark's records contain; functions take a record with `task`, its file's stem.

    Attributes:
      name: of the benchmark.
      fields: names and types that every record has.
      turns, category, replies, context, answer, final: those of a `Record`.
    """

    name: str
    fields: dict[str, type | UnionType]
    turns: Callable[[Fields], list[str]]
    category: Callable[[Fields], str]
    replies: Callable[[Fields], list[str]] = lambda record: []
    context: Callable[[Fields], str] = lambda record: ""
    answer: Callable[[Fields], list[str]] = lambda record: []
    final: Callable[[Fields], str] = lambda record: ""


def _choices(texts: list[str]) -> str:
    return "\n".join(["", *(f"({x}) {text}" for x, text in zip("ABCD", texts)), FORMAT])


def _longbench_v2(record: Fields) -> list[str]:
    return [record["question"] + _choices([record[f"choice_{letter}"] for letter in "ABCD"])]


def _infinitebench(record: Fields) -> list[str]:
    if any(record["options"]):
        return [record["input"] + _choices(record["options"])]
    if record["task"] == "longbook_sum_eng":
        return [record["input"] or "Summarize this book."]
    return [record["input"]]


def _infinitebench_answer(record: Fields) -> list[str]:
    if record["task"] in NOT_MATCHED:
        return []
    answer = record["answer"]
    answers = list(map(str, answer)) if isinstance(answer, list) else [str(answer)]
    return ["ABCD"[record["options"].index(answers[0])]] if any(record["options"]) else answers


# The fields of the last one are also fields of LongBench v2.
FORMATS = (
    RecordFormat(
        "Spec-Bench, MT-Bench or SPEED-Bench",
        {"question_id": int | str, "category": str, "turns": list},
        turns=lambda record: record["turns"],
        category=lambda record: record["category"],
        replies=lambda record: record.get("answers", []),  # only in our own file
    ),
    RecordFormat(
        "HumanEval",
        {"task_id": str, "prompt": str, "canonical_solution": str},
        turns=lambda record: [f"Complete this function.\n\n```python\n{record['prompt']}```"],
        category=lambda record: "coding",
        replies=lambda record: [f"```python\n{record['prompt']}{record['canonical_solution']}```"],
    ),
    RecordFormat(
        "LongBench v2",
        {"question": str, "answer": str, "context": str, "domain": str}
        | {f"choice_{letter}": str for letter in "ABCD"},
        turns=_longbench_v2,
        category=lambda record: record["domain"],
        context=lambda record: record["context"],
        answer=lambda record: [record["answer"]],
        final=lambda record: LETTER,
    ),
    RecordFormat(
        "InfiniteBench",
        {"context": str, "input": str, "answer": str | list | int, "options": list},
        turns=_infinitebench,
        category=lambda record: record["task"],
        context=lambda record: record["context"],
        answer=_infinitebench_answer,
        final=lambda record: LETTER if any(record["options"]) else "",
    ),
    RecordFormat(
        "GSM8K",
        {"question": str, "answer": str},
        turns=lambda record: [record["question"]],
        category=lambda record: "math",
        replies=lambda record: [record["answer"]],
        answer=lambda record: re.findall(NUMBER, record["answer"].replace(",", ""))[-1:],
        final=lambda record: NUMBER,
    ),
)


def read(kind: str, path: str) -> list[Record]:
    """Returns the records of the files of a path, read again only if their content changed.

    Raises:
      ValueError: a file has no known format, or a record has another format than the first.
    """
    return _read(kind, path, sources.fingerprint(kind, path))


@functools.lru_cache(maxsize=4)
def _read(kind: str, path: str, fingerprint: str) -> list[Record]:
    del fingerprint
    records: list[Record] = []
    for file in sources.files(kind, path):
        record_format = None
        for number, record in sources.records(file):
            record_format = record_format or _format(file, number, record)
            records.append(_record(record_format, file, number, record))
    return records


def _format(file: pathlib.Path, number: int, record: Fields) -> RecordFormat:
    for record_format in FORMATS:
        if record_format.fields.keys() <= record.keys():
            return record_format
    known = "; ".join(
        f"{record_format.name}: {', '.join(record_format.fields)}" for record_format in FORMATS
    )
    raise ValueError(
        f"{file}:{number}: the fields {', '.join(record) or 'none'} are of no known format "
        f"({known})"
    )


def _record(record_format: RecordFormat, file: pathlib.Path, number: int, record: Fields) -> Record:
    for name, field_type in record_format.fields.items():
        if field_type is str:
            sources.field(record, name, file, number)
        elif not isinstance(record.get(name), field_type):
            raise ValueError(
                f"{file}:{number}: {name}={record.get(name)!r}: {record_format.name} has "
                f"{field_type} here"
            )
    record = record | {"task": file.stem}
    try:
        turns, replies = record_format.turns(record), record_format.replies(record)
        answer = record_format.answer(record)
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"{file}:{number}: not a record of {record_format.name}: {error!r}"
        ) from error
    for text in (*turns, *replies):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{file}:{number}: {text!r} must be a text that is not empty")
    if not turns or turns[0].startswith(PLACEHOLDER):
        raise ValueError(
            f"{file}:{number} has no question: fetch the texts of SPEED-Bench with its own script"
        )
    return Record(
        turns=tuple(turns),
        replies=tuple(replies),
        context=record_format.context(record),
        answer=tuple(answer),
        final=record_format.final(record),
        category=record_format.category(record),
        source=f"{file.name}:{number}",
    )
