"""Drafters and policies by name: built in, from installed packages, and by import path."""

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from magicjax.suggest import did_you_mean


def installed(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Returns the entry points of a group in installed packages, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def find(name: str, known: Mapping[str, Any], group: str) -> Any:
    """Returns the object of a name, None if there is none.

    Args:
      name: one of `known`, an entry point, or an import path such as my_file.MyPolicy.
      known: what is built in.
      group: a group of entry points.

    Raises:
      ValueError: an import path that cannot be imported.
    """
    if name in known:
        return known[name]
    if point := installed(group).get(name):
        return point.load()
    return _imported(name) if "." in name else None


def _imported(name: str) -> Any:
    """Returns the object of an import path."""
    module, _, attribute = name.rpartition(".")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # of any kind: the file is the user's
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name))
        remedy = f"put the folder of {module}.py on PYTHONPATH, or correct the name"
        raise ValueError(
            f"{name!r}: importing {module} raises {type(error).__name__}: {error}; "
            f"{remedy if missing else f'correct {module}'}"
        ) from error
    if not hasattr(imported, attribute):
        hint = did_you_mean(attribute, vars(imported))
        raise ValueError(f"{name!r}: {module} has no {attribute!r}{hint}")
    return getattr(imported, attribute)


def name_of(cls: type, known: Mapping[str, Any], group: str) -> str:
    """Returns the name of a class; its import path if it has no other."""
    for name, each in known.items():
        if each is cls:
            return name  # before the metadata of all packages is read, which takes milliseconds
    value = f"{cls.__module__}:{cls.__qualname__}"
    points = {point.value: point.name for point in installed(group).values()}
    return points.get(value, value.replace(":", "."))
