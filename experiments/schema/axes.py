"""From an experiment with axes to experiments without: `grid`, `zip` and `exclude`.

    grid: {batch: [1, 4], context: [2048, 8192]}       four combinations
    zip: [{new_tokens: [64, 256], repeats: [3, 1]}]    (64, 3) and (256, 1), with each of the four
    exclude: [{batch: 4, context: 8192}]               three of them, twice

An axis is a setting of the experiment. What belongs to a method, such as its budget, takes a list
there, and can be named in `exclude`.
"""

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

import pydantic

from experiments.schema.fields import ConfigError
from experiments.schema.method import Method

# Settings that make a cell another cell.
VARIED = (
    *("target", "dtype", "mesh", "micro_batches", "batch", "context", "new_tokens", "do_sample"),
    *(
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "repeats",
        "prompts",
        "prompt_path",
        "prompt_seed",
        "candidates",
    ),
    *("agreement_tokens", "phases"),
)


def names(grid: dict[str, list[Any]], zips: Sequence[dict[str, list[Any]]]) -> list[str]:
    """Returns the axes, in order; one that is named twice is there twice."""
    return [name for axes in (grid, *zips) for name in axes]


def expand(experiment: Any) -> list[Any]:
    """Returns the experiment without axes, once for each combination of their values.

    Raises:
      ConfigError: an axis that is no setting, is there twice or has no values; lists of a zip of
        different lengths; a combination that is no experiment.
    """
    _check(experiment.grid, experiment.zip)
    zips = [
        [dict(zip(axes, values)) for values in zip(*axes.values(), strict=True)]
        for axes in experiment.zip
    ]
    products = [[{name: value} for value in values] for name, values in experiment.grid.items()]
    return [_one(experiment, parts) for parts in itertools.product(*products, *zips)]


def _one(experiment: Any, parts: Sequence[dict[str, Any]]) -> Any:
    """Returns the experiment with the values of one combination."""
    chosen = {name: value for part in parts for name, value in part.items()}
    given = {name: getattr(experiment, name) for name in experiment.model_fields_set}
    plain: dict[str, Any] = {"grid": {}, "zip": [], "exclude": []}
    try:
        return type(experiment).model_validate(given | chosen | plain)
    except pydantic.ValidationError as error:
        where = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        told = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        lines = "; ".join(line.removeprefix(": ") for line in told)
        raise ConfigError(f"grid: with {where}: {lines}") from error


def _check(grid: dict[str, list[Any]], zips: Sequence[dict[str, list[Any]]]) -> None:
    """Raises ConfigError unless the axes are settings with values."""
    found = names(grid, zips)
    for name in found:
        if name not in VARIED:
            raise ConfigError(f"grid: {unknown(name, VARIED)}")
        if found.count(name) > 1:
            raise ConfigError(f"grid: the axis {name} is there twice: remove one")
    for axes in (grid, *zips):
        for name, values in axes.items():
            if not values:
                raise ConfigError(f"grid: the axis {name} has no values, so the grid is empty")
    for name, values in grid.items():
        if any(value == other for value, other in itertools.combinations(values, 2)):
            raise ConfigError(f"grid: the axis {name} names a value twice: {values}")
    for axes in zips:
        lengths = {name: len(values) for name, values in axes.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ConfigError(f"zip: lists of one zip must be of one length, but {told}")


def unknown(name: str, known: Sequence[str]) -> str:
    """Returns what to say of an axis, or a name in `exclude`, that is none."""
    if name in Method.model_fields and name not in known:
        return f"{name} is a setting of methods: give its values there, as a list"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{name!r} names no setting that a grid can vary; {guess}(there are {', '.join(known)})"
