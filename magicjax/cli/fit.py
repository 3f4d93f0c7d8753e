"""`magicjax fit`: memory and communication of a workload on GPUs or TPUs that are not attached.

XLA's CUDA compiler or libtpu compile the programs, prefill and decoding, for those devices. They
come in wheels, which the command downloads into a separate folder: if they were installed, every
import of JAX would look for devices. Without the wheels, and for a CPU, sizes are estimated from
shapes.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax

from magicjax.cli import model_options
from magicjax.decoding.footprint import largest
from magicjax.decoding.preparation import prefill_chunk
from magicjax.drafters.sparse import BUDGET
from magicjax.options import token_count
from magicjax.parallel import offloading
from magicjax.prediction import cost_model
from magicjax.sources import Source
from sharding import MeshSize, parse_mesh

GB = 1e9
USABLE = 0.95  # the remainder is for the CUDA context, NCCL's buffers and fragmentation
USABLE_OF_CPU = 0.75  # the remainder is for the system and other programs
DOES_NOT_FIT = 3
CUDA_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "fit",
        description="Compiles greedy decoding for devices that are not attached, and prints the "
        "memory and communication of each one. Exit code 0: the workload fits; 3: it does not. "
        "(Sampling also stores the draft's distributions: nodes x vocabulary in float32 per row.)",
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help=model_options.SOURCE)
    parser.add_argument(
        "--drafter",
        default="",
        help=f"self:streaming:{BUDGET}, small:PATH, ...; default: plain decoding",
    )
    parser.add_argument("--tree", default="", help="the drafter's tree; default: chain:4")
    parser.add_argument("--batch", type=int, required=True, help="number of rows, over all devices")
    parser.add_argument(
        "--context",
        type=token_count,
        required=True,
        help="tokens per row, including new tokens; 8k is 8192",
    )
    parser.add_argument("--max-tokens", type=token_count, default=128, help="default: 128")
    parser.add_argument(
        "--device",
        required=True,
        help=f"{', '.join(cost_model.DEVICES)}, the path of a GPU's description, or cpu:16 for a "
        "CPU with 16 GiB of memory",
    )
    parser.add_argument(
        "--mesh",
        default="model=1",
        help="data=2,model=4, or with pipeline stages stage=2,model=4; default: one device",
    )
    parser.add_argument(
        "--micro-batches", type=int, help="per pass through the stages; default: the fastest"
    )
    model_options.add_weights(parser)
    parser.add_argument(
        "--draft-shards", type=int, help="number of devices over which a draft model is sharded"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="dtype of models and caches; default: bfloat16",
    )
    parser.add_argument(
        "--backend",
        choices=("xla",),
        help="default: the device's kernel, if it has one",
    )
    parser.add_argument(
        "--analytic", action="store_true", help="estimate from shapes, without compilation"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also print what the compiled programs contain"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report and returns the exit code.

    Raises:
      ValueError, OSError: invalid input.
    """
    from magicjax.prediction.aot import (  # slow imports, for this command only
        aot_compile,
        memory_estimate,
        targets,
    )

    model_options.check_context(Source(arguments.target), arguments.context)
    mesh = parse_mesh(arguments.mesh)
    fields = {field.name for field in dataclasses.fields(aot_compile.AotWorkload)}
    values = {name: value for name, value in vars(arguments).items() if name in fields}
    workload = aot_compile.AotWorkload(**values | mesh._asdict())
    counted = memory_estimate.count(workload)
    compiled, reason, memory = None, "--analytic", targets.memory_bytes(workload.device)
    if targets.is_cpu(workload.device):
        reason = "for a CPU"
    elif not arguments.analytic:
        if counted.resident > memory:
            reason = "weights and caches exceed the memory"
        else:
            compiled, reason = _compile_in_subprocess(workload)
    report = summary(workload, counted, compiled, memory)
    if compiled is None:
        report["estimate"] = f"from shapes, not compiled ({reason})"
    print(json.dumps(report, indent=2) if arguments.json else as_text(report, arguments.verbose))
    return 0 if report["fits"] else DOES_NOT_FIT


