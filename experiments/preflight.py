"""What cannot run is said before the grid starts, not after hours: from config.json, no weights.

A model without its weights is enough for the checks that `magicjax.generate` makes of every call.
"""

import functools
import pathlib
from collections.abc import Iterator

import magicjax
import models
from experiments import grid, measure
from experiments.config import ConfigError, Experiment
from magicjax.drafters import Drafter
from magicjax.generation import config_of
from magicjax.request import prepare

SOURCES = ("target", "model")  # the settings of a cell that name a model; "" names none


def check(experiment: Experiment) -> None:
    """Raises ConfigError, naming all of them once, if some cells can be known not to run.

    A cell twice, a model that does not exist, texts beyond a model's positions, a budget too small
    for the tree, another vocabulary.
    """
    groups = grid.groups(experiment)
    sources = {(key, getattr(c, key)) for group in groups for c in group for key in SOURCES}
    problems = [p for key, source in sorted(sources) for p in _of_source(key, source)]
    if not problems:
        problems = [p for group in groups for p in _of_group(group)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _of_source(key: str, source: str) -> Iterator[str]:
    """Yields what is wrong with a model that a setting names."""
    if not source:
        return
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
            _prepare(cell)
        except ValueError as error:
            if cell == plain:
                yield f"context {cell.context}: {error}"
                return
            yield f"{cell.method}: {error}"


def _prepare(cell: grid.Cell) -> None:
    """Raises ValueError if the cell's call of `generate` would, for what is no matter of text."""
    drafter: Drafter | None = None
    if cell.draft == "self":
        policy = measure.POLICIES[cell.policy](cell.sinks)
        drafter = magicjax.SelfSpeculation(policy=policy, budget=cell.kv_budget)
    elif cell.draft == "small":
        drafter = magicjax.SmallModel(_skeleton(cell.model))
    prepare(
        _skeleton(cell.target),
        [[0] * cell.context],
        drafter=drafter,
        tree=magicjax.parse_tree(cell.tree) if drafter and cell.tree else None,
        max_new_tokens=cell.new_tokens,
    )


@functools.cache
def _skeleton(source: str) -> magicjax.Model:
    """Returns a model without weights."""
    return magicjax.Model(models.build(config_of(source)), params=None, name=source)
