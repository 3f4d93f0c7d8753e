"""Measures one cell in a process of its own, `python -m experiments.runner.worker
results/NAME/cells/KEY`.

What goes wrong in it, running out of memory too, is a result of this cell and no other's. It ends
with whoever started it: its standard input is a pipe that nothing is written to, and that closes.
A cell that is finished is left as it is, so that two processes never measure one.
"""

import argparse
import os
import pathlib
import sys
import threading
import time
import traceback
from typing import Any

import yaml

from experiments.schema import store

DIES_ALONE = 3  # the exit status where the process that started it is gone


def watch_parent() -> None:
    """Ends this process when standard input closes."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(DIES_ALONE)

    threading.Thread(target=wait, daemon=True).start()


def measure_cell(folder: pathlib.Path, bench: Any = None, profile: bool = False) -> bool:
    """Returns whether a cell could be measured, having written its result, or why it has none.

    Args:
      folder: the cell's, with its `config.yaml`.
      bench: what runs it, made if not given.
      profile: keep a trace.
    """
    from experiments.runner import measure, provenance
    from experiments.schema import grid
    from sharding import processes

    cell = grid.restored(yaml.safe_load((folder / "config.yaml").read_text()))
    started = time.time()
    store.clear(folder)
    env = provenance.environment(cell)
    try:
        bench = bench or measure.Bench(folder.parent.parent / "prompts")
        found = measure.measure(bench, cell, folder if profile else None)
    except Exception as error:  # it is the cell's result, and its process has no other
        processes.await_loss(error)  # of whose loss it may be a part
        line = f"{type(error).__name__}: {error}"
        store.write_json(folder / "env.json", env)
        row = {"device": env["device"]}
        store.write_failure(folder, kind_of(error), line, traceback.format_exc(), row)
        print(line, file=sys.stderr)
        return False
    found.metrics["row"]["wall_s"] = time.time() - started
    store.write_result(folder, env, found.metrics, found.requests)
    return True


def kind_of(error: Exception) -> str:
    """Returns "memory" of an error that says there was too little of it, else "error"."""
    full = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
    return "memory" if full else "error"


def main() -> int:
    """Returns the exit status: 0; 1 if the cell failed, which is recorded."""
    parser = argparse.ArgumentParser(description="Measures one cell of an experiment.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--profile", action="store_true", help="keep a trace")
    options = parser.parse_args()
    watch_parent()
    with store.locked(options.folder / "lock"):
        if (options.folder / store.METRICS).exists():
            return 0
        return 0 if measure_cell(options.folder, profile=options.profile) else 1


if __name__ == "__main__":
    sys.exit(main())
