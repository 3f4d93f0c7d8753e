"""Finds cells that cannot run before the grid starts, from config.json alone, without weights.

A model without weights suffices for the checks that `magicjax.generate` makes of every call.
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence

import models
from experiments import prompts
from experiments.schema import grid
from experiments.schema.fields import ConfigError
from experiments.schema.method import PROMPT_LOOKUP
from magicjax.autotune import auto
from magicjax.decoding.request import Request, prepare
from magicjax.loading import skeleton

_skeleton = functools.cache(skeleton)
_tokenizer = functools.cache(models.load_tokenizer)


def check(groups: Sequence[Sequence[grid.Cell]], record: bool = False) -> dict[grid.Cell, str]:
    """Returns the cells that cannot run, with the reasons; empty unless `record`.

    Args:
      groups: the groups of the grid.
      record: whether to return such cells if others can run, instead of raising.

    Raises:
      ConfigError: each problem once: a missing model, texts longer than a model's positions, a
        budget too small for the tree, a different vocabulary, prompts that cannot be made.
    """
    cells = [cell for group in groups for cell in group]
    sources = {("target", cell.target) for cell in cells}
    sources |= {("model", m) for cell in cells for m in cell.models if m != PROMPT_LOOKUP}
    problems = [p for key, source in sorted(sources) for p in _check_source(key, source)]
    if not problems:
        texts = {(cell.target, cell.prompts, cell.prompt_path): cell for cell in cells}
        problems = [problem for cell in texts.values() for problem in _check_prompts(cell)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    failing = {cell: problem for group in groups for cell, problem in _check_group(group)}
    if failing and not (record and len(failing) < len(cells)):
        raise ConfigError("\n".join(dict.fromkeys(failing.values())))
    return failing


def _check_source(key: str, source: str) -> Iterator[str]:
    """Yields the problem of a model that the setting `key` names."""
    try:
        _skeleton(source)
    except (ValueError, OSError) as error:
        yield f"{key}: {error}"


def _check_prompts(cell: grid.Cell) -> Iterator[str]:
    """Yields the problems of the source of a cell's prompts."""
    try:
        prompts.check(cell.prompts, cell.prompt_path)
    except (ValueError, OSError) as error:
        yield f"prompts: {error}"
    if cell.prompts != prompts.RANDOM and not pathlib.Path(cell.target).is_dir():
        yield (
            f"target: {cell.target!r} is a preset, which has no tokenizer, and prompts are made "
            "from text: set a directory, or prompts=random"
        )


def _check_group(group: Sequence[grid.Cell]) -> Iterator[tuple[grid.Cell, str]]:
    """Yields (cell, reason) of cells that cannot run; if plain decoding cannot, of all cells."""
    first = group[0]
    try:
        check_cell(grid.plain_of(first))
        if first.prompts != prompts.RANDOM:
            size = first.batch * first.candidates, first.context, first.prompt_seed
            prompts.make(first.prompts, _tokenizer(first.target), first.prompt_path, *size)
    except (ValueError, OSError) as error:
        for cell in group:
            yield cell, f"context {first.context}: {error}"
        return
    for cell in group:
        try:
            check_cell(cell)
        except (ValueError, OSError) as error:
            yield cell, f"{cell.method}: {error}"


def check_cell(cell: grid.Cell) -> Request | None:
    """Returns the request of the cell's call of `generate`, without text; None for "auto".

    Raises:
      ValueError: the call would raise it too.
    """
    text, options = [[0] * cell.context] * cell.batch, grid.options(cell, _skeleton)
    if cell.draft == "auto":
        auto.check(_skeleton(cell.target), text, **options)
        return None
    return prepare(_skeleton(cell.target), text, **options)
