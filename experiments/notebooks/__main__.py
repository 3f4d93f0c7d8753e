"""Runs the notebooks and stores them with their outputs: python -m experiments.notebooks [NAME ...]

Without names all of them run, each in a kernel of its own, and are stored in place: with outputs,
without what differs between two runs. With --check they run too, but nothing is written, and what
is stored already must be fit to be stored.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from experiments.notebooks import running
from experiments.schema import store

PROG = "python -m experiments.notebooks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if a notebook fails or is not fit to be stored; 2: no such."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks; all if not given")
    parser.add_argument("--check", action="store_true", help="run them, and write nothing")
    given = parser.parse_args(arguments)
    try:
        paths = running.find(given.names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failed = 0
    for path in paths:
        before = time.perf_counter()
        wrong = running.unfit(running.read(path)) if given.check else []
        try:
            notebook = running.cleaned(running.execute(path))
        except (CellExecutionError, CellTimeoutError) as error:
            wrong.append(str(error))
        else:
            wrong += [] if given.check else running.unfit(notebook)
            if not given.check and not wrong:
                store.write_text(path, nbformat.writes(notebook) + "\n")
        print(f"{path.stem}: {time.perf_counter() - before:.0f} s", *wrong, sep="\n  ", flush=True)
        failed += bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
