"""`magicjax fit`: whether a workload fits GPUs that are not here, and what they will exchange.

The real programs, prefill and all rounds, are compiled for those GPUs by XLA's CUDA compiler. That
takes two wheels, which the command fetches into a folder of their own: beside an installed plugin
every import of JAX would look for GPUs. Where they cannot be had, sizes are counted from shapes.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax

from magicjax.drafters.sparse import BUDGET
from magicjax.parallel import offloading
from sharding import MeshSize

GB = 1e9
# What the CUDA context, NCCL's buffers and a fragmented heap keep for themselves.
USABLE = 0.95
DOES_NOT_FIT = 3
WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def add(commands: Any) -> None:
    """Adds the sub-command to those of `magicjax`."""
    parser = commands.add_parser(
        "fit",
        help="whether a workload fits GPUs that are not here",
        description="Compiles the greedy loop for GPUs that are not here, and prints what each of "
        "them will hold and what they exchange. Exit code 0: it fits, 3: it does not. (Sampling "
        "holds the draft's distributions too: nodes times vocabulary in float32 for each row.)",
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help="preset or model directory")
    parser.add_argument(
        "--drafter",
        default="",
        help=f"self:streaming:{BUDGET}, small:PATH, …; plain decoding if not given",
    )
    parser.add_argument("--tree", default="", help="of the drafter; chain:4 if not given")
    parser.add_argument("--batch", type=int, required=True, help="rows, of all GPUs together")
    parser.add_argument("--context", type=int, required=True, help="tokens of a row, new ones too")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="128 if not given")
    parser.add_argument("--device", required=True, help="a100, h100, h200, or a description's path")
    parser.add_argument(
        "--mesh",
        default="model=1",
        help="data=2,model=4, or with pipeline stages stage=2,model=4; one GPU if not given",
    )
    parser.add_argument(
        "--micro-batches", type=int, help="of stages; the default: as many as are fastest"
    )
    offloading.add_option(parser)
    parser.add_argument("--kv-dtype", choices=("int8", "int4"), help="of the draft's sparse cache")
    parser.add_argument("--draft-shards", type=int, help="GPUs a small draft is divided over")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--backend", choices=("mosaic", "xla"), help="the default: mosaic on Hopper, else xla"
    )
    parser.add_argument(
        "--analytic", action="store_true", help="compile nothing, count from shapes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report and returns the exit code.

    Raises:
      ValueError, OSError: what `magicjax` prints before it ends.
    """
    from magicjax.aot import (
        aot_compile,  # they take a while, and no other command needs them
        memory_estimate,  # they take a while, and no other command needs them
    )
    from sharding import parse_mesh

    mesh = parse_mesh(arguments.mesh)
    fields = {field.name for field in dataclasses.fields(aot_compile.Workload)}
    said = {name: value for name, value in vars(arguments).items() if name in fields}
    load = aot_compile.Workload(**said | mesh._asdict())
    counted = memory_estimate.count(load)
    compiled, why_not = None, "as was asked"
    if not arguments.analytic:
        compiled, why_not = compile_apart(load)
    found = summary(load, counted, compiled, aot_compile.memory_of(load.device))
    if compiled is None:
        found["estimate"] = f"counted from shapes, not compiled: {why_not}"
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))
    return 0 if found["fits"] else DOES_NOT_FIT


def summary(load: Any, counted: Any, compiled: dict | None, memory: int) -> dict[str, Any]:
    """Returns the report: bytes of each device, what is exchanged, and what would fit.

    Args:
      load: the `ahead.Workload`.
      counted: its `estimate.Bytes`.
      compiled: what `ahead.main` wrote; None: there is no compiler.
      memory: of a device, in bytes.
    """
    temporary = {name: getattr(counted, name) for name in ("prefill", "start", "decode")}
    if compiled is not None:
        # They have the layers that are streamed in them, which do not grow with the rows.
        temporary = {
            name: max(0, of["temporary bytes"] - counted.streamed) for name, of in compiled.items()
        }
    total = counted.resident + max(temporary.values())
    usable = int(USABLE * memory)
    most_context = load.context + math.floor((usable - total) / counted.per_context_token)
    found = {
        "workload": dataclasses.asdict(load)
        | {"backend": load.attention, "micro_batches": counted.micro_batches},
        "bytes on each device": {
            "weights": counted.weights,
            "draft weights": counted.draft_weights,
            "two layers, streamed": counted.streamed,
            "target KV": counted.target_kv,
            "draft KV": counted.draft_kv,
            "other state": counted.rest,
            **{f"temporaries of {name}": size for name, size in temporary.items()},
            "total": total,
            "usable": usable,
            "memory": memory,
            "in host memory": counted.host
            if compiled is None
            else max(of["argument bytes in host memory"] for of in compiled.values()),
        },
        "fits": total <= usable,
        "largest batch": most_rows(load, counted, temporary, usable),
        "largest context": min(max(0, most_context), counted.positions),
    }
    if compiled is not None:
        found["programs"] = compiled
    return found


