"""Writes a table of what fits single devices.

    python -m experiments.studies.what_fits --out experiments/reference/what_fits.csv

Runs `magicjax fit` for each workload of `WORKLOADS`: GPUs and TPUs are compiled for, and shapes are
counted for a CPU. docs/devices.md shows the table.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.studies import tables

NAMES = {"t4": "T4", "l4": "L4", "a100": "A100", "v5e": "v5e-1", "cpu:16": "CPU"}


class Workload(NamedTuple):
    """A target on a device, in the terms of `magicjax fit`; weights None: as stored."""

    device: str
    target: str
    weights: str | None
    drafter: str
    batch: int
    context: int

    @property
    def dtype(self) -> str:
        return "float16" if self.device == "t4" else "bfloat16"  # a T4 has no bfloat16


LOOKUP, SPARSE = "prompt-lookup:4", "self:streaming:512"
SMALL = "small:llama-3.2-1b:weights=int4:32"
CODER = "small:qwen2.5-coder-0.5b:weights=Q4_0:draft_vocab=32000"
WORKLOADS = (
    Workload("t4", "llama-3.2-1b", None, LOOKUP, 8, 8192),
    Workload("t4", "qwen2.5-7b", "int4:32", LOOKUP, 1, 8192),
    Workload("t4", "llama-3.1-8b", "int4:32", SMALL, 1, 8192),
    Workload("l4", "llama-3.1-8b", None, LOOKUP, 1, 8192),
    Workload("l4", "qwen2.5-14b", "int4:32", LOOKUP, 1, 8192),
    Workload("a100", "llama-3.1-8b", None, SPARSE, 12, 32768),
    Workload("v5e", "smollm3-3b", None, SPARSE, 1, 8192),
    Workload("v5e", "qwen2.5-7b", "int8", LOOKUP, 1, 8192),
    Workload("cpu:16", "qwen2.5-coder-1.5b", None, CODER, 4, 8192),
    Workload("cpu:16", "qwen2.5-7b", "int4:32", LOOKUP, 4, 8192),
    Workload("cpu:16", "llama-3.1-8b", "int4:32", SMALL, 1, 8192),
)


def command(load: Workload) -> list[str]:
    """Returns the arguments of `magicjax` for a workload."""
    weights = [] if load.weights is None else ["--weights", load.weights]
    options = ["--device", load.device, "--target", load.target, "--drafter", load.drafter]
    options += ["--dtype", load.dtype, "--batch", str(load.batch), "--context", str(load.context)]
    return ["fit", *options, *weights, "--json"]


def row(load: Workload, report: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a workload from the JSON of `magicjax fit`."""
    sizes = report["bytes on each device"]
    return {
        "device": NAMES[load.device],
        "target": load.target,
        "weights": report["workload"]["weights"] or load.dtype,
        "drafter": load.drafter,
        "batch": load.batch,
        "context": load.context,
        "GB": round(sizes["total"] / 1e9, 1),
        "usable GB": round(sizes["usable"] / 1e9, 1),
        "compiled": "yes" if "programs" in report else "no",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.what_fits",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    tables.add_out(parser)
    options = parser.parse_args(arguments)
    rows = []
    for load in WORKLOADS:
        fit = [sys.executable, "-m", "magicjax", *command(load)]
        done = subprocess.run(fit, stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout:  # the command has printed why
            return 1
        rows.append(row(load, json.loads(done.stdout)))
        print(*rows[-1].values(), sep="  ", flush=True)
    tables.publish(rows, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
