"""Reads the tables of tuned configurations that `python -m pallas_kernels.benchmarks.tune` writes.

A table is a JSON file for one kind of device. It has the fastest configuration of the kernel for
each shape, and all timings.
"""

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

FOLDER = pathlib.Path(__file__).parent / "tuned"
ROWS = 64  # of a tile; shapes with the same number of tiles divide their work alike
REMEDY = "remove the file, then rerun python -m pallas_kernels.benchmarks.tune"
Value = TypeVar("Value")


class Key(NamedTuple):
    """The sizes that decide how the work is divided.

    Attributes:
      heads: B * K.
      rows: T * G.
      slots: S.
      head_dim: D.
    """

    heads: int
    rows: int
    slots: int
    head_dim: int

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows."""
        return -(-self.rows // ROWS)


def slug(device: str) -> str:
    """Returns a device's name as a file name: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def path_of(device: str) -> pathlib.Path:
    """Returns the path of the table of a kind of device."""
    return FOLDER / f"{slug(device)}.json"


def read(path: pathlib.Path) -> dict[Key, dict[str, Any]]:
    """Returns the entries of a table by shape; {} if the file does not exist.

    Raises:
      ValueError: the file is malformed.
    """
    if not path.exists():
        return {}
    entries: dict[Key, dict[str, Any]] = {}
    try:
        for i, entry in enumerate(json.loads(path.read_text("utf-8"))["entries"]):
            sizes = [entry[name] for name in Key._fields]
            if not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"entry {i} has the sizes {sizes}: each must be a whole number")
            if Key(*sizes) in entries:
                raise ValueError(f"entry {i} repeats the sizes {sizes}")
            if not isinstance(entry["config"], dict):
                raise ValueError(f"entry {i} has the config {entry['config']!r}: not an object")
            entries[Key(*sizes)] = entry
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing; {REMEDY}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; {REMEDY}") from error
    return entries


def nearest(table: Mapping[Key, Value], key: Key) -> Value | None:
    """Returns the value of a shape, or of the nearest that divides its work alike, or None.

    Another shape serves if it has the same head size and number of tiles, and heads and slots
    within a factor of two. The nearest has the smallest product of these two factors; ties go to
    fewer heads, then rows, then slots.
    """
    if key in table:
        return table[key]

    def factors(other: Key) -> tuple[float, float]:
        pairs = (key.heads, other.heads), (key.slots, other.slots)
        return tuple(max(a, b) / max(1, min(a, b)) for a, b in pairs)  # type: ignore[return-value]

    near = [
        (math.prod(factors(other)), other)
        for other in table
        if (other.tiles, other.head_dim) == (key.tiles, key.head_dim) and max(factors(other)) <= 2
    ]
    return table[min(near)[1]] if near else None
