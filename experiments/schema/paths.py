"""Paths in a file of settings, which are relative to the file."""

import os
import pathlib
from collections.abc import Collection
from typing import Any

from experiments.schema.method import AUTO
from magicjax.drafters import spec

PATHS = ("target", "prompt_path", "profile")
DRAFTERS = ("drafter", "drafters")  # whose texts contain paths of models


def from_working_directory(
    raw: dict[str, Any], folder: pathlib.Path, names: Collection[str] = PATHS
) -> dict[str, Any]:
    """Returns a file's settings with paths that are relative to the working directory.

    Args:
      raw: the settings of a file, or of a method or the axes in it.
      folder: of the file. What does not exist there is unchanged: a name, a preset, or a path that
        is relative to the working directory.
      names: of the settings that are paths.
    """
    changed, nested = dict(raw), (*names, "model")  # `exclude` names models
    for name, value in raw.items():
        if name in names:
            changed[name] = _map_values(value, lambda path: _path(path, folder))
        elif name in DRAFTERS:
            changed[name] = _map_values(value, lambda text: _drafter(text, folder))
        elif name in ("grid", "zip", "methods", "exclude"):
            changed[name] = _map_values(
                value, lambda settings: from_working_directory(settings, folder, nested), dict
            )
    if isinstance(raw.get("results"), str):  # a folder that need not exist
        changed["results"] = os.path.normpath(folder / raw["results"])
    return changed


def _map_values(value: Any, change: Any, value_type: type = str) -> Any:
    """Returns a value, or each value of a list, changed if it is of the given type."""
    if isinstance(value, list):
        return [_map_values(item, change, value_type) for item in value]
    return change(value) if isinstance(value, value_type) else value


def _path(path: str, folder: pathlib.Path) -> str:
    exists = path and (folder / path).exists()
    return os.path.normpath(folder / path) if exists else path


def _drafter(text: str, folder: pathlib.Path) -> str:
    """Returns a drafter's text with other paths of its models; wrong ones are unchanged."""
    if text == AUTO:
        return text

    try:
        return spec.with_paths(spec.parse(text), lambda path: _path(path, folder))
    except ValueError:  # the experiment's validation reports it
        return text
