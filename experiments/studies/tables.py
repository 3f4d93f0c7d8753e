"""The table of a study: printed, and written to a CSV file."""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import pandas as pd

from magicjax.benchmarks.tables import record_table
from magicjax.files import write_atomically


def add_out(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the file of the table."""
    parser.add_argument("--out", type=pathlib.Path, help="write the table to this CSV file")


def publish(rows: Sequence[dict[str, Any]], out: pathlib.Path | None) -> None:
    """Prints rows as a Markdown table; writes them to a file if there is one."""
    print(record_table(rows))
    if out is not None:
        write_atomically(out, pd.DataFrame(rows).to_csv(index=False))
