"""What cannot run is said before the grid starts, not after hours: from config.json, no weights.

A model without its weights is enough for the checks that `magicjax.generate` makes of every call.
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence

import models
from experiments import prompts
from experiments.schema import cache_settings, grid
from experiments.schema.fields import ConfigError
from experiments.schema.method import LOOK_UP
from magicjax.autotune import auto
from magicjax.decoding.request import Request, prepare
from magicjax.generation import skeleton

_skeleton = functools.cache(skeleton)


def check(groups: Sequence[Sequence[grid.Cell]], record: bool = False) -> dict[grid.Cell, str]:
    """Returns the cells that can be known not to run, and why; none unless `record`.

    Args:
      groups: of the grid.
      record: go on with the others, if there are any.

    Raises:
      ConfigError: naming all of them once: a model that does not exist, texts beyond a model's
        positions, a budget too small for the tree, another vocabulary, prompts that cannot be made.
    """
    cells = [cell for group in groups for cell in group]
    sources = {("target", cell.target) for cell in cells}
    sources |= {("model", model) for cell in cells for model in cell.models if model != LOOK_UP}
    missing = [problem for key, source in sorted(sources) for problem in _of_source(key, source)]
    missing += (
        [
            problem
            for cell in {_asked(cell): cell for cell in cells}.values()
            for problem in _of_prompts(cell)
        ]
        if not missing
        else []
    )
    if missing:
        raise ConfigError("\n".join(dict.fromkeys(missing)))
    bad = {cell: problem for group in groups for cell, problem in _of_group(group)}
    if bad and not (record and len(bad) < len(cells)):
        raise ConfigError("\n".join(dict.fromkeys(bad.values())))
    return bad


def _of_source(key: str, source: str) -> Iterator[str]:
    """Yields what is wrong with a model that a setting names."""
    try:
        _skeleton(source)
    except (ValueError, OSError) as error:
        yield f"{key}: {error}"


def _asked(cell: grid.Cell) -> tuple:
    return cell.target, cell.prompts, cell.prompt_path


def _of_prompts(cell: grid.Cell) -> Iterator[str]:
    """Yields what is wrong with where a cell's prompts come from."""
    try:
        prompts.check(cell.prompts, cell.prompt_path)
    except (ValueError, OSError) as error:
        yield f"prompts: {error}"
    if cell.prompts != prompts.RANDOM and not pathlib.Path(cell.target).is_dir():
        yield (
            f"target: {cell.target!r} is a preset, which has no tokenizer, and prompts are made "
            "from text: give a directory, or set prompts=random"
        )


def _of_group(group: Sequence[grid.Cell]) -> Iterator[tuple[grid.Cell, str]]:
    """Yields the cells of a group that cannot run, and why; plain decoding's reason is all's."""
    first = group[0]
    try:
        check_cell(grid.plain_of(first))
        if first.prompts != prompts.RANDOM:
            many = first.batch * first.candidates, first.context, first.prompt_seed
            prompts.make(first.prompts, _tokenizer(first.target), first.prompt_path, *many)
    except (ValueError, OSError) as error:
        for cell in group:
            yield cell, f"context {first.context}: {error}"
        return
    for cell in group:
        try:
            check_cell(cell)
        except (ValueError, OSError) as error:
            yield cell, f"{cell.method}: {cache_settings.in_words_of_keys(str(error))}"


def check_cell(cell: grid.Cell) -> Request | None:
    """Returns the request of the cell's call of `generate`, without text; of "auto" None.

    Raises:
      ValueError: it would raise that too.
    """
    text, options = [[0] * cell.context] * cell.batch, grid.options(cell, _skeleton)
    if cell.draft == "auto":
        auto.check(_skeleton(cell.target), text, **options)
        return None
    return prepare(_skeleton(cell.target), text, **options)


@functools.cache
def _tokenizer(source: str) -> object:
    return models.load_tokenizer(source)
