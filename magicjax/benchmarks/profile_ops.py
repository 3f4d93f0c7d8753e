"""Profiles the compiled loop by operation class: `python -m magicjax.benchmarks.profile_ops`.

Reports the time of attention, of matrix products, of other operations, and of gaps in which the
device is idle. The loop runs once under `jax.profiler.trace`. The text of the compiled program
gives the class of each operation in the trace: a kernel on a GPU, a thunk of XLA on a CPU. While
profiling, XLA launches GPU kernels one by one instead of in CUDA graphs, so idle time is an upper
bound there.
"""

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

from magicjax.benchmarks import bench, synthetic
from magicjax.benchmarks.tables import markdown_table
from magicjax.decoding import program_cache
from magicjax.options import token_count
from magicjax.prediction import hlo
from magicjax.trees.token_tree import chain
from pallas_kernels.benchmarks.bench import write_json

CLASSES = ("attention", "matrix products", "other")
MAX_EVENTS = 1_000_000  # XLA drops later events of a trace in JSON
# Names of kernels and library calls that multiply matrices.
PRODUCT = re.compile(
    r"gemm|cublas|cutlass|nvjet|matmul|xmma|\bdot\b|dot_general|magicjax_(packed_)?linear",
    re.IGNORECASE,
)
ATTENTION_KERNEL = re.compile(r"mosaic", re.IGNORECASE)


class Event(NamedTuple):
    """An executed operation; times are in microseconds.

    Attributes:
      name: of the operation in the program, or "".
      kernel: the name in the trace.
      begin, end: times.
    """

    name: str
    kernel: str
    begin: float
    end: float


def class_of_operations(program: str) -> dict[str, str | None]:
    """Returns the class of every operation of a compiled program; None for control flow.

    Operations in the scope `tree_attention` are attention. A matrix product without a scope, which
    a compiler pass made, is attention if it reads, or is read by, an attention operation.
    """
    classes: dict[str, str | None] = {}
    operands: dict[str, list[str]] = {}
    neighbours: dict[str, set[str]] = {}  # of matrix products without a scope
    products: set[str] = set()  # computations that contain a matrix product
    for computation, operations in hlo.operations(program).items():
        for operation in operations:
            name, opcode = operation.name, operation.opcode
            operands[name] = operation.operands
            is_product = opcode in ("dot", "convolution") or operation.fused in products
            is_product |= opcode == "custom-call" and bool(PRODUCT.search(operation.text))
            if is_product:
                products.add(computation)
            classes[name] = "matrix products" if is_product else "other"
            if opcode in hlo.CONTROL_FLOW:
                classes[name] = None
            elif "tree_attention" in (operation.scope or ""):
                classes[name] = "attention"
            elif is_product and operation.scope is None:
                neighbours[name] = set(operation.operands)
    for name, read in operands.items():
        for operand in neighbours.keys() & set(read):
            neighbours[operand].add(name)
    return classes | {
        name: "attention"
        for name, others in neighbours.items()
        if any(classes.get(other) == "attention" for other in others)
    }


def read_trace(folder: str) -> dict[str, Any]:
    """Returns the trace in a folder of `jax.profiler.trace`.

    Raises:
      ValueError: the folder does not hold exactly one trace, or the trace was truncated.
    """
    paths = glob.glob(os.path.join(folder, "**", "*.trace.json.gz"), recursive=True)
    if len(paths) != 1:
        raise ValueError(f"{folder} holds {len(paths)} files *.trace.json.gz: it must hold one")
    with gzip.open(paths[0], "rt", encoding="utf-8") as file:
        trace = json.load(file)
    events = sum(event.get("ph") == "X" for event in trace["traceEvents"])
    if events >= MAX_EVENTS:
        raise ValueError(
            f"the trace has {events} events and XLA writes at most {MAX_EVENTS}, so its end is "
            "missing: trace fewer rounds or new tokens"
        )
    return trace


