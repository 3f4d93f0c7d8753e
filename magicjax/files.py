"""Files and folders that are complete or absent, locks, and the folder for caches."""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator


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


@contextlib.contextmanager
def locked(path: pathlib.Path, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Yields whether this process holds the lock of a file, which ends with the process.

    `wait` is whether to wait for the process that holds it; several may hold it `shared`. The
    file's folder is created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+") as file:  # NFS requires reading for a shared lock, writing for the other
        try:
            mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(file, mode | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


@contextlib.contextmanager
def created_once(path: pathlib.Path) -> Iterator[pathlib.Path | None]:
    """Yields an empty folder that becomes `path` if the body succeeds; None if `path` exists.

    One process at a time runs the body; a killed process leaves a hidden folder, which the next one
    removes.
    """
    with locked(path.with_name(f".{path.name}.lock")):
        if path.is_dir():
            yield None
            return
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def cache_folder() -> pathlib.Path:
    """Returns `$MAGICJAX_CACHE`, by default magicjax/ in the user's cache folder."""
    if folder := os.environ.get("MAGICJAX_CACHE"):
        return pathlib.Path(folder)
    user = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(user) / "magicjax"
