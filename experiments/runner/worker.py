"""Measures one cell: python -m experiments.runner.worker results/NAME/cells/KEY

Each cell has a separate process, so that a failure, out of memory included, affects only this cell.
The process exits with the one that started it, which closes the pipe at its standard input. A
finished cell is not measured again, and a lock keeps two processes from measuring the same one.
"""

import argparse
import os
import pathlib
import sys
import threading
import time
import traceback
from typing import Any

ORPHANED = 3  # exit status when the parent process has ended


def watch_parent() -> None:
    """Exits when standard input closes."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=wait, daemon=True).start()


def measure_cell(folder: pathlib.Path, bench: Any = None, profile: bool = False) -> bool:
    """Measures a cell and writes its result or its failure; returns whether it succeeded.

    Without a bench it makes one. `profile` is whether to write a trace. The loss of another process
    of this cell is raised: the cell stays to do.
    """
    from experiments.runner import measure, provenance
    from experiments.runner.serving import cell as serving
    from experiments.schema import grid, store
    from sharding import processes

    cell = grid.restored(store.read_cell(folder))
    started = time.time()
    store.clear(folder)
    env = provenance.environment(cell)
    try:
        bench = bench or measure.Bench(folder.parent.parent / "prompts")
        if cell.slots:
            metrics, requests = serving.measure(bench, cell)
        else:
            metrics, requests = measure.measure(bench, cell, folder if profile else None)
    except Exception as error:  # any error is the result of this cell
        if processes.is_loss(error):
            raise
        line = f"{type(error).__name__}: {error}"
        store.write_json(folder / "env.json", env)
        row = {"device": env["device"]}
        store.write_failure(folder, failure_kind(error), line, traceback.format_exc(), row)
        print(line, file=sys.stderr)
        return False
    metrics["row"]["wall_s"] = time.time() - started
    store.write_result(folder, env, metrics, requests)
    return True


def failure_kind(error: Exception) -> str:
    """Returns "memory" for an out-of-memory error, else "error"."""
    from magicjax.decoding.memory import OutOfMemoryError

    out_of_memory = isinstance(error, MemoryError | OutOfMemoryError)
    return "memory" if out_of_memory or "RESOURCE_EXHAUSTED" in str(error) else "error"


def main() -> int:
    """Returns the exit status: 0, or 1 if the cell failed."""
    parser = argparse.ArgumentParser(description="Measures one cell of an experiment.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--profile", action="store_true", help="write a trace")
    options = parser.parse_args()
    watch_parent()
    from experiments.schema import store  # imports JAX, so only now
    from magicjax.files import locked

    with locked(options.folder / "lock"):
        if (options.folder / store.METRICS).exists():
            return 0
        return 0 if measure_cell(options.folder, profile=options.profile) else 1


if __name__ == "__main__":
    sys.exit(main())
