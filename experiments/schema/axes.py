"""Expands an experiment with axes (`grid`, `zip`) into experiments without.

    grid: {batch: [1, 4], context: [2048, 8192]}       four combinations
    zip: [{new_tokens: [64, 256], repeats: [3, 1]}]    (64, 3) and (256, 1), with each of the four
    exclude: [{batch: 4, context: 8192}]               removes one of the four, with both pairs

An axis is a setting of the experiment. An option of a method, such as its budget, takes a list in
the method; `exclude` accepts both.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.schema.fields import ConfigError, validated
from experiments.schema.method import OPTIONS, Method
from experiments.schema.settings import declared
from magicjax.suggest import did_you_mean


def names(grid: dict[str, list[Any]], zips: Sequence[dict[str, list[Any]]]) -> list[str]:
    """Returns the names of the axes, in order, duplicates included."""
    return [name for axes in (grid, *zips) for name in axes]


def expand(experiment: Any) -> list[Any]:
    """Returns one experiment without axes for each combination of their values.

    Raises:
      ConfigError: an axis that is not a setting, occurs twice or has no values; lists of different
        lengths in a zip; a combination that is not a valid experiment.
    """
    _check(experiment.grid, experiment.zip, list(declared(type(experiment))))
    zips = [
        [dict(zip(axes, values)) for values in zip(*axes.values(), strict=True)]
        for axes in experiment.zip
    ]
    products = [[{name: value} for value in values] for name, values in experiment.grid.items()]
    return [_combination(experiment, parts) for parts in itertools.product(*products, *zips)]


def _combination(experiment: Any, parts: Sequence[dict[str, Any]]) -> Any:
    """Returns the experiment with the values of one combination."""
    values = {name: value for part in parts for name, value in part.items()}
    base = {name: getattr(experiment, name) for name in experiment.model_fields_set}
    no_axes: dict[str, Any] = {"grid": {}, "zip": [], "exclude": []}
    where = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return validated(type(experiment), base | values | no_axes, f"grid: with {where}")


def _check(
    grid: dict[str, list[Any]], zips: Sequence[dict[str, list[Any]]], known: Sequence[str]
) -> None:
    """Raises ConfigError unless the axes are settings with values."""
    axis_names = names(grid, zips)
    for name, values in (pair for axes in (grid, *zips) for pair in axes.items()):
        if name not in known:
            raise ConfigError(f"grid: {unknown(name, known)}")
        if axis_names.count(name) > 1:
            raise ConfigError(
                f"the axis {name} occurs twice in grid and zip, those of a base included: remove "
                "one; `zip: []` drops the zip of a base"
            )
        if not values:
            raise ConfigError(f"grid: the axis {name} has no values, so the grid is empty")
    for name, values in grid.items():
        if any(value == other for value, other in itertools.combinations(values, 2)):
            raise ConfigError(f"grid: the axis {name} lists a value twice: {values}")
    for axes in zips:
        if len({len(values) for values in axes.values()}) > 1:
            lengths = ", ".join(f"{name} has {len(values)}" for name, values in axes.items())
            raise ConfigError(f"zip: the lists of one zip must have one length, but {lengths}")


def unknown(name: str, known: Iterable[str]) -> str:
    """Returns the error message for an unknown name in `grid`, `zip` or `exclude`."""
    of_methods = {*Method.model_fields, *OPTIONS}
    if name in of_methods and name not in known:
        return f"{name} is an option of methods: list its values there"
    hint = did_you_mean(name, known)
    hint = hint or did_you_mean(name, of_methods).replace("?", " of methods?")
    return f"{name!r} is not a setting that a grid can vary{hint} (settings: {', '.join(known)})"