def most_rows(load: Any, counted: Any, temporary: dict[str, int], usable: int) -> int:
    """Returns how many rows fit, about, by what the rows of `load` take.

    Caches and the temporaries of a step grow with the rows; those of a prefill step with its
    tokens, of which more rows have fewer each.
    """
    from magicjax.decoding.request import prefill_chunk

    asked = load.batch // load.data
    of_row = (counted.target_kv + counted.draft_kv + counted.rest) / asked
    longest = load.context - load.max_new_tokens

    def taken(rows: int) -> float:
        tokens = [n * min(prefill_chunk(n), longest) for n in (rows, asked)]
        transient = max(
            temporary["prefill"] * tokens[0] / tokens[1],
            temporary["start"] * rows / asked,
            temporary["decode"] * rows / asked,
        )
        weights = counted.weights + counted.draft_weights + counted.streamed
        return weights + rows * of_row + transient

    fewest, most = 0, max(1, int(usable / of_row))
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if taken(middle) <= usable:
            fewest = middle
        else:
            most = middle - 1
    return fewest * load.data


def as_text(found: dict[str, Any]) -> str:
    """Returns the report as lines of text."""
    load, sizes = found["workload"], found["bytes on each device"]
    mesh = MeshSize(load["data"], load["model"], load["stage"])
    in_parts = f", {load['micro_batches']} micro-batches" if mesh.stage > 1 else ""
    title = (
        f"{load['target']}, {load['drafter'] or 'plain decoding'}, {load['batch']} rows of "
        f"{load['context']} tokens in {load['dtype']}, on {mesh.devices} x {load['device']} "
        f"({mesh}{in_parts}), "
        f"attention {load['backend']}{offloading.in_words(load['offload'])}"
    )
    lines = [title, "on each device:"]
    if "estimate" in found:
        lines[1:1] = [f"ESTIMATE, {found['estimate']}"]
    shown = [name for name in sizes if sizes[name] or name == "total"]
    lines += [f"  {name:<24} {sizes[name] / GB:9.3f} GB" for name in shown]
    left = sizes["usable"] - sizes["total"]
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    lines.append(f"{verdict}: {abs(left) / GB:.3f} GB {'to spare' if left >= 0 else 'too much'}")
    lines.append(
        f"about the largest batch at this context: {found['largest batch']}; the largest context "
        f"at this batch: {found['largest context']}"
    )
    for name, program in found.get("programs", {}).items():
        lines.append(f"{name}: compiled in {program['seconds to compile']:.1f} s")
        lines += _program(program, "a step" if name == "decode" else "in all")
    return "\n".join(lines)


def _program(program: dict[str, Any], often: str) -> list[str]:
    lines = [
        f"  {c['kind']}: {c['count']} {often}, {c['bytes'] / 1e6:.3g} MB"
        + (" between stages" if c["between"] else "")
        for c in program["collectives"]
    ] or ["  nothing is exchanged"]
    copies = ", ".join(f"{name} {n}" for name, n in program["copies of a cache"].items())
    lines.append(f"  copies of a cache: {copies}")
    for kernel in program["kernels"]:
        lines.append("  kernel: " + ", ".join(f"{name} {n}" for name, n in kernel.items()))
    if program["shared bytes of kernels"]:
        sizes = ", ".join(map(str, program["shared bytes of kernels"]))
        lines.append(f"  shared memory of kernels: {sizes} bytes")
    return lines


def compile_apart(load: Any, *options: str) -> tuple[dict[str, Any] | None, str]:
    """Returns (what the compiler said, ""), or (None, why it could not be had).

    Args:
      load: an `ahead.Workload`.
      options: of `python -m magicjax.aot.aot_compile`.

    Raises:
      ValueError: the compiler failed.
    """
    try:
        wheels = _compiler()
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        return None, f"the CUDA compiler could not be fetched ({told.strip().splitlines()[-1]})"
    path = os.pathsep.join(filter(None, [str(wheels), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",  # or the plugin would look for a driver
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "report.json"
        code = json.dumps(dataclasses.asdict(load))
        command = [sys.executable, "-m", "magicjax.aot.aot_compile", code, str(out), *options]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise ValueError(f"compiling failed:\n{ran.stderr[-4000:]}")
        return json.loads(out.read_text()), ""


def _compiler() -> pathlib.Path:
    """Returns the folder with the CUDA compiler for this JAX, fetched if it is not there."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = home / "magicjax" / f"cuda-compiler-{jax.__version__}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching the CUDA compiler into {folder} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        into = pathlib.Path(partial) / "wheels"
        wheels = [f"{name}=={jax.__version__}" for name in WHEELS]
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--no-input"]
        command = [*pip, "--disable-pip-version-check", "--target", str(into), *wheels]
        subprocess.run(command, capture_output=True, text=True, check=True)
        if not folder.is_dir():  # another process may have been faster
            into.rename(folder)
    return folder
