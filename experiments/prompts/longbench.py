"""LongBench's questions about long texts, from a local copy of its files (arXiv 2308.14508).

A record is worded by the templates of LongBench's `dataset2prompt.json`, or plainly where that file
does not lie beside the tasks. One that is too long loses its middle, as LongBench does it, and one
that is too short is left out: all prompts of a cell have one length.
"""

import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.prompts import sources
from experiments.prompts.prompt import Prompt, join, opening, tokens_of

# LongBench judges these by ROUGE or by edits, so that their answers can be looked for in vain.
NOT_MATCHED = (
    *("gov_report", "qmsum", "multi_news", "vcsum", "samsum", "dureader"),
    *("lcc", "repobench-p"),
)


def make(tokenizer: Any, path: str, count: int, context: int, seed: int) -> list[Prompt]:
    """Returns prompts of the tasks in turns, of each in an order that the seed chooses.

    Answers are alternatives, and looked for in the text: simpler than LongBench's own scores.

    Raises:
      ValueError: too few records are long enough, a line is no record, or a template does not fit.
    """
    begin = opening(tokenizer)
    length = context - len(begin)
    files = sources.files(sources.LONGBENCH, path)
    templates = {folder: _templates(folder) for folder in {file.parent for file in files}}
    lengths: list[int] = []
    made: dict[bytes, Prompt] = {}  # by tokens: a record that is there twice counts once
    for file, number, record in _in_turns(files, seed):
        tokens = tokens_of(tokenizer, _worded(file, number, record, templates[file.parent]))
        lengths.append(len(tokens))
        if len(tokens) < length:
            continue
        half = length // 2
        kept = np.concatenate([tokens[:half], tokens[len(tokens) - (length - half) :]])
        row = join(begin, kept)
        answers = () if _task(file) in NOT_MATCHED else _answers(record, file, number)
        source = f"{file.name}:{number}"
        made.setdefault(row.tobytes(), Prompt(row, answers, alternatives=True, source=source))
        if len(made) == count:
            return list(made.values())
    remedy = "give more tasks, or ask for fewer prompts"
    if len(lengths) >= count:
        fits = sorted(lengths, reverse=True)[count - 1] + len(begin)
        remedy = f"choose a context of at most {fits}, or {remedy}"
    raise ValueError(
        f"{count} prompts of context={context} are asked for, but of the {len(lengths)} records in "
        f"{path} {len(made)} are that long: {remedy}"
    )


def _in_turns(
    files: list[pathlib.Path], seed: int
) -> Iterator[tuple[pathlib.Path, int, dict[str, Any]]]:
    """Yields (file, line number, record): one of each file, then another of each, and so on."""

    def shuffled(index: int, file: pathlib.Path) -> Iterator[tuple[pathlib.Path, int, str]]:
        lines = sources.lines(file)
        for i in np.random.default_rng([seed, index]).permutation(len(lines)):
            yield file, *lines[i]

    queues = [shuffled(index, file) for index, file in enumerate(files)]
    for turn in itertools.zip_longest(*queues):
        for file, number, line in filter(None, turn):
            yield file, number, sources.parse(file, number, line)


def _worded(
    file: pathlib.Path, number: int, record: dict[str, Any], templates: dict[str, str] | None
) -> str:
    """Returns the text of a record's prompt, worded by its task's template, or plainly."""
    context, asked = (sources.field(record, name, file, number) for name in ("context", "input"))
    if templates is None:
        return "\n\n".join(filter(None, [context, asked, "Answer:"]))
    task, said = _task(file), file.parent / sources.TEMPLATES
    if task not in templates:
        raise ValueError(
            f"{said} has no template for {task!r} (it has: {', '.join(templates)}): add one, or "
            "take that file away for plain prompts"
        )
    try:
        return templates[task].format_map(record)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{said}: the template of {task!r} does not fit the record {file}:{number}: {error!r}; "
            f"it may name {', '.join('{' + name + '}' for name in record)}"
        ) from error


def _templates(folder: pathlib.Path) -> dict[str, str] | None:
    """Returns the template of each task, None if the folder has no file of them.

    Raises:
      ValueError: the file is no JSON object of texts.
    """
    file = folder / sources.TEMPLATES
    if not file.is_file():
        return None
    try:
        templates = json.loads(sources.read(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: no JSON ({error.msg})") from error
    if not isinstance(templates, dict) or not all(isinstance(t, str) for t in templates.values()):
        raise ValueError(f"{file} is no JSON object of one template for each task's name")
    return templates


def _answers(record: dict[str, Any], file: pathlib.Path, number: int) -> tuple[str, ...]:
    answers = record.get("answers")
    if not isinstance(answers, list) or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"{file}:{number}: answers={answers!r} must be a list of texts")
    return tuple(dict.fromkeys(answers))


def _task(file: pathlib.Path) -> str:
    """Returns the task of a file's name; `_e` marks LongBench-E's records of the same task."""
    return file.stem.removesuffix("_e")