def events_of(trace: dict[str, Any], module: str, on_cpu: bool) -> list[Event]:
    """Returns the events of a program: kernels and copies of devices, or operations of a CPU.

    Args:
      trace: as `read_trace` returns it.
      module: the program's name in the trace, `jit_...`.
      on_cpu: the program ran on a CPU, which traces do not list as a device.

    Raises:
      ValueError: the trace has no device or no event of the program.
    """
    trace_events = trace["traceEvents"]
    names = [e for e in trace_events if e.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    devices = {pid for pid, name in processes.items() if name.startswith("/device:")}
    if not (devices or on_cpu):
        raise ValueError(
            f"the trace has no device, only {sorted(processes.values())}: the device's profiler "
            "did not start (CUPTI for NVIDIA GPUs)"
        )
    events, modules = [], set()
    for e in trace_events:
        if e.get("ph") != "X" or (devices and e["pid"] not in devices):
            continue
        # A device may have further lines, which repeat the events of its streams by operation.
        if devices and not threads.get((e["pid"], e.get("tid")), "").startswith("Stream"):
            continue
        arguments = e.get("args", {})
        modules.add(arguments.get("hlo_module"))
        # All events of a device count: copies do not name an operation.
        if devices or arguments.get("hlo_module") == module:
            name = arguments.get("hlo_op", "")
            events.append(Event(name, e["name"], e["ts"], e["ts"] + e.get("dur", 0)))
    if not events:
        raise ValueError(
            f"the trace has no event of {module}: it has {sorted(m for m in modules if m)} on "
            f"{sorted(processes.values())}; this profiler does not name operations"
        )
    return events


def class_of(event: Event, operations: dict[str, str | None]) -> str | None:
    """Returns the class of an event, by its operation, else by its kernel; None: control flow."""
    operation_class = operations.get(event.name, "other")
    if operation_class != "other":
        return operation_class
    if ATTENTION_KERNEL.search(event.kernel):
        return "attention"
    return "matrix products" if PRODUCT.search(event.kernel) else "other"


def summarize(events: Iterable[Event], operations: dict[str, str | None]) -> dict[str, Any]:
    """Returns the seconds of each class, the wall, busy and idle seconds, and the longest gap.

    The wall time ends with the last event. Classes may overlap on several streams and then add up
    to more than the busy time. `top other` lists the longest-running kernels of class "other".
    """
    classified = [(event, class_of(event, operations)) for event in events]
    executed = sorted((e.begin, e.end, kind, e.kernel) for e, kind in classified if kind)
    by_class, other_kernels = dict.fromkeys(CLASSES, 0.0), dict[str, float]()
    first = last = executed[0][0]
    busy = longest = 0.0
    for begin, end, kind, kernel in executed:
        by_class[kind] += end - begin
        if kind == "other":
            other_kernels[kernel] = other_kernels.get(kernel, 0.0) + end - begin
        longest = max(longest, begin - last)
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    wall = last - first
    top = sorted(other_kernels.items(), key=lambda item: -item[1])[:8]
    seconds = {"wall": wall, "busy": busy, "idle": wall - busy, "longest gap": longest}
    return {
        "seconds": {name: 1e-6 * x for name, x in (seconds | by_class).items()},
        "outside attention and products": (by_class["other"] + wall - busy) / wall,
        "top other": {name: 1e-6 * x for name, x in top},
    }


def traced(text: str, run: Callable[[], Any]) -> tuple[Any, dict[str, Any], list[Event]]:
    """Returns the result of `run`, its trace, and the events of a compiled program in it.

    Args:
      text: of the program that `run` calls.
      run: called without arguments; returns when the program has ended.

    Raises:
      ValueError: this platform's trace does not name operations, or the trace was truncated.
    """
    match = re.match(r"HloModule ([\w.\-]+)", text)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would fill most of a CPU's trace
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            result = run()
        trace = read_trace(folder)
    module, on_cpu = match[1] if match else "", jax.default_backend() == "cpu"
    return result, trace, events_of(trace, module, on_cpu)


def profile(program: jax.stages.Compiled, run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the result and the summary of one run of a program; errors as for `traced`."""
    text = program.as_text() or ""
    result, _, events = traced(text, lambda: jax.block_until_ready(run()))
    return result, summarize(events, class_of_operations(text))


def profile_loop(setup: synthetic.Setup, batch: int, context: int, drafter: Any, tree: Any) -> dict:
    """Returns the summary of one run of the compiled loop, with its number of rounds.

    The arguments are those of `bench.run_loop`.
    """
    request = synthetic.synthetic_request(setup, batch, context, drafter, tree)

    def arguments():
        return request.loop_arguments(synthetic.synthetic_state(request))

    loop = program_cache.program("decode", request.settings, *arguments())
    jax.block_until_ready(loop(*arguments()))  # the first run loads kernels
    profiled = jax.block_until_ready(arguments())
    state, summary = profile(loop, lambda: loop(*profiled))
    return summary | {"rounds": int(np.asarray(state.histogram).sum(1).max())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the profiles of the plain and of the speculative loop; returns 0."""
    parser = bench.base_parser("python -m magicjax.benchmarks.profile_ops", __doc__)
    parser.add_argument("--batch", type=int, default=16, help="rows")
    parser.add_argument("--context", type=token_count, default=32768, help="tokens per row")
    parser.add_argument("--budget", type=int, default=512, help="slots of the draft cache")
    parser.add_argument("--gamma", type=int, default=4, help="draft tokens per round")
    parser.add_argument("--rate", type=float, default=0.8, help="synthetic acceptance rate")
    parser.add_argument("--new-tokens", type=int, default=24, help="new tokens per row")
    options = parser.parse_args(arguments)
    shape = (options.batch, options.context)
    setup = bench.make_setup(parser, options, [options.context])
    setup = dataclasses.replace(setup, target=synthetic.zero_logits(setup.target))
    draft = synthetic.synthetic_draft(setup, *shape, options.budget, options.rate)
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
            result = profile_loop(setup, *shape, drafter, tree)
        except ValueError as error:  # this platform's profiler does not name operations
            result = {"skipped": str(error)}
        rows.append({"loop": name} | result)
        print(as_text(rows[-1]), flush=True)
    if options.out:
        write_json(options.out, about | {"rows": rows})
    return 0


def as_text(row: dict[str, Any]) -> str:
    """Returns the profile of one loop as text."""
    if "skipped" in row:
        return f"{row['loop']}: {row['skipped']}"
    seconds, rounds = row["seconds"], row["rounds"]
    shares = [
        (name, 1e3 * seconds[name] / rounds, f"{seconds[name] / seconds['wall']:.1%}")
        for name in (*CLASSES, "idle", "wall")
    ]
    top = [(name, 1e3 * x / rounds) for name, x in row["top other"].items()]
    return "\n".join(
        (
            f"\n{row['loop']}, {rounds} rounds, longest gap "
            f"{1e6 * seconds['longest gap']:.1f} us, outside attention and products "
            f"{row['outside attention and products']:.1%}",
            markdown_table(("", "ms per round", "share"), shares),
            markdown_table(("other kernels", "ms per round"), top),
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
