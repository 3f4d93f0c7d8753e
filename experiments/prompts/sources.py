"""The files that prompts are made from: which they are, what is in them, and what is wrong.

A file is named in every complaint about it, with the line where it has lines.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

STDLIB, FILES, PG19, LONGBENCH, QA = "stdlib", "files", "pg19", "longbench", "qa"
RANDOM = "random"
SUFFIXES = {PG19: (".txt", ".jsonl"), LONGBENCH: (".jsonl",), QA: (".json",)}  # others: any
TEMPLATES = "dataset2prompt.json"  # LongBench's name for the wording of its tasks
BEGINNING = 4096  # characters of a file that a check reads


def files(kind: str, path: str) -> list[pathlib.Path]:
    """Returns the files that prompts of a kind are made from, sorted by path; none without a path.

    A folder stands for the files below it with the kind's suffix, hidden ones left out.

    Raises:
      ValueError: there are none, or the kind has no use for them.
    """
    if not path:
        return []
    root, suffixes = pathlib.Path(path), SUFFIXES.get(kind, ())
    known = " or ".join(suffixes) or "visible"
    if root.is_dir() and kind != QA:
        found = [
            file
            for file in sorted(root.rglob("*"))
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
            and (not suffixes or file.suffix in suffixes)
        ]
        if kind == LONGBENCH:  # LongBench-E asks about the same texts again
            found = [f for f in found if not _is_copy(f)]
        if not found:
            raise ValueError(f"there is no {known} file in {path}, from which {kind} reads")
        return found
    if not root.is_file():
        what = "is a folder" if root.is_dir() else "does not exist"
        raise ValueError(
            f"{path} {what}: {kind} reads from a file{'' if kind == QA else ' or folder'}"
        )
    if suffixes and root.suffix not in suffixes:
        raise ValueError(f"{path} is no {known} file, and {kind} reads no other")
    return [root]


def check(kind: str, path: str) -> None:
    """Raises ValueError if the files are empty, or the first one does not begin as it should."""
    found = files(kind, path)
    if not any(file.stat().st_size for file in found):
        raise ValueError(f"{path} is empty: {kind} needs text")
    first = found[0]
    if first.suffix == ".jsonl":
        for number, line in _lines(first):
            record = parse(first, number, line)
            for name in ("context", "input") if kind == LONGBENCH else ("text",):
                field(record, name, first, number)
            return
    beginning = read(first, BEGINNING).lstrip()
    if kind == QA and not beginning.startswith("{"):
        raise ValueError(
            f"{path} begins with {beginning[:20]!r}: a file in SQuAD's format is a JSON object, "
            'and begins with {"data": ...'
        )


def fingerprint(kind: str, path: str) -> str:
    """Returns 16 hexadecimal digits that name the content of a kind's files; "" if it has none.

    Raises:
      ValueError: as `files`, or one cannot be read.
    """
    found = files(kind, path)
    if kind == LONGBENCH:
        folders = dict.fromkeys(file.parent for file in found)
        found += [f / TEMPLATES for f in folders if (f / TEMPLATES).is_file()]
    if not found:
        return ""
    digest = hashlib.sha256()
    for file in found:
        digest.update(file.name.encode() + b"\0")
        try:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
    return digest.hexdigest()[:16]


def texts(file: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields (source, text) of a file: of each line's field `text` (.jsonl), or all of it.

    Raises:
      ValueError: the file is no UTF-8 text, or a line no JSON object with that field.
    """
    if file.suffix != ".jsonl":
        text = read(file)
        if text.strip():
            yield file.name, text
        return
    for number, line in _lines(file):
        text = field(parse(file, number, line), "text", file, number)
        if text.strip():
            yield f"{file.name}:{number}", text


def lines(file: pathlib.Path) -> list[tuple[int, str]]:
    """Returns (number, line) of a .jsonl file's lines, empty ones left out.

    Raises:
      ValueError: the file is no UTF-8 text.
    """
    return list(_lines(file))


def read(file: pathlib.Path, most: int = -1) -> str:
    """Returns a file's text, or its first `most` characters.

    Raises:
      ValueError: it is no UTF-8 text, or cannot be read.
    """
    try:
        with file.open(encoding="utf-8-sig") as text:
            return text.read(most)
    except UnicodeDecodeError as error:
        raise _no_text(file) from error
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error


def parse(file: pathlib.Path, number: int, line: str) -> dict[str, Any]:
    """Returns the JSON object on a line.

    Raises:
      ValueError: there is none.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file}:{number}: no JSON ({error.msg} at character {error.pos + 1}): each line of a "
            ".jsonl file is a JSON object"
        ) from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{file}:{number}: JSON of type {type(record).__name__}: each line of a .jsonl file is "
            "a JSON object"
        )
    return record


def field(record: dict[str, Any], name: str, file: pathlib.Path, number: int) -> str:
    """Returns a record's text of a name.

    Raises:
      ValueError: it has none, or none that is text.
    """
    if name not in record:
        raise ValueError(
            f"{file}:{number}: no field {name!r} (fields: {', '.join(record) or 'none'})"
        )
    text = record[name]
    if not isinstance(text, str):
        raise ValueError(f"{file}:{number}: {name}={text!r} must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{file}:{number}: {name} has half a character, {text[error.start]!r}, at "
            f"{error.start}: it is no valid Unicode"
        ) from error
    return text


def _lines(file: pathlib.Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8-sig") as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise _no_text(file) from error
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error


def _no_text(file: pathlib.Path) -> ValueError:
    return ValueError(f"{file} is no UTF-8 text: convert it, or take it out of the folder")


def _is_copy(file: pathlib.Path) -> bool:
    """Returns whether a task file is LongBench-E's, and LongBench's own lies beside it."""
    name = file.stem
    return name.endswith("_e") and file.with_stem(name.removesuffix("_e")).is_file()
