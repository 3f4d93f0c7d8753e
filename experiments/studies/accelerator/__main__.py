"""Measures everything that needs a GPU or TPU: `python -m experiments.studies.accelerator`.

Needs jax, flax and transformers but no installation; run it from the root of a checkout, with
--smoke on any machine. It runs in parts: correctness, attention alone, the loop, and tests on
the CPU. Parts with results, including failed ones, are not run again without --again, so rerunning
the command resumes an interrupted run. Writes `measurements.json`, and `summary.md` with tables.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from experiments.studies.accelerator import summary
from magicjax.files import write_atomically
from pallas_kernels.benchmarks.shapes import FULL_HEADS, FULL_NODES, FULL_SIZES

ROOT = pathlib.Path(__file__).parents[3]
OUT_OF_TIME = "ran out of time"
TAIL = 4000  # characters of a part's output that are stored
MAX_SECONDS = 480  # of a part


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, at full size or as a trial of every part.

    Attributes:
      target, dtype, backend: of the model; backend "": the best for the device.
      attention: (batch, slots) of attention alone; heads: K, G, D; backends: names, of which "best"
        is the kernel of the device.
      decoding: (batch, context) of decoding.
      grid: (batch, context, gammas) of synthetic acceptance.
      budget: slots of the draft cache.
      rates: synthetic acceptance rates.
      new_tokens: per row of a loop with synthetic acceptance.
      repeats: timed calls.
      validate: arguments of this command.
      tests: names of test files.
      fuzzing: minutes of random configurations.
    """

    target: str = "llama-3.1-8b"
    dtype: str = "bfloat16"
    backend: str = ""
    attention: tuple = FULL_SIZES
    heads: tuple = FULL_HEADS
    backends: str = "best,xla"
    decoding: tuple = ((16, 32768), (1, 130944), (64, 8192))
    grid: tuple = ((16, 32768, (4, 2, 8)), (64, 8192, (4,)), (1, 130560, (4,)))
    budget: int = 512
    rates: tuple = (0.6, 0.8, 0.9)
    new_tokens: int = 384
    repeats: int = 10
    validate: str = ""
    tests: tuple = ("mosaic", "tpu", "validate", "baselines", "bench")
    fuzzing: float = 3


# Of devices whose memory does not hold the model and caches of `Plan`: TPU v5e, T4, A10, ...
LARGE_MEMORY = 60e9
SMALL = Plan(
    target="llama-3.2-1b",
    attention=((16, 8192), (1, 131072), (32, 4096)),
    decoding=((4, 32768), (1, 130944), (32, 4096)),
    grid=((4, 32768, (4, 2, 8)), (32, 4096, (4,))),
)
SMOKE = Plan(
    target="experiments/zoo/target",
    dtype="float32",
    backend="xla",
    attention=((2, 256),),
    heads=(2, 2, 64),
    backends="xla",
    decoding=((2, 128),),
    grid=((2, 128, (2,)),),
    budget=64,
    rates=(0.8,),
    new_tokens=48,
    repeats=2,
    validate="--backend xla --small",
    tests=("bench",),
    fuzzing=0.1,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A command that takes minutes.

    Attributes:
      name: in the results.
      command: arguments of `python -m`.
      memory: fraction of the device's memory for JAX; torch needs the remainder.
      platform: JAX's; "": the device.
      writes: whether it takes --out; the output of other commands is stored.
    """

    name: str
    command: tuple[str, ...]
    memory: float = 0.9
    platform: str = ""
    writes: bool = True


def parts(plan: Plan) -> list[Part]:
    """Returns the parts in the order of execution."""
    chosen: list[Part] = []

    def add(name: str, command: str, **options: Any) -> None:
        chosen.append(Part(name, tuple(command.split()), **options))

    add("validate", f"pallas_kernels.benchmarks.validate {plan.validate}")
    add("fuzz", f"tests.fuzz --minutes {plan.fuzzing}", writes=False)
    kv_heads, group, size = plan.heads
    attention = f"pallas_kernels.benchmarks.bench --kv-heads {kv_heads} --group {group}"
    attention += f" --head-dim {size} --dtype {plan.dtype} --backends {plan.backends}"
    for (batch, slots), nodes in itertools.product(plan.attention, FULL_NODES):
        command = f"{attention} --batch {batch} --context {slots} --nodes {nodes} --baselines all"
        add(f"attention-{batch}x{slots}-nodes{nodes}", command, memory=0.6)
    model = f"--target {plan.target} --dtype {plan.dtype} --budget {plan.budget}"
    model += f" --backend {plan.backend}" if plan.backend else ""
    bench = f"magicjax.benchmarks.bench {model} --repeats {plan.repeats}"
    for batch, context in plan.decoding:
        shape, name = f"--batch {batch} --context {context}", f"{batch}x{context}"
        timed = "--nodes 5 17 --gamma 4 --rate"
        add(f"decoding-{name}", f"{bench} {shape} {timed}")
    loop = f"--rate {' '.join(map(str, plan.rates))} --new-tokens {plan.new_tokens}"
    for batch, context, gammas in plan.grid:
        for gamma in gammas:
            shape = f"--batch {batch} --context {context} --nodes {gamma + 1} --gamma {gamma}"
            add(f"grid-{batch}x{context}-gamma{gamma}", f"{bench} {shape} {loop}")
    # Last, because they run on the CPU. They need no hypothesis, which conftest.py does.
    tests = " ".join(f"tests/pallas_kernels/test_{name}.py" for name in plan.tests)
    pytest = f"pytest -q --noconftest -p no:cacheprovider {tests}"
    add("tests", pytest, platform="cpu", writes=False)
    return chosen


def run(part: Part, seconds: float) -> dict[str, Any]:
    """Runs a part and returns its command, seconds, and result or failure.

    Args:
      part: to run.
      seconds: time limit.
    """
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(part.memory),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "NPROC": "8",  # XLA threads, which the kernel's interpreter needs
    }
    # The fuzzer, which would choose a CPU, runs on the device with XLA's optimizations.
    environment.setdefault("JAX_PLATFORMS", "")
    environment.setdefault("XLA_FLAGS", "")
    # An interrupted part reuses its compiled programs.
    programs = pathlib.Path(tempfile.gettempdir()) / "magicjax-programs"
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
    if part.platform:
        environment["JAX_PLATFORMS"] = part.platform
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        command = ["-m", *part.command, *(["--out", str(out)] if part.writes else [])]
        begin = time.monotonic()
        status, printed = _call([sys.executable, *command], environment, seconds)
        outcome: dict[str, Any] = {"command": f"python -m {' '.join(part.command)}"}
        outcome["seconds"] = time.monotonic() - begin
        if status != 0:
            outcome["failed"] = OUT_OF_TIME if status is None else f"status {status}"
        if out.exists():
            outcome["result"] = json.loads(out.read_text())
        if not part.writes or status != 0:
            outcome["printed"] = printed[-TAIL:]
    return outcome


def _call(
    command: list[str], environment: dict[str, str], seconds: float
) -> tuple[int | None, str]:
    """Runs a command and returns its status, None after the time limit, and its output."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            # Kill its children too, which would keep the device's memory.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        printed = log.read()
    print(printed[-TAIL:], flush=True)
    return status, printed


def device() -> tuple[str, float]:
    """Returns name and bytes of memory of the device, from a process that releases it."""
    code = (
        "import jax; device = jax.devices()[0]; print(device.device_kind); "
        "print((device.memory_stats() or {}).get('bytes_limit', 0))"
    )
    # The limit is that of all memory.
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "1.0",
    }
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, env=environment, text=True)
    name, limit = printed.strip().splitlines()[-2:]
    return name, float(limit)


