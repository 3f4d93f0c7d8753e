"""Tables of what was fastest on a device: written by `python -m pallas_kernels.benchmarks.tune`,
read here.

A table is a JSON file for each kind of device. It says for each shape which configuration of the
kernel was fastest, and beside it every time that was taken.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

FOLDER = pathlib.Path(__file__).parent / "tuned"
ROWS = 64  # of a tile: shapes of as many tiles divide their work alike
REMEDY = "remove the file, and time again with python -m pallas_kernels.benchmarks.tune"
Value = TypeVar("Value")


class Key(NamedTuple):
    """The sizes that decide how work is divided.

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
    """Returns where the table of a kind of device is, or would be."""
    return FOLDER / f"{slug(device)}.json"


def read(path: pathlib.Path) -> dict[Key, dict[str, Any]]:
    """Returns {shape: entry} of a table; {} if there is no such file.

    Raises:
      ValueError: the file is no JSON, or an entry lacks a part; it names file and entry.
    """
    if not path.exists():
        return {}
    found: dict[Key, dict[str, Any]] = {}
    try:
        for i, entry in enumerate(json.loads(path.read_text("utf-8"))["entries"]):
            sizes = [entry[name] for name in Key._fields]
            if not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"entry {i} has the sizes {sizes}: each must be a whole number")
            if Key(*sizes) in found:
                raise ValueError(f"entry {i} repeats the sizes {sizes}")
            if not isinstance(entry["config"], dict):
                raise ValueError(f"entry {i} has the config {entry['config']!r}: not an object")
            found[Key(*sizes)] = entry
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing; {REMEDY}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; {REMEDY}") from error
    return found


def write(path: pathlib.Path, about: Mapping[str, Any], entries: Mapping[Key, Mapping]) -> None:
    """Writes a table whole: under a temporary name first."""
    rows = [key._asdict() | dict(entry) for key, entry in sorted(entries.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({**about, "entries": rows}, indent=1) + "\n", "utf-8")
    os.replace(partial, path)


def nearest(table: Mapping[Key, Value], key: Key) -> Value | None:
    """Returns the value of this shape, or of the nearest that divides its work alike, or None.

    Another shape serves if it has the same head size and number of tiles, and heads and slots
    within a factor of two. The nearest has the smallest product of these two factors; of equally
    near ones the one with fewer heads, then rows, then slots.
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
