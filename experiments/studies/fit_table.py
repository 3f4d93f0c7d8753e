"""Memory of well-known workloads on eight GPUs: `python -m experiments.studies.fit_table`.

Runs `magicjax fit` for each workload, which compiles the real loop for the GPUs, and writes its
report and a Markdown table. A workload with a report is not compiled again. On Hopper the attention
is `mosaic`.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

from magicjax.aot.aot_compile import PROGRAMS, is_hopper
from magicjax.benchmarks.tables import markdown_table
from magicjax.files import write_atomically
from sharding import MeshSize

OUT = pathlib.Path(__file__).parents[1] / "results" / "fit"
SELF, SMALL = "self:streaming:512", "small:llama-3.2-1b:streaming:512"
# Target, rows, context, device, mesh, drafter, tree, and the format of quantized weights.
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
    ("llama-65b", 4, 2048, "h100", "model=1", SELF, "chain:4", "int4"),
    ("falcon-40b", 4, 2048, "h100", "model=1", SELF, "chain:4", "int4"),
    ("llama-3.1-70b", 4, 8192, "h100", "model=1", SELF, "chain:4", "int4"),
)


def main() -> int:
    """Prints and writes the table; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.fit_table", description=__doc__
    )
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="folder of the reports")
    options = parser.parse_args()
    table = markdown_table(HEADER, [_row(_report(options.out, each)) for each in WORKLOADS])
    print(table)
    write_atomically(options.out / "table.md", table + "\n")
    return 0


def _report(out: pathlib.Path, workload: tuple) -> dict[str, Any]:
    """Returns the report of a workload, with the total of the estimate as `estimated`."""
    name = "_".join(re.sub(r"[^\w.-]", "-", str(part)) for part in workload if part)
    path = out / f"{name}.json"
    if not path.is_file():
        print(f"compiling {name} …", file=sys.stderr, flush=True)
        write_atomically(path, json.dumps(_fit(workload), indent=1) + "\n")
    estimate = _fit(workload, "--analytic")["bytes on each device"]["total"]
    return json.loads(path.read_text()) | {"estimated": estimate}


def _fit(workload: tuple, *options: str) -> dict[str, Any]:
    target, batch, context, device, mesh, drafter, tree, *weights = workload
    command = [sys.executable, "-m", "magicjax", "fit", "--target", target, "--batch", str(batch)]
    command += ["--context", str(context), "--device", device, "--mesh", mesh, "--json", *options]
    command += ["--drafter", drafter, "--tree", tree] if drafter else []
    command += ["--weights", *weights] if weights else []
    command += ["--backend", "mosaic"] if is_hopper(device) else []
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(command)} failed: see its output above")
    report = json.loads(process.stdout)
    if not options and "estimate" in report:
        raise RuntimeError(f"nothing was compiled: {report['estimate']}")
    return report


HEADER = (
    *("target, rows x context", "devices", "weights", "target KV", "draft KV"),
    *("prefill, init, decode", "total", "usable", "fits", "estimate", "all-reduce per step"),
    "cache copies",
)


def _traffic(collectives: list[dict[str, Any]]) -> str:
    count, size = (sum(c[name] for c in collectives) for name in ("count", "bytes"))
    return f"{count} ({size / 1e6:.1f} MB)"


def _row(report: dict[str, Any]) -> tuple[str, ...]:
    load, sizes = report["workload"], report["bytes on each device"]
    gb = {name: size / 1e9 for name, size in sizes.items()}
    decode = report["programs"]["decode"]
    between = [c for c in decode["collectives"] if c.get("between")]
    sums = [c for c in decode["collectives"] if c["kind"] == "all-reduce" and c not in between]
    traffic = _traffic(sums) if sums else "none"
    if between:
        traffic += f"; between stages {_traffic(between)}"
    excess = gb["total"] - gb["usable"]
    difference = report["estimated"] / sizes["total"] - 1
    copies = sum(sum(p["copies of a cache"].values()) for p in report["programs"].values())
    weights = f" in {load['weights']}" if load.get("weights") else ""
    # Older reports have no stage and no weights.
    size = MeshSize(load["data"], load["model"], load.get("stage", 1))
    mesh = ", ".join(f"{axis}={n}" for axis, n in size._asdict().items() if n > 1)
    return (
        f"{load['target']}{weights}, {load['drafter'] or 'plain'}, "
        f"{load['batch']} x {load['context']}",
        f"{size.devices} {load['device']}" + (f" ({mesh})" if mesh else ""),
        f"{gb['weights'] + gb['draft weights']:.2f}",
        f"{gb['target KV']:.2f}",
        f"{gb['draft KV']:.2f}",
        ", ".join(f"{gb[f'temporaries of {name}']:.2f}" for name in PROGRAMS),
        f"{gb['total']:.2f}",
        f"{gb['usable']:.1f}",
        "fits" if report["fits"] else f"**{excess:.2f} too much**",
        f"{difference:+.1%}",
        traffic,
        str(copies),
    )


if __name__ == "__main__":
    raise SystemExit(main())
