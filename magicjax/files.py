"""Files that are complete or absent."""

import os
import pathlib


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file under a temporary name in its folder, then renames it; creates the folder."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
