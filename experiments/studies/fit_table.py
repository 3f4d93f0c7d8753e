"""What well-known workloads take on eight GPUs: `python -m experiments.studies.fit_table`.

Runs `magicjax fit` for each of them, which compiles the real loop for the GPUs, and writes its
report and a table in Markdown. A workload that is there already is not compiled again.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

from magicjax.aot.aot_compile import PROGRAMS
from pallas_kernels.benchmarks.bench import write_json
from sharding import MeshSize

OUT = pathlib.Path(__file__).parents[1] / "results" / "fit"
SELF, SMALL = "self:streaming:512", "small:llama-3.2-1b:streaming:512"
# Target, rows, context, device, mesh, drafter, tree.
WORKLOADS = (
    ("llama-3.1-8b", 128, 32768, "h100", "model=8", SELF, "chain:4"),
    ("llama-3.1-8b", 128, 32768, "h200", "model=8", SELF, "chain:4"),
    ("llama-3.1-8b", 41, 100000, "h100", "model=8", SELF, "chain:4"),
    ("llama-3.1-8b", 41, 100000, "h200", "model=8", SELF, "chain:4"),
    ("llama-2-7b-32k", 32, 32768, "a100", "model=8", SELF, "chain:4"),
    ("llama-3.1-70b", 32, 32768, "h200", "model=8", SELF, "chain:4"),
    ("llama-3.1-8b", 128, 32768, "h200", "data=8", SELF, "chain:4"),
    ("llama-3.1-8b", 128, 32768, "h200", "data=2,model=4", SMALL, "expansion:2,2,1"),
    ("llama-3.1-8b", 16, 32768, "h200", "model=1", "", "chain:4"),
    ("llama-2-7b-32k", 8, 8192, "a100", "model=2", "self:snapkv:512", "expansion:4,2,1"),
    ("llama-65b", 16, 2048, "h100", "stage=2,model=4", SELF, "chain:4"),
    ("llama-3.1-70b", 16, 8192, "h100", "stage=2,model=4", SELF, "chain:4"),
)


def main() -> int:
    """Returns 0 after printing the table."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.fit_table", description=__doc__
    )
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="folder of the reports")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [_line(_found(options.out, workload)) for workload in WORKLOADS]
    table = "\n".join([*HEAD, *lines]) + "\n"
    print(table)
    (options.out / "table.md").write_text(table, encoding="utf-8")
    return 0


def _found(out: pathlib.Path, workload: tuple) -> dict[str, Any]:
    """Returns the compiled report of a workload, with the estimate's total beside it."""
    name = "_".join(re.sub(r"[^\w.-]", "-", str(part)) for part in workload if part)
    path = out / f"{name}.json"
    if not path.is_file():
        print(f"compiling {name} …", file=sys.stderr, flush=True)
        write_json(str(path), _fit(workload))
    counted = _fit(workload, "--analytic")["bytes on each device"]["total"]
    return json.loads(path.read_text()) | {"estimated": counted}


def _fit(workload: tuple, *more: str) -> dict[str, Any]:
    target, batch, context, device, mesh, drafter, tree = workload
    command = [sys.executable, "-m", "magicjax", "fit", "--target", target, "--batch", str(batch)]
    command += ["--context", str(context), "--device", device, "--mesh", mesh, "--json", *more]
    command += ["--drafter", drafter, "--tree", tree] if drafter else []
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(command)} failed; see above")
    found = json.loads(ran.stdout)
    if not more and "estimate" in found:
        raise RuntimeError(f"nothing was compiled: {found['estimate']}")
    return found


HEAD = (
    "| target, rows x context | on | weights | target KV | draft | prefill, start, decode | total "
    "| of | | estimate | all-reduce a step | copies |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def _sent(collectives: list[dict[str, Any]]) -> str:
    count, size = (sum(c[name] for c in collectives) for name in ("count", "bytes"))
    return f"{count} ({size / 1e6:.1f} MB)"


def _line(found: dict[str, Any]) -> str:
    load, sizes = found["workload"], found["bytes on each device"]
    gb = {name: size / 1e9 for name, size in sizes.items()}
    decode = found["programs"]["decode"]
    between = [c for c in decode["collectives"] if c.get("between")]
    sums = [c for c in decode["collectives"] if c["kind"] == "all-reduce" and c not in between]
    exchanged = _sent(sums) if sums else "none"
    if between:
        exchanged += f"; between stages {_sent(between)}"
    over = gb["total"] - gb["usable"]
    apart = found["estimated"] / sizes["total"] - 1
    copies = sum(sum(p["copies of a cache"].values()) for p in found["programs"].values())
    size = MeshSize(load["data"], load["model"], load.get("stage", 1))  # some reports are older
    mesh = ", ".join(f"{axis}={n}" for axis, n in size._asdict().items() if n > 1)
    cells = (
        f"{load['target']}, {load['drafter'] or 'plain'}, {load['batch']} x {load['context']}",
        f"{size.devices} {load['device']}" + (f" ({mesh})" if mesh else ""),
        f"{gb['weights'] + gb['draft weights']:.2f}",
        f"{gb['target KV']:.2f}",
        f"{gb['draft KV']:.2f}",
        ", ".join(f"{gb[f'temporaries of {name}']:.2f}" for name in PROGRAMS),
        f"{gb['total']:.2f}",
        f"{gb['usable']:.1f}",
        "fits" if found["fits"] else f"**{over:.2f} too much**",
        f"{apart:+.1%}",
        exchanged,
        str(copies),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
