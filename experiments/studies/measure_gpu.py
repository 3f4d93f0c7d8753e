"""Measures everything that needs a GPU, in parts: `python -m experiments.studies.measure_gpu`.

Needs jax, flax and transformers, no installation, and is run from the root of a checkout. A part
that is in the results already is not run again, so a run that was cut short goes on with the next
call; nor is one that failed, unless with --again, because most failures come again.
Results: `measurements.json`, and of it `summary.md`, with each target beside what was reached.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from experiments.studies import gpu_summary
from pallas_kernels.benchmarks.shapes import FULL_HEADS, FULL_NODES, FULL_SIZES

ROOT = pathlib.Path(__file__).parents[2]
UNFINISHED = 3  # of pallas_kernels.benchmarks.tune, whose time ran out
OUT_OF_TIME = "ran out of time"
TAIL = 4000  # characters of a part's output that are kept


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, at full size or to see that every part works.

    Attributes:
      target, dtype, backend: of the model; backend "": the one meant for the device.
      attention: (batch, slots) of attention alone; heads: K, G, D; backends: of ours.
      decoding: (batch, context) of decoding; the first is profiled too.
      grid: (batch, context, gammas) of synthetic acceptance.
      budget: of the draft's cache.
      rates: of synthetic acceptance.
      new_tokens: of a loop with it.
      steps: timed rounds.
      check, tune: arguments of the two commands.
      tests: files of tests.
      offloaded: (target, draft) of decoding with the target's weights in host memory.
      offload: arguments of its command.
    """

    target: str = "llama-3.1-8b"
    dtype: str = "bfloat16"
    backend: str = ""
    attention: tuple = FULL_SIZES
    heads: tuple = FULL_HEADS
    backends: str = "mosaic,xla"
    decoding: tuple = ((16, 32768), (1, 130944), (64, 8192))
    grid: tuple = ((16, 32768, (4, 2, 8)), (64, 8192, (4,)), (1, 130560, (4,)))
    budget: int = 512
    rates: tuple = (0.6, 0.8, 0.9)
    new_tokens: int = 384
    steps: int = 10
    check: tuple = ()
    tune: tuple = ("--seconds", "400")
    tests: tuple = ("mosaic", "tuned", "check", "peers", "bench")
    offloaded: tuple = (
        ("llama-2-7b", "llama-68m"),
        ("opt-13b", "opt-125m"),
        ("opt-30b", "opt-125m"),
    )
    offload: tuple = ()


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
    steps=2,
    check=("--backend", "xla", "--small"),
    tune=("--list", "--shape", "2,512,2,4,128,5"),
    tests=("tuned",),
    offloaded=(("experiments/zoo/target", "experiments/zoo/draft-1"),),
    offload=("--batch", "1", "--nodes", "1", "4", "--turns", "1"),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A command of minutes.

    Attributes:
      name: in the results.
      command: behind `python -m`.
      memory: share of the device's memory that JAX takes; the rest is for torch.
      platform: JAX's; "": the device.
      writes: it takes --out; what others print is kept.
    """

    name: str
    command: tuple[str, ...]
    memory: float = 0.9
    platform: str = ""
    writes: bool = True


def parts(plan: Plan) -> list[Part]:
    """Returns the parts in the order of running."""
    tests = [f"tests/pallas_kernels/test_{name}.py" for name in plan.tests]
    # conftest.py needs hypothesis, which a bare image lacks, and these tests do not.
    pytest = ("pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *tests)
    found = [
        Part("tests", pytest, platform="cpu", writes=False),
        Part("check", ("pallas_kernels.benchmarks.validate", *plan.check)),
        Part("tune", ("pallas_kernels.benchmarks.tune", *plan.tune), writes=False),
        # What was found fastest is held against the definition too.
        Part("check-tuned", ("pallas_kernels.benchmarks.validate", *plan.check)),
    ]
    sizes = zip(("--kv-heads", "--group", "--head-dim"), map(str, plan.heads))
    heads = [word for pair in sizes for word in pair]
    for (batch, slots), nodes in itertools.product(plan.attention, map(str, FULL_NODES)):
        shape: tuple[str, ...] = ("--batch", str(batch), "--context", str(slots), *heads)
        how = ("--nodes", nodes, "--dtype", plan.dtype, "--backends", plan.backends)
        command = ("pallas_kernels.benchmarks.bench", *shape, *how, "--peers", "all")
        found.append(Part(f"attention-{batch}x{slots}-nodes{nodes}", command, memory=0.6))
    model = ["--target", plan.target, "--dtype", plan.dtype]
    model += ["--backend", plan.backend] if plan.backend else []
    steps = ("--steps", str(plan.steps))
    for i, (batch, context) in enumerate(plan.decoding):
        shape = ("--batch", str(batch), "--context", str(context), "--budget", str(plan.budget))
        timed = ("--nodes", "5", "17", "--gamma", "4", "--rate", *steps, "--hugging-face")
        name = f"{batch}x{context}"
        found.append(
            Part(f"decoding-{name}", ("magicjax.benchmarks.bench", *model, *shape, *timed))
        )
        if i == 0:
            found.append(
                Part(f"profile-{name}", ("magicjax.benchmarks.profile_ops", *model, *shape))
            )
    rates = ("--rate", *map(str, plan.rates), "--new-tokens", str(plan.new_tokens))
    for batch, context, gammas in plan.grid:
        shape = ("--batch", str(batch), "--context", str(context), "--budget", str(plan.budget))
        for gamma in gammas:
            grid = ("--nodes", str(gamma + 1), "--gamma", str(gamma), *rates, *steps)
            name = f"grid-{batch}x{context}-gamma{gamma}"
            found.append(Part(name, ("magicjax.benchmarks.bench", *model, *shape, *grid)))
    for target, draft in plan.offloaded:
        pair = ("--target", target, "--draft", draft, "--dtype", plan.dtype)
        name = f"offload-{pathlib.PurePath(target).name}"
        found.append(Part(name, ("experiments.studies.offloading", *pair, *plan.offload)))
    return found


def run(part: Part, seconds: float) -> dict[str, Any]:
    """Returns what came of a part: its command, seconds, and result, or how it failed.

    Args:
      part: to run.
      seconds: after which it is stopped.
    """
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(part.memory),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "NPROC": "8",  # threads of XLA's, enough for kernels to be interpreted
    }
    # A part that was cut short finds its programs compiled.
    programs = pathlib.Path(tempfile.gettempdir()) / "magicjax-programs"
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
    if part.platform:
        environment["JAX_PLATFORMS"] = part.platform
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        command = ["-m", *part.command, *(["--out", str(out)] if part.writes else [])]
        begin = time.monotonic()
        status, printed = _call([sys.executable, *command], environment, seconds)
        found = {
            "command": " ".join(["python", "-m", *part.command]),
            "seconds": time.monotonic() - begin,
        }
        done = status == 0
        if not done:
            stopped = status is None or (status == UNFINISHED and part.name == "tune")
            found["failed"] = OUT_OF_TIME if stopped else f"status {status}"
        if out.exists():
            found["result"] = json.loads(out.read_text())
        if not part.writes or not done:
            found["printed"] = printed[-TAIL:]
    return found


def _call(
    command: list[str], environment: dict[str, str], seconds: float
) -> tuple[int | None, str]:
    """Returns (status, None if it had to be stopped; what it printed), and shows it too."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            # Its own processes too: one that is left would keep the device's memory.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        printed = log.read()
    print(printed[-TAIL:], flush=True)
    return status, printed


