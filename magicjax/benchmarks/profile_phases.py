"""Profiles the compiled loop by phase (draft, score, verify, commit) and by operation.

The loop runs once under the profiler. The text of the compiled program gives the scope of
`loop.step` in which each operation was traced. Every instant is assigned to one phase, so the
phases add up to the wall time even where operations overlap or nest. A fusion across scopes belongs
to the scope of its result.
"""

import bisect
import collections
import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.decoding.preparation import prepare
from magicjax.decoding.request import Request, RequestOptions
from magicjax.files import write_atomically
from magicjax.model import Model
from magicjax.prediction import choosing, hlo
from magicjax.sampling_params import SamplingParams
from sharding import global_arrays

PHASES = ("draft", "score", "verify", "commit")
SCOPES = dict(zip(("propose", "score", "verify", "commit"), PHASES, strict=True))
REST = "rest"
ROUNDS = 32  # XLA drops later events of a trace in JSON than the first million
FILE = "trace.perfetto.json.gz"


@dataclasses.dataclass(frozen=True)
class Phases:
    """The wall time of a traced run of the loop by phase, in seconds.

    Attributes:
      draft: the drafter's proposals; 0 in plain decoding.
      score: the target's pass over the tree.
      verify: the choice of the accepted path.
      commit: updates of caches and output, including refreshes of the draft cache.
      rest: operations outside the phases, such as the loop's condition and copies around it.
      host: gaps between operations: launches and the profiler's overhead.
      rounds: number of traced rounds.
      operations: seconds by operation, the longest first, without the numbers in names: kernels of
        a GPU, operations of the compiled program on a CPU. Those that overlap count in full.
    """

    draft: float
    score: float
    verify: float
    commit: float
    rest: float
    host: float
    rounds: int
    operations: dict[str, float]

    @property
    def seconds(self) -> dict[str, float]:
        """All parts by name; they add up to the wall time."""
        return {name: getattr(self, name) for name in (*PHASES, REST, "host")}

    @property
    def wall_s(self) -> float:
        """The wall time of the traced run, including the profiler's overhead."""
        return sum(self.seconds.values())


class Event(NamedTuple):
    """An executed operation; times are in microseconds.

    Attributes:
      name: the operation's name in the program, or "".
      kernel: the name in the trace.
      begin, end: times.
    """

    name: str
    kernel: str
    begin: float
    end: float


class Span(NamedTuple):
    """An interval of the trace in microseconds, and its phase or "rest"."""

    begin: float
    end: float
    phase: str