def summary(workload: Any, counted: Any, compiled: dict | None, memory: int) -> dict[str, Any]:
    """Returns the report: bytes per device, communication, and the largest workload that fits.

    `counted` is the `MemoryEstimate` of the `AotWorkload`, `compiled` is the report of its
    compilation, and `memory` the bytes of a device.
    """
    from magicjax.prediction.aot import targets

    footprint, request = counted.footprint, counted.request
    share = USABLE_OF_CPU if targets.is_cpu(workload.device) else USABLE
    temporary = {name: getattr(counted, name) for name in ("prefill", "init", "decode")}
    if compiled is not None:
        # Temporaries include streamed layers, which do not grow with the rows.
        temporary = {
            name: max(0, program["temporary bytes"] - footprint.streamed)
            for name, program in compiled.items()
        }
    total = counted.resident + max(temporary.values())
    usable = int(share * memory)
    max_context = largest(
        range(1, counted.positions + 1),
        usable,
        lambda tokens: total + counted.growth(tokens - workload.context),
    )
    report = {
        "workload": dataclasses.asdict(workload)
        | {
            "backend": request.settings.backend or "xla",
            "micro_batches": request.target.layout.micro_batches,
            "weights": str(request.target.weights) if request.target.weights else None,
        },
        "bytes on each device": {
            "weights": footprint.weights,
            "draft weights": footprint.draft_weights,
            "two layers, streamed": footprint.streamed,
            "target KV": footprint.target_kv,
            "draft KV": footprint.draft_kv,
            "other state": counted.rest,
            **{f"temporaries of {name}": size for name, size in temporary.items()},
            "total": total,
            "usable": usable,
            "memory": memory,
            "in host memory": counted.host
            if compiled is None
            else max(program["argument bytes in host memory"] for program in compiled.values()),
        },
        "fits": total <= usable,
        "largest batch": max_rows(workload, counted, temporary, usable),
        "largest context": max_context,
    }
    options = ["--weights", "--kv-dtype", "--offload", "--mesh"]
    if offloading.dependent_layers(request.target.config):
        options.remove("--offload")
    report["options for less memory"] = options
    if compiled is not None:
        report["programs"] = compiled
    return report


def max_rows(workload: Any, counted: Any, temporary: dict[str, int], usable: int) -> int:
    """Returns approximately how many rows fit, scaled from the memory of `workload`.

    Caches and the temporaries of a step are proportional to the rows; those of prefill to the
    tokens of a prefill step.
    """
    requested, footprint = workload.batch // workload.data, counted.footprint
    per_row = (footprint.target_kv + footprint.draft_kv + counted.rest) / requested
    longest = workload.context - workload.max_tokens
    weights = footprint.weights + footprint.draft_weights + footprint.streamed

    def needed(rows: int) -> int:
        tokens, requested_tokens = (n * min(prefill_chunk(n), longest) for n in (rows, requested))
        step = max(temporary["init"], temporary["decode"]) * rows / requested
        prefill = temporary["prefill"] * tokens / requested_tokens
        return math.ceil(weights + rows * per_row + max(step, prefill))

    rows = range(1, max(1, int(usable / per_row)) + 1)
    return workload.data * largest(rows, usable, needed)