def measure(
    chosen: Sequence[Part], folder: pathlib.Path, *, again: bool, minutes: float, about: dict
) -> bool:
    """Runs the parts without results; returns whether every part has succeeded.

    Args:
      chosen: parts, in order.
      folder: of the results.
      again: also run parts with results.
      minutes: no part starts after this time; a part stops after `MAX_SECONDS`.
      about: the device.
    """
    path = folder / "measurements.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    results = {"about": about, "parts": stored.get("parts", {})}
    end = time.monotonic() + 60 * minutes
    for part in chosen:
        outcome = results["parts"].get(part.name, {"failed": OUT_OF_TIME})
        if not again and outcome.get("failed") != OUT_OF_TIME:
            print(f"--- {part.name}: already {outcome.get('failed', 'done')}")
            continue
        left = end - time.monotonic()
        if left <= 0:
            print(f"--- {part.name}: no time left; rerun the command to resume")
            continue
        print(f"--- {part.name}: python -m {' '.join(part.command)}", flush=True)
        results["parts"][part.name] = run(part, min(left, MAX_SECONDS))
        write_atomically(path, json.dumps(results, indent=1) + "\n")
        write_atomically(folder / "summary.md", summary.summary(results))
    return all("failed" not in results["parts"].get(p.name, ["failed"]) for p in chosen)


def _slug(device: str) -> str:
    """Returns a device's name as a folder name: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every part has succeeded, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.accelerator", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--again", action="store_true", help="also run parts with results")
    parser.add_argument("--only", nargs="+", default=[], help="prefixes of part names")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no part after this")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any machine")
    parser.add_argument("--out", help="folder; default: experiments/results/<device>")
    options = parser.parse_args(arguments)
    name, memory = device()
    full = Plan() if memory >= LARGE_MEMORY else SMALL
    all_parts = parts(SMOKE if options.smoke else full)
    chosen = [p for p in all_parts if not options.only or p.name.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"--only {options.only}: parts are {', '.join(p.name for p in all_parts)}")
    default = "results/smoke" if options.smoke else f"experiments/results/{_slug(name)}"
    folder = pathlib.Path(options.out) if options.out else ROOT / default
    about = {"device": name, "python": sys.version.split()[0], "smoke": options.smoke}
    done = measure(chosen, folder, again=options.again, minutes=options.minutes, about=about)
    print(f"wrote {folder}")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
