"""Runs the notebooks and stores them with their outputs: python -m experiments.notebooks [NAME ...]

Runs all notebooks if no name is given, each in its own kernel, and stores them in place, without
output that differs between runs.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from experiments.notebooks import running
from magicjax.files import write_atomically

PROG = "python -m experiments.notebooks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if a notebook fails or has problems; 2 for unknown names."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks (default: all)")
    try:
        paths = running.find(parser.parse_args(arguments).names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failed = 0
    for path in paths:
        before = time.perf_counter()
        try:
            notebook = running.cleaned(running.execute(path))
        except (CellExecutionError, CellTimeoutError) as error:
            problems = [str(error)]
        else:
            problems = running.problems(notebook)
            if not problems:
                write_atomically(path, nbformat.writes(notebook) + "\n")
        seconds = time.perf_counter() - before
        print(f"{path.stem}: {seconds:.0f} s", *problems, sep="\n  ", flush=True)
        failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