def device() -> str:
    """Returns the name of the device, asked in a process that ends and frees it."""
    found = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file under a temporary name first, so that a kill leaves no half of one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)


def measure(
    chosen: Sequence[Part], folder: pathlib.Path, *, again: bool, minutes: float, about: dict
) -> bool:
    """Returns whether every part is done, having run those that were not.

    Args:
      chosen: parts, in order.
      folder: of the results.
      again: run those too that are there.
      minutes: begin no part after so many, and stop the one that runs 8 minutes.
      about: of the device.
    """
    path = folder / "measurements.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    found = {"about": about, "parts": kept.get("parts", {})}
    end = time.monotonic() + 60 * minutes
    for part in chosen:
        there = found["parts"].get(part.name, {"failed": OUT_OF_TIME})
        if not again and there.get("failed") != OUT_OF_TIME:
            print(f"--- {part.name}: there already, {there.get('failed', 'done')}")
            continue
        left = end - time.monotonic()
        if left <= 0:
            print(f"--- {part.name}: no time left; call again to go on")
            continue
        print(f"--- {part.name}: python -m {' '.join(part.command)}", flush=True)
        found["parts"][part.name] = run(part, min(left, 480))
        write(path, json.dumps(found, indent=1) + "\n")
        write(folder / "summary.md", gpu_summary.summary(found))
    results = [found["parts"].get(part.name, {"failed": ""}) for part in chosen]
    return not any("failed" in result for result in results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every part is done and none failed, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.measure_gpu", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--again", action="store_true", help="also parts that are there already")
    parser.add_argument("--only", nargs="+", default=[], help="parts whose name begins so")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing new after")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine: does it work?")
    parser.add_argument("--out", help="folder; default: experiments/results/<device>")
    options = parser.parse_args(arguments)
    every = parts(SMOKE if options.smoke else Plan())
    chosen = [p for p in every if not options.only or p.name.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"--only {options.only}: parts are {', '.join(p.name for p in every)}")
    name = device()
    where = "results/smoke" if options.smoke else f"experiments/results/{gpu_summary.slug(name)}"
    folder = pathlib.Path(options.out) if options.out else ROOT / where
    folder.mkdir(parents=True, exist_ok=True)
    about = {"device": name, "python": sys.version.split()[0], "smoke": options.smoke}
    limits = {"again": options.again, "minutes": options.minutes}
    done = measure(chosen, folder, about=about, **limits)
    print(f"written to {folder}")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
