"""The files that prompts are made from: finding, checking, reading.

Every error names the file, and the line if the file has records.
"""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

STDLIB, FILES, PG19, LONGBENCH, QA = "stdlib", "files", "pg19", "longbench", "qa"
DOCS, CHAT, DATASET, RANDOM = "docs", "chat", "dataset", "random"
SUFFIXES = {
    PG19: (".txt", ".jsonl"),
    LONGBENCH: (".jsonl",),
    DATASET: (".jsonl", ".json"),
    QA: (".json",),
}  # others: any
FIELDS = {LONGBENCH: ("context", "input"), DATASET: ()}  # others: text
CHAT_FILE = pathlib.Path(__file__).with_name("chat.jsonl")
TEMPLATES = "dataset2prompt.json"  # LongBench's file of prompt templates
BEGINNING = 4096  # characters of a file that `check` reads


def files(kind: str, path: str) -> list[pathlib.Path]:
    """Returns the files of a kind of prompts, sorted by path; none without a path.

    The questions of `chat` are in this package. A folder stands for all files below it with the
    kind's suffix, except hidden ones.

    Raises:
      ValueError: there are none, or the file has another suffix.
    """
    if not path:
        return [CHAT_FILE] if kind == CHAT else []
    root, suffixes = pathlib.Path(path), SUFFIXES.get(kind, ())
    expected = " or ".join(suffixes) or "visible"
    if root.is_dir() and kind != QA:
        paths = [
            file
            for file in sorted(root.rglob("*"))
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
            and (not suffixes or file.suffix in suffixes)
            and not (kind == LONGBENCH and _is_copy(file))
        ]
        if not paths:
            raise ValueError(f"{path} contains no {expected} file, which {kind} needs")
        return paths
    if not root.is_file():
        problem = "is a folder" if root.is_dir() else "does not exist"
        raise ValueError(
            f"{path} {problem}: {kind} reads a file{'' if kind == QA else ' or folder'}"
        )
    if suffixes and root.suffix not in suffixes:
        raise ValueError(f"{path} is not a {expected} file, which {kind} needs")
    return [root]


def check(kind: str, path: str) -> None:
    """Raises ValueError if all files are empty, or the first one has another format."""
    paths = files(kind, path)
    if not any(file.stat().st_size for file in paths):
        raise ValueError(f"{path} is empty: {kind} needs text")
    first = paths[0]
    if first.suffix == ".jsonl":
        for number, line in lines(first):
            record = parse(first, number, line)
            for name in FIELDS.get(kind, ("text",)):
                field(record, name, first, number)
            return
    beginning = read(first, BEGINNING).lstrip()
    if kind == QA and not beginning.startswith("{"):
        raise ValueError(
            f"{path} begins with {beginning[:20]!r}: a file in SQuAD's format is a JSON object "
            'that begins with {"data": ...'
        )


def fingerprint(kind: str, path: str) -> str:
    """Returns a hash of the content of a kind's files, 16 hexadecimal digits; "" without files.

    Raises:
      ValueError: as `files`, or a file cannot be read.
    """
    paths = files(kind, path)
    if kind == LONGBENCH:
        folders = dict.fromkeys(file.parent for file in paths)
        paths += [f / TEMPLATES for f in folders if (f / TEMPLATES).is_file()]
    try:
        return hash_files(paths)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from error


def hash_files(files: Iterable[pathlib.Path]) -> str:
    """Returns a hash of the files' names and content, 16 hexadecimal digits; "" without files."""
    digest = None
    for file in files:
        digest = digest or hashlib.sha256()
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16] if digest else ""


def texts(file: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields (source, text): the field `text` of each line of a .jsonl file, or a whole file.

    Raises:
      ValueError: the file is not UTF-8 text, or a line is not a JSON object with that field.
    """
    if file.suffix != ".jsonl":
        text = read(file)
        if text.strip():
            yield file.name, text
        return
    for number, line in lines(file):
        text = field(parse(file, number, line), "text", file, number)
        if text.strip():
            yield f"{file.name}:{number}", text


def lines(file: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line) of a file's lines that are not empty.

    Raises:
      ValueError: the file is not UTF-8 text, or cannot be read.
    """
    with _opened(file) as text:
        for number, line in enumerate(text, 1):
            if line.strip():
                yield number, line


def records(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number, record) of a .jsonl file, or of a .json file that is a list of objects.

    Raises:
      ValueError: the file is not UTF-8 text, or its content is something else.
    """
    if file.suffix == ".jsonl":
        yield from ((number, parse(file, number, line)) for number, line in lines(file))
        return
    try:
        items = json.loads(read(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: invalid JSON ({error.msg})") from error
    if not isinstance(items, list) or not all(isinstance(record, dict) for record in items):
        raise ValueError(f"{file} is not a JSON list of objects")
    yield from enumerate(items, 1)


def read(file: pathlib.Path, limit: int = -1) -> str:
    """Returns a file's text, or its first `limit` characters.

    Raises:
      ValueError: the file is not UTF-8 text, or cannot be read.
    """
    with _opened(file) as text:
        return text.read(limit)


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[TextIO]:
    """Opens a file of text; problems of reading it become ValueErrors."""
    try:
        with file.open(encoding="utf-8-sig") as text:
            yield text
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text: convert it, or remove it from the folder"
        ) from error


def parse(file: pathlib.Path, number: int, line: str) -> dict[str, Any]:
    """Returns the JSON object on a line.

    Raises:
      ValueError: the line is not a JSON object.
    """
    try:
        record = json.loads(line)
        problem = f"JSON of type {type(record).__name__}"
    except json.JSONDecodeError as error:
        problem = f"invalid JSON ({error.msg} at character {error.pos + 1})"
    else:
        if isinstance(record, dict):
            return record
    raise ValueError(f"{file}:{number}: {problem}: each line of a .jsonl file is a JSON object")


def field(record: dict[str, Any], name: str, file: pathlib.Path, number: int) -> str:
    """Returns a text field of a record.

    Raises:
      ValueError: the field is missing or not text.
    """
    if name not in record:
        raise ValueError(
            f"{file}:{number}: no field {name!r} (fields: {', '.join(record) or 'none'})"
        )
    text = record[name]
    if not isinstance(text, str):
        raise ValueError(f"{file}:{number}: {name}={text!r} must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{file}:{number}: {name} is not valid Unicode: a single surrogate "
            f"{text[error.start]!r} at {error.start}"
        ) from error
    return text


def _is_copy(file: pathlib.Path) -> bool:
    """Returns whether a file is LongBench-E's and LongBench's file of that task is beside it."""
    name = file.stem
    return name.endswith("_e") and file.with_stem(name.removesuffix("_e")).is_file()
