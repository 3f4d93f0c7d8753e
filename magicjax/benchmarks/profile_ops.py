"""Where the time of the compiled loop goes: `python -m magicjax.benchmarks.profile_ops`.

Attention, matrix products, the rest, and the gaps in which the device is idle.

The loop runs once under `jax.profiler.trace`; of the trace's events those with the name of an
operation of the program are kept, and the compiled program's own text says what each of them is.
On a GPU these are kernels, on a CPU XLA's thunks. While it profiles, XLA launches the kernels of a
GPU one by one instead of by recorded graphs, so idle gaps are an upper bound there.
"""

import argparse
import dataclasses
import glob
import gzip
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from magicjax.benchmarks import bench
from magicjax.decoding import program_cache
from magicjax.trees.token_tree import chain
from pallas_kernels.benchmarks.bench import write_json

CLASSES = ("attention", "matrix products", "rest")
MOST_EVENTS = 1_000_000  # of a trace as JSON: XLA leaves out what came later
OPCODE = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(")
COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$")
SCOPE = re.compile(r'op_name="([^"]*)"')
NAMES = re.compile(r"%([\w.\-]+)")
CALLS = re.compile(r"calls=%([\w.\-]+)")
# Names of kernels, and of what XLA calls in libraries, that multiply matrices.
PRODUCT = re.compile(r"gemm|cublas|cutlass|nvjet|matmul|xmma|\bdot\b|dot_general", re.IGNORECASE)
KERNEL = re.compile(r"mosaic", re.IGNORECASE)  # ours
OF_CONTROL = ("while", "conditional", "call", "async-start", "async-done")


class Event(NamedTuple):
    """An operation that ran, in microseconds.

    Attributes:
      name: of the operation in the program, or else of the kernel.
      kernel: the name under which it ran.
      begin, end: when.
    """

    name: str
    kernel: str
    begin: float
    end: float


def class_of_operations(program: str) -> dict[str, str | None]:
    """Returns the class of every operation of a compiled program, by its text; None: control flow.

    Attention is what was traced inside `tree_attention`, whatever it does there. An operation that
    a pass of the compiler made has no trace: it is attention if a neighbour is.
    """
    found: dict[str, str | None] = {}
    operands: dict[str, list[str]] = {}
    untraced = []
    products: set[str] = set()  # computations that multiply, and fusions that call them
    computation = ""
    for line in program.splitlines():
        if match := COMPUTATION.match(line):
            computation = match[1]
            continue
        match = OPCODE.match(line)
        if match is None:
            continue
        name, opcode = match[1], match[2]
        operands[name] = NAMES.findall(line[match.end() :].split("), ")[0])
        scope, called = SCOPE.search(line), CALLS.search(line)
        multiplies = opcode in ("dot", "convolution") or bool(called and called[1] in products)
        multiplies |= opcode == "custom-call" and bool(PRODUCT.search(line))
        if multiplies:
            products.add(computation)
        found[name] = "matrix products" if multiplies else "rest"
        if opcode in OF_CONTROL:
            found[name] = None
        elif scope and "tree_attention" in scope[1]:
            found[name] = "attention"
        elif not scope and multiplies:
            untraced.append(name)
    beside: dict[str, set[str | None]] = {name: set() for name in untraced}
    for name, read in operands.items():
        for other in read:
            if name in beside:
                beside[name].add(found.get(other))
            if other in beside:
                beside[other].add(found[name])
    return found | {name: "attention" for name in untraced if "attention" in beside[name]}


def read_trace(folder: str) -> dict[str, Any]:
    """Returns the one trace that lies in a folder of `jax.profiler.trace`.

    Raises:
      ValueError: there is none, or more than one, or it is full, and so its end is missing.
    """
    paths = glob.glob(os.path.join(folder, "**", "*.trace.json.gz"), recursive=True)
    if len(paths) != 1:
        raise ValueError(f"{folder} holds {len(paths)} files *.trace.json.gz: it must be one")
    with gzip.open(paths[0], "rt", encoding="utf-8") as file:
        trace = json.load(file)
    events = sum(event.get("ph") == "X" for event in trace["traceEvents"])
    if events >= MOST_EVENTS:
        raise ValueError(
            f"the trace has {events} events, and XLA writes no more than {MOST_EVENTS}: its end is "
            "missing; trace fewer rounds or new tokens"
        )
    return trace


def events_of(trace: dict[str, Any], module: str, on_cpu: bool) -> list[Event]:
    """Returns what ran of a program: kernels and copies of devices, or a CPU's operations.

    Args:
      trace: as `read_trace` returns it.
      module: the program's name in it, `jit_...`.
      on_cpu: it ran on a CPU, which is no device in a trace.

    Raises:
      ValueError: nothing of that name, or no device, is in the trace; it says what is.
    """
    every = trace["traceEvents"]
    named = [e for e in every if e.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    devices = {pid for pid, name in processes.items() if name.startswith("/device:")}
    if not (devices or on_cpu):
        raise ValueError(
            f"the trace has no device, only {sorted(processes.values())}: the device's profiler "
            "did not start (for an NVIDIA GPU that is CUPTI)"
        )
    found, modules = [], set()
    for e in every:
        if e.get("ph") != "X" or (devices and e["pid"] not in devices):
            continue
        # Beside the streams a device's process may have lines that repeat them, by operation.
        if devices and not threads.get((e["pid"], e.get("tid")), "").startswith("Stream"):
            continue
        arguments = e.get("args", {})
        modules.add(arguments.get("hlo_module"))
        # Of a device everything counts: a copy has no operation's name.
        if devices or arguments.get("hlo_module") == module:
            name = arguments.get("hlo_op", "")
            found.append(Event(name, e["name"], e["ts"], e["ts"] + e.get("dur", 0)))
    if not found:
        raise ValueError(
            f"the trace has no event of {module}: it has {sorted(m for m in modules if m)} on "
            f"{sorted(processes.values())}; this profiler does not name operations"
        )
    return found


def class_of(event: Event, operations: dict[str, str | None]) -> str | None:
    """Returns the class of an event: by its operation, else by its kernel; None: control flow."""
    of_operation = operations.get(event.name, "rest")
    if of_operation != "rest":
        return of_operation
    if KERNEL.search(event.kernel):
        return "attention"
    return "matrix products" if PRODUCT.search(event.kernel) else "rest"


def summarize(events: Iterable[Event], operations: dict[str, str | None]) -> dict[str, Any]:
    """Returns seconds: in all, busy, idle, the longest gap, and of each class; and the top of rest.

    In all is from the first event's begin to the last one's end. Classes may overlap, on several
    streams, and then add up to more than the busy time.
    """
    found = [(event, class_of(event, operations)) for event in events]
    kept = sorted((e.begin, e.end, kind, e.kernel) for e, kind in found if kind is not None)
    of_class, of_rest = dict.fromkeys(CLASSES, 0.0), dict[str, float]()
    busy, longest, reached = 0.0, 0.0, kept[0][0]
    for begin, end, kind, kernel in kept:
        of_class[kind] += end - begin
        if kind == "rest":
            of_rest[kernel] = of_rest.get(kernel, 0.0) + end - begin
        longest = max(longest, begin - reached)
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - kept[0][0]
    top = sorted(of_rest.items(), key=lambda item: -item[1])[:8]
    seconds = {"whole": whole, "busy": busy, "idle": whole - busy, "longest gap": longest}
    return {
        "seconds": {name: 1e-6 * x for name, x in (seconds | of_class).items()},
        "outside attention and products": (of_class["rest"] + whole - busy) / whole,
        "top of rest": {name: 1e-6 * x for name, x in top},
    }


def traced(text: str, run: Callable[[], Any]) -> tuple[Any, dict[str, Any], list[Event]]:
    """Returns (what `run` returns, the trace of it, what ran of a compiled program).

    Args:
      text: of the program that `run` calls.
      run: called without arguments; returns when the program has ended.

    Raises:
      ValueError: this platform's trace does not name operations, or the trace is full.
    """
    match = re.match(r"HloModule ([\w.\-]+)", text)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python, which would be most of a CPU's trace
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            result = run()
        trace = read_trace(folder)
    module, on_cpu = match[1] if match else "", jax.default_backend() == "cpu"
    return result, trace, events_of(trace, module, on_cpu)


def profile(program: jax.stages.Compiled, run: Callable[[], Any]) -> dict[str, Any]:
    """Returns the summary of one run of a compiled program.

    Args:
      program: what `run` calls.
      run: called without arguments; returns JAX arrays.

    Raises:
      ValueError: this platform's trace does not name operations, or the trace is full.
    """
    text = program.as_text() or ""
    _, _, events = traced(text, lambda: jax.block_until_ready(run()))
    return summarize(events, class_of_operations(text))


def profile_loop(setup: bench.Setup, batch: int, context: int, drafter: Any, tree: Any) -> dict:
    """Returns the summary of one run of the compiled loop, and its rounds.

    The arguments are those of `bench.run_loop`.
    """
    request = bench.request_of(setup, batch, context, drafter, tree)

    def arguments():
        return request.target, request.drafter, bench.state_of(request)

    loop, _ = program_cache.program("decode", request.settings, *arguments())
    jax.block_until_ready(loop(*arguments()))  # loads what it needs
    given = jax.block_until_ready(arguments())
    rounds = []

    def run() -> Any:
        state = loop(*given)
        rounds.append(int(np.asarray(state.histogram).sum(1).max()))
        return state.emitted

    return profile(loop, run) | {"rounds": rounds[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after printing the table; wrong arguments end the process with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m magicjax.benchmarks.profile_ops",
        description=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="llama-3.1-8b", help="preset or model directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=512, help="of the draft's cache")
    parser.add_argument("--gamma", type=int, default=4, help="drafts of a round")
    parser.add_argument("--rate", type=float, default=0.8, help="synthetic acceptance")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a loop, for each row")
    parser.add_argument("--backend", help="of the attention; None: mosaic on Hopper, else xla")
    parser.add_argument("--out", help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    options.steps, shape = 1, (options.batch, options.context)
    setup = bench.setup_of(parser, argparse.Namespace(**vars(options) | {"context": [shape[1]]}))
    setup = dataclasses.replace(setup, target=bench.muted(setup.target))
    draft = bench.synthetic_draft(setup, *shape, options.budget, options.rate)
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, attention {setup.backend}")
    about = {"device": device, "jax": jax.__version__, "backend": setup.backend}
    about |= {"settings": {key: x for key, x in vars(options).items() if key != "out"}}
    rows = []
    for name, drafter, tree in (
        ("plain", None, None),
        ("speculative", draft, chain(options.gamma)),
    ):
        try:
            found = profile_loop(setup, *shape, drafter, tree)
        except ValueError as error:  # of this platform's profiler, which is an answer
            found = {"why": str(error)}
        rows.append({"loop": name} | found)
        print("\n".join(_lines(rows[-1])), flush=True)
    if options.out:
        write_json(options.out, about | {"rows": rows})
    return 0


def _lines(row: dict[str, Any]) -> list[str]:
    if "why" in row:
        return [f"{row['loop']}: {row['why']}"]
    seconds, rounds = row["seconds"], row["rounds"]
    head = f"{row['loop']}, {rounds} rounds: {1e3 * seconds['whole'] / rounds:.3f} ms a round"
    shares = (*CLASSES, "idle")
    lines = [
        f"  {name:<16} {1e3 * x / rounds:>9.3f} ms {x / seconds['whole']:>7.1%}"
        for name, x in ((name, seconds[name]) for name in shares)
    ]
    lines.append(f"  longest gap {1e6 * seconds['longest gap']:.1f} us")
    lines.append(f"  outside attention and products {row['outside attention and products']:.1%}")
    return [
        head,
        *lines,
        *(f"    {1e3 * x / rounds:.3f} ms {n}" for n, x in row["top of rest"].items()),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