def as_text(report: dict[str, Any], verbose: bool = False) -> str:
    """Returns the report as lines of text, the verdict first.

    Args:
      report: the result of `summary`.
      verbose: whether to append what the compiled programs contain.
    """
    workload, sizes = report["workload"], report["bytes on each device"]
    mesh = MeshSize(workload["data"], workload["model"], workload["stage"])
    micro_batches = f", {workload['micro_batches']} micro-batches" if mesh.stage > 1 else ""
    free = sizes["usable"] - sizes["total"]
    verdict = "fits" if report["fits"] else "DOES NOT FIT"
    limits = (
        f"largest batch at this context: about {report['largest batch']}; largest context at this "
        f"batch: about {report['largest context']}"
        if report["largest batch"]
        else "not even one row fits: use a shorter context, or "
        f"{', '.join(report['options for less memory'])} for less memory per device"
    )
    lines = [
        f"{verdict}: {abs(free) / GB:.3f} GB {'free' if free >= 0 else 'missing'} on each device",
        limits,
        f"{workload['target']}, {workload['drafter'] or 'plain decoding'}, batch "
        f"{workload['batch']}, context {workload['context']}, {workload['dtype']}, on "
        f"{mesh.devices} x {workload['device']} ({mesh}{micro_batches}), attention backend "
        f"{workload['backend']}"
        + offloading.describe(workload["offload"], workload["weights"], workload["kv_dtype"]),
    ]
    if "estimate" in report:
        lines.append(f"ESTIMATE {report['estimate']}")
    lines.append("on each device:")
    shown = [name for name in sizes if sizes[name] or name == "total"]
    lines += [f"  {name:<24} {sizes[name] / GB:9.3f} GB" for name in shown]
    for name, program in report.get("programs", {}).items() if verbose else ():
        lines.append(f"{name}: compiled in {program['seconds to compile']:.1f} s")
        lines += _program(program, "per step" if name == "decode" else "in total")
    return "\n".join(lines)


def _program(program: dict[str, Any], per: str) -> list[str]:
    lines = [
        f"  {c['kind']}: {c['count']} {per}, {c['bytes'] / 1e6:.3g} MB"
        + (" between stages" if c["between"] else "")
        for c in program["collectives"]
    ] or ["  no collectives"]
    copies = ", ".join(f"{name} {n}" for name, n in program["copies of a cache"].items())
    lines.append(f"  copies of a cache: {copies}")
    if (matrices := program.get("dequantized matrices")) is not None:
        lines.append(f"  dequantized matrices in memory: {matrices}")
    for kernel in program["kernels"]:
        lines.append("  kernel: " + ", ".join(f"{name} {n}" for name, n in kernel.items()))
    if program["shared bytes of kernels"]:
        sizes = ", ".join(map(str, program["shared bytes of kernels"]))
        lines.append(f"  shared memory of kernels: {sizes} bytes")
    return lines


def _compile_in_subprocess(workload: Any) -> tuple[dict[str, Any] | None, str]:
    """Returns (the compiler's report, ""), or (None, why the compiler is not available).

    Raises:
      ValueError: the compiler failed.
    """
    from magicjax.prediction.aot import targets

    platform = "tpu" if targets.is_tpu(workload.device) else "cuda"
    try:
        wheels = _compiler(platform)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        return None, f"the compiler cannot be downloaded: {output.strip().splitlines()[-1]}"
    path = os.pathsep.join(filter(None, [str(wheels), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",  # otherwise the plugin looks for a driver
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        **(targets.TPU_ENVIRONMENT if platform == "tpu" else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "report.json"
        encoded = json.dumps(dataclasses.asdict(workload))
        command = [sys.executable, "-m", "magicjax.prediction.aot.aot_compile", encoded, str(out)]
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if process.returncode:
            lines = process.stderr.splitlines()
            exhausted = [line for line in lines if "RESOURCE_EXHAUSTED" in line]
            if exhausted:
                raise ValueError(
                    f"the programs need more memory than {workload.device} has: use fewer rows, a "
                    f"shorter context or more devices: {exhausted[-1]}"
                )
            raise ValueError(f"compilation failed:\n{process.stderr[-4000:]}")
        return json.loads(out.read_text()), ""


def _compiler(platform: str) -> pathlib.Path:
    """Returns the folder with a compiler for this JAX, "cuda" or "tpu"; downloads a missing one."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = home / "magicjax" / f"{platform}-compiler-{jax.__version__}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading the {platform.upper()} compiler into {folder} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        into = pathlib.Path(partial) / "wheels"
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--no-input"]
        command = [*pip, "--disable-pip-version-check", "--target", str(into), *_wheels(platform)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        if not folder.is_dir():  # another process may have created it
            into.rename(folder)
    return folder


def _wheels(platform: str) -> list[str]:
    """Returns the requirements of a compiler for this JAX."""
    if platform == "cuda":
        return [f"{name}=={jax.__version__}" for name in CUDA_WHEELS]
    requirements = importlib.metadata.requires("jax") or ()
    return [line.partition(";")[0].strip() for line in requirements if line.startswith("libtpu")]
