"""What cannot run is said before the grid starts, not after hours: from config.json, no weights.

A model without its weights is enough for the checks that `magicjax.generate` makes of every call.
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import models
from experiments import cache_settings, grid, prompts
from experiments.config import LOOK_UP, ConfigError, Experiment
from magicjax import auto
from magicjax.generation import skeleton
from magicjax.request import prepare

_skeleton = functools.cache(skeleton)


def check(experiment: Experiment) -> None:
    """Raises ConfigError, naming all of them once, if some cells can be known not to run.

    A cell twice, a model that does not exist, texts beyond a model's positions, a budget too small
    for the tree, another vocabulary, prompts that cannot be made.
    """
    groups = grid.groups(experiment)
    cells = [cell for group in groups for cell in group]
    sources = {("target", cell.target) for cell in cells}
    sources |= {("model", model) for cell in cells for model in cell.models if model != LOOK_UP}
    problems = [p for key, source in sorted(sources) for p in _of_source(key, source)]
    if not problems:
        problems = [p for group in groups for p in _of_group(group)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _of_source(key: str, source: str) -> Iterator[str]:
    """Yields what is wrong with a model that a setting names."""
    try:
        _skeleton(source)
    except (ValueError, OSError) as error:
        yield f"{key}: {error}"
        return
    if key == "target" and not pathlib.Path(source).is_dir():
        yield (
            f"target: {source!r} is a preset, which has no tokenizer, and prompts are made from "
            "text: give a directory"
        )


def _of_group(group: list[grid.Cell]) -> Iterator[str]:
    """Yields what keeps cells of a group from running; plain decoding's reason stands for all."""
    plain = group[0]
    for cell in group:
        try:
            check_cell(cell)
        except ValueError as error:
            if cell == plain:
                yield f"context {cell.context}: {error}"
                return
            yield f"{cell.method}: {cache_settings.in_words_of_keys(str(error))}"
    try:
        count = plain.batch * plain.candidates
        prompts.make(plain.prompts, *_text(plain.target), count, plain.context)
    except (ValueError, OSError) as error:
        yield f"prompts: {error}"


def check_cell(cell: grid.Cell) -> None:
    """Raises ValueError if the cell's call of `generate` would, for what is no matter of text."""
    check = auto.check if cell.draft == "auto" else prepare
    check(
        _skeleton(cell.target), [[0] * cell.context] * cell.batch, **grid.options(cell, _skeleton)
    )


@functools.cache
def _text(source: str) -> tuple[Any, np.ndarray]:
    """Returns (a model's tokenizer, the held-out text in its tokens)."""
    tokenizer = models.load_tokenizer(source)
    return tokenizer, prompts.held_out_stream(tokenizer)