def trace(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    options: RequestOptions = RequestOptions(),
    *,
    folder: str | os.PathLike | None = None,
    rounds: int = ROUNDS,
) -> Phases:
    """Runs the compiled loop under the profiler and returns its time by phase and operation.

    Args:
      target, prompts, params: arguments of `magicjax.generate`.
      options: its keyword arguments. With "auto", the chosen drafter runs with the planned tree.
      folder: `trace.perfetto.json.gz` is written here, for ui.perfetto.dev; None: not written.
      rounds: the most rounds to trace, starting after the prompts.

    Raises:
      ValueError, TypeError: invalid arguments; or this platform's trace does not name operations.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} is too small: trace at least 1 round")
    if choosing.is_choice(options.drafter):
        request = choosing.start(target, prompts, params, options).decoder.request
    else:
        request = prepare(target, prompts, params, options)
    drafters = [] if request.drafter is None else [request.drafter]
    return trace_request(request, PrefilledPrompts.create(request, drafters), folder, rounds)


def trace_request(
    request: Request,
    prefilled: PrefilledPrompts,
    folder: str | os.PathLike | None = None,
    rounds: int = ROUNDS,
) -> Phases:
    """Returns `trace` of a request whose prompts are prefilled; donates their cache.

    Args:
      request, prefilled: a request, and its prefilled prompts.
      folder, rounds: arguments of `trace`; rounds is at least 1.

    Raises:
      ValueError: this platform's trace does not name operations.
    """
    decoder = Decoder(request)
    state = prefilled.start(decoder)
    compiled = program_cache.totals()
    text = decoder.loop(state).as_text() or ""
    if program_cache.totals() != compiled:
        # The first run of a program loads kernels, which would count as host time.
        state = prefilled.reset(decoder.decode(state, 1)).start(decoder)
    jax.block_until_ready(state)
    state, data, raw_trace = traced(lambda: decoder.decode(state, rounds), folder is not None)
    wall_s = decoder.clock.newest_s
    match = re.match(r"HloModule ([\w.\-]+)", text)
    events = events_of(data, match[1] if match else "", jax.default_backend() == "cpu")
    phases, control_flow = phases_of_operations(text, drafting=request.drafter is not None)
    spans = timeline(events, phases, control_flow)
    if folder is not None:
        content = json.dumps(with_track(raw_trace, merge_spans(spans))).encode()
        write_atomically(pathlib.Path(folder) / FILE, gzip.compress(content))
    seconds = dict.fromkeys((*PHASES, REST), 0.0)
    for span in spans:
        seconds[span.phase] += 1e-6 * (span.end - span.begin)
    return Phases(
        **seconds,
        host=wall_s - sum(seconds.values()),
        rounds=int(global_arrays.fetch(state.histogram).sum(1).max()),
        operations=by_operation(events, control_flow),
    )


def traced(run: Callable[[], Any], as_json: bool) -> tuple[Any, ProfileData, dict[str, Any]]:
    """Returns the result of `run`, which is traced, and the trace; {} unless also `as_json`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would fill most of a CPU's trace
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            result = run()
        (data,) = pathlib.Path(folder).rglob("*.xplane.pb")
        (raw,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        return (
            result,
            ProfileData.from_file(str(data)),
            json.loads(gzip.decompress(raw.read_bytes())) if as_json else {},
        )


def events_of(data: ProfileData, module: str, on_cpu: bool) -> list[Event]:
    """Returns the events of a program: kernels and copies of devices, or operations of a CPU.

    Args:
      data: the trace.
      module: the program's name in the trace, `jit_...`.
      on_cpu: the program ran on a CPU, which traces do not list as a device.

    Raises:
      ValueError: the trace has no device or no event of the program.
    """
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    if not (devices or on_cpu):
        raise ValueError(
            f"the trace has no device, only {sorted(plane.name for plane in planes)}: the device's "
            "profiler did not start (CUPTI for NVIDIA GPUs)"
        )
    events = []
    for line in (line for plane in devices or planes for line in plane.lines):
        # A device may have further lines, which repeat the events of its streams by operation.
        if devices and not line.name.startswith("Stream"):
            continue
        for event in line.events:
            stats = dict(event.stats)
            # All events of a device count: copies do not name an operation.
            if devices or stats.get("hlo_module") == module:
                begin, name = 1e-3 * event.start_ns, stats.get("hlo_op", "")
                events.append(Event(name, event.name, begin, begin + 1e-3 * event.duration_ns))
    if not events:
        raise ValueError(
            f"the trace has no event of {module}, only {sorted(plane.name for plane in planes)}: "
            "this profiler does not name operations"
        )
    return events


def by_operation(events: Sequence[Event], control_flow: Collection[str]) -> dict[str, float]:
    """Returns the seconds of `Phases.operations`."""
    total: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.name not in control_flow:
            total[re.sub(r"([._]\d+)+$", "", event.kernel)] += 1e-6 * (event.end - event.begin)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def phases_of_operations(program: str, drafting: bool = True) -> tuple[dict[str, str], set[str]]:
    """Returns the phases of a compiled program's operations, and the names of control flow.

    Operations in a loop or branch belong to the phase of the loop or branch. An operation without a
    scope, which a compiler pass made, belongs to the phase of an operand, else of a user.

    Args:
      program: its text. Operations of no phase are omitted from the result.
      drafting: whether there is a drafter. Without one, operations in the scope of the draft only
        arrange the input of the scoring pass, and count there.
    """
    phases: dict[str, str] = {}
    control_flow: set[str] = set()
    computation_phases: dict[str, str] = {}
    computations = hlo.operations(program)
    for name, operations in reversed(computations.items()):  # callers first
        control_flow |= {x.name for x in operations if x.opcode in hlo.CONTROL_FLOW}
        if name in computation_phases:
            phases |= {x.name: computation_phases[name] for x in operations}
        else:
            phases |= _phases_of_body(operations)
        for x in operations:
            if x.name in phases:
                called = (other for other in x.references if other in computations)
                computation_phases |= dict.fromkeys(called, phases[x.name])
    if not drafting:
        phases = {name: "score" if phase == "draft" else phase for name, phase in phases.items()}
    return phases, control_flow


def _phases_of_body(operations: list[hlo.Operation]) -> dict[str, str]:
    """Returns the phases of the operations of one computation."""
    phases: dict[str, str] = {}
    without_scope = {x.name for x in operations if x.scope is None}
    for x in operations:
        scopes = (x.scope or "").split("/")
        phase = next((SCOPES[scope] for scope in scopes if scope in SCOPES), None)
        if phase:
            phases[x.name] = phase
    for x in operations:
        # A tuple reads values of all phases.
        if x.name in without_scope and x.opcode != "tuple":
            phase = next((phases[operand] for operand in x.operands if operand in phases), None)
            if phase:
                phases[x.name] = phase
    for x in reversed(operations):
        for operand in x.operands:
            if operand in without_scope and x.name in phases:
                phases.setdefault(operand, phases[x.name])
    return phases


def timeline(
    events: Sequence[Event], phases: dict[str, str], control_flow: Collection[str]
) -> list[Span]:
    """Returns the phase of each instant as ordered spans without overlaps, with gaps.

    Where events overlap, one with a phase takes precedence, then the one that began last. Control
    flow counts only if no other event begins within it: it was then compiled to one operation.
    """
    work = [e for e in events if e.name not in control_flow]
    begins = sorted(e.begin for e in work)
    for e in events:
        if e.name in control_flow:
            index = bisect.bisect_left(begins, e.begin)
            if index == len(begins) or begins[index] >= e.end:
                work.append(e)
    # Later events overwrite earlier ones: those with a phase, then those that begin later.
    work.sort(key=lambda e: (e.name in phases, e.begin, -e.end))
    bounds = np.unique(np.array([(e.begin, e.end) for e in work], float))
    running = np.full(max(0, len(bounds) - 1), -1)
    for i, e in enumerate(work):
        running[slice(*np.searchsorted(bounds, (e.begin, e.end)))] = i
    instants = zip(bounds[:-1].tolist(), bounds[1:].tolist(), running)
    return [
        Span(begin, end, phases.get(work[i].name, REST)) for begin, end, i in instants if i >= 0
    ]


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Returns one span for each run of the same phase; spans outside the phases are dropped."""
    phase_spans = (span for span in spans if span.phase != REST)
    groups = (list(group) for _, group in itertools.groupby(phase_spans, lambda s: s.phase))
    return [Span(group[0].begin, group[-1].end, group[0].phase) for group in groups]


def with_track(trace: dict[str, Any], spans: Sequence[Span]) -> dict[str, Any]:
    """Returns the trace with the phases on an additional track at the top."""
    events = trace["traceEvents"]
    track = {"pid": 1 + max((e["pid"] for e in events if "pid" in e), default=0), "tid": 1}
    metadata = {
        "process_name": {"name": "magicjax"},
        "thread_name": {"name": "phases of a round"},
        "process_sort_index": {"sort_index": -1},
    }
    added = [{"ph": "M", "name": key, "args": args} | track for key, args in metadata.items()]
    added += [
        {"ph": "X", "name": s.phase, "ts": s.begin, "dur": s.end - s.begin} | track for s in spans
    ]
    return trace | {"traceEvents": added + events}
