"""Writes a table of what fits single devices.

    python -m experiments.studies.what_fits --out experiments/reference/what_fits.csv

Runs `magicjax fit` with one row of 8,192 tokens for each workload of `WORKLOADS`: GPUs and TPUs are
compiled for, and shapes are counted for a CPU. docs/devices.md shows the table.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from magicjax.benchmarks.tables import record_table
from magicjax.files import write_atomically

CONTEXT = 8192
NAMES = {
    "t4": "T4",
    "l4": "L4",
    "a100": "A100",
    "v5e": "v5e-1",
    "cpu:16": "CPU",
}


class Workload(NamedTuple):
    """A target on a device, in the terms of `magicjax fit`; weights None: as stored."""

    device: str
    target: str
    weights: str | None
    drafter: str

    @property
    def dtype(self) -> str:
        return "float16" if self.device == "t4" else "bfloat16"  # a T4 has no bfloat16


LOOKUP, SPARSE = "prompt-lookup:4", "self:streaming:512"
CODER = "small:qwen2.5-coder-0.5b:weights=Q4_0:draft_vocab=32000"
WORKLOADS = (
    Workload("t4", "llama-3.2-1b", None, LOOKUP),
    Workload("t4", "qwen2.5-7b", "int4:32", LOOKUP),
    Workload("t4", "llama-3.1-8b", "int4:32", "small:llama-3.2-1b:weights=int4:32"),
    Workload("l4", "llama-3.1-8b", None, LOOKUP),
    Workload("l4", "llama-3.1-8b", "int8", "small:llama-3.2-1b:weights=int8"),
    Workload("l4", "qwen2.5-14b", "int4:32", LOOKUP),
    Workload("l4", "gpt-oss-20b", "int4:32", LOOKUP),
    Workload("a100", "llama-3.1-8b", None, SPARSE),
    Workload("a100", "qwen2.5-32b", "int8", SPARSE),
    Workload("a100", "qwen3-30b-a3b", None, LOOKUP),
    Workload("a100", "llama-3.1-70b", "int4:32", "small:llama-3.2-1b"),
    Workload("v5e", "smollm3-3b", None, SPARSE),
    Workload("v5e", "qwen2.5-7b", "int8", LOOKUP),
    Workload("v5e", "llama-3.1-8b", "int8", "small:llama-3.2-1b:weights=int8"),
    Workload("cpu:16", "qwen2.5-coder-1.5b", None, CODER),
    Workload("cpu:16", "qwen2.5-7b", "int4:32", LOOKUP),
    Workload("cpu:16", "llama-3.1-8b", "int4:32", "small:llama-3.2-1b:weights=int4:32"),
)


def command(load: Workload) -> list[str]:
    """Returns the arguments of `magicjax` for a workload."""
    weights = [] if load.weights is None else ["--weights", load.weights]
    options = ["--device", load.device, "--target", load.target, "--drafter", load.drafter]
    options += ["--dtype", load.dtype, "--batch", "1", "--context", str(CONTEXT), *weights]
    return ["fit", *options, "--json"]


def row(load: Workload, report: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a workload from the JSON of `magicjax fit`."""
    return {
        "device": NAMES[load.device],
        "target": load.target,
        "weights": report["workload"]["weights"] or load.dtype,
        "drafter": load.drafter,
        "GB": report["bytes on each device"]["total"] / 1e9,
        "batch": report["largest batch"],
        "context": report["largest context"],
        "compiled": "yes" if "programs" in report else "no",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.what_fits",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the table to this CSV file")
    options = parser.parse_args(arguments)
    rows = []
    for load in WORKLOADS:
        fit = [sys.executable, "-m", "magicjax", *command(load)]
        done = subprocess.run(fit, stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout:  # the command has printed why
            return 1
        rows.append(row(load, json.loads(done.stdout)))
        print(*rows[-1].values(), sep="  ", flush=True)
    print(record_table(rows))
    if options.out is not None:
        write_atomically(options.out, pd.DataFrame(rows).round(1).to_csv(index=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
