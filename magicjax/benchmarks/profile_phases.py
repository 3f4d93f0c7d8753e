"""Which part of a round takes the time: the draft, the target's pass, verification or commit.

The loop runs once under the profiler. The compiled program's own text says in which scope of
`decode.step` each operation was traced, and every instant goes to one phase, so the phases add up
to the wall time, whatever ran side by side or within another operation. What XLA fused across
scopes counts where the fusion's result was traced.
"""

import bisect
import dataclasses
import gzip
import heapq
import itertools
import json
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax

from magicjax.aot import hlo
from magicjax.autotune import auto
from magicjax.autotune.auto import Auto, Choice
from magicjax.benchmarks import profile_ops
from magicjax.benchmarks.profile_ops import NAMES, OF_CONTROL, OPCODE, SCOPE, Event
from magicjax.decoding import program_cache, runner
from magicjax.decoding.request import Request, prepare
from magicjax.model import Model
from sharding import processes

PHASES = ("draft", "score", "verify", "commit")
SCOPES = dict(zip(("propose", "score", "verify", "commit"), PHASES, strict=True))
REST = "rest"
ROUNDS = 32  # enough to know the shares; a trace of a whole run can be too long to be kept
FILE = "trace.perfetto.json.gz"


@dataclasses.dataclass(frozen=True)
class Phases:
    """Where the wall time of a traced run of the loop went, in seconds.

    Attributes:
      draft: the drafter's proposals; 0 in plain decoding.
      score: the target's pass over the tree.
      verify: which path is accepted.
      commit: writing caches and output, refreshes of a draft's cache included.
      rest: operations of no phase: the loop's condition, copies at its ends.
      host: nothing ran: starting operations, and what the profiler itself took.
      rounds: of the traced run.
    """

    draft: float
    score: float
    verify: float
    commit: float
    rest: float
    host: float
    rounds: int

    @property
    def seconds(self) -> dict[str, float]:
        """The six parts, by name; they add up to the wall time."""
        return {name: x for name, x in dataclasses.asdict(self).items() if name != "rounds"}

    @property
    def wall_s(self) -> float:
        """The wall time of the traced run, which the profiler makes longer than others."""
        return sum(self.seconds.values())


class Span(NamedTuple):
    """A part of the loop's time, in microseconds of the trace, and its phase or "rest"."""

    begin: float
    end: float
    phase: str


def trace(
    target: Model,
    prompts: Sequence[Any],
    folder: str | os.PathLike | None = None,
    *,
    rounds: int = ROUNDS,
    **options: Any,
) -> Phases:
    """Returns where the time of the compiled loop goes, in one run of its own under the profiler.

    Args:
      target, prompts, options: as for `magicjax.generate`. What "auto" chooses runs with the tree
        that was planned.
      folder: where `trace.perfetto.json.gz` is written, which ui.perfetto.dev opens; None: nowhere.
      rounds: traced at most, from the prompts' end on.

    Raises:
      ValueError, TypeError: bad input; this platform's trace does not name operations, or has more
        events than XLA keeps.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least 1 must be traced")
    request = _request(target, prompts, options)
    state, _, _ = runner.start(request)
    if runner.compile_loop(request, request.settings, state):
        # A program's first run loads what it needs, which would count as the host's.
        runner.run(request, request.settings, state, 1)
        state, _, _ = runner.start(request)
    state = runner.with_rounds(state, rounds)
    arguments = request.target, request.drafter, state
    loop, _ = program_cache.program("decode", request.settings, *arguments)
    text = loop.as_text() or ""
    jax.block_until_ready(arguments)
    (state, wall_s), found, events = profile_ops.traced(
        text, lambda: runner.timed(loop, *arguments)
    )
    of_operation, control = phases_of_operations(text, drafting=request.drafter is not None)
    spans = timeline(events, of_operation, control)
    if folder is not None:
        write(pathlib.Path(folder) / FILE, with_track(found, slices(spans)))
    return _summary(spans, wall_s, int(processes.fetch(state.histogram).sum(1).max()))


def _request(target: Model, prompts: Sequence[Any], options: dict[str, Any]) -> Request:
    if isinstance(options.get("drafter"), Auto | Choice | str):
        return auto.fixed(target, prompts, **options)[1]
    return prepare(target, prompts, **options)


def _summary(spans: Sequence[Span], wall_s: float, rounds: int) -> Phases:
    seconds = dict.fromkeys((*PHASES, REST), 0.0)
    for span in spans:
        seconds[span.phase] += 1e-6 * (span.end - span.begin)
    return Phases(**seconds, host=wall_s - sum(seconds.values()), rounds=rounds)


def phases_of_operations(program: str, drafting: bool = True) -> tuple[dict[str, str], set[str]]:
    """Returns (the phase of each operation of a compiled program, which are control flow).

    What lies in a loop or branch of a phase is of that phase. An operation that a pass of the
    compiler made has no trace: it is of the phase of what it reads, else of what reads it.

    Args:
      program: its text. Operations of no phase are left out.
      drafting: whether there is a drafter. Without one the scope of the draft has only the layout
        of what is scored, and counts there.
    """
    bodies, _ = hlo.computations(program)
    found: dict[str, str] = {}
    control: set[str] = set()
    owners: dict[str, str] = {}  # the phases of computations
    for name, lines in reversed(bodies.items()):  # callers stand below what they call
        operations = [(m, line) for line in lines if (m := OPCODE.match(line))]
        control |= {m[1] for m, _ in operations if m[2] in OF_CONTROL}
        if name in owners:
            found |= {m[1]: owners[name] for m, _ in operations}
        else:
            found |= _phases_of_body(operations)
        for match, line in operations:
            called = NAMES.findall(line[match.end() :].partition("), ")[2])
            if match[1] in found:
                owners |= {other: found[match[1]] for other in called if other in bodies}
    if not drafting:
        found = {name: "score" if phase == "draft" else phase for name, phase in found.items()}
    return found, control


def _phases_of_body(operations: list[tuple[Any, str]]) -> dict[str, str]:
    """Returns the phases of one computation's operations, (match of `OPCODE`, line), in order."""
    found: dict[str, str] = {}
    operands: dict[str, list[str]] = {}
    untraced: list[str] = []
    tuples: set[str] = set()
    for match, line in operations:
        name = match[1]
        operands[name] = NAMES.findall(line[match.end() :].partition("), ")[0])
        if match[2] == "tuple":
            tuples.add(name)
        scope = SCOPE.search(line)
        if scope is None:
            untraced.append(name)
            continue
        phase = next((SCOPES[part] for part in scope[1].split("/") if part in SCOPES), None)
        if phase:
            found[name] = phase
    for name in untraced:
        known = [found[x] for x in operands[name] if x in found]
        if known and name not in tuples:  # these read everything
            found[name] = known[0]
    made = set(untraced)
    for name in reversed(operands):
        for read in operands[name]:
            if read in made and name in found:
                found.setdefault(read, found[name])
    return found


def timeline(
    events: Sequence[Event], of_operation: dict[str, str], control: Collection[str]
) -> list[Span]:
    """Returns what ran when, in order and without overlaps; gaps: nothing ran.

    Of events that overlap, on several threads or one within the other, the newest counts, and one
    with a phase before one without. Control flow counts only if nothing ran within it, for then it
    was compiled to an operation of its own.
    """
    work = [e for e in events if e.name not in control]
    begins = sorted(e.begin for e in work)
    for e in events:
        if e.name in control:
            at = bisect.bisect_left(begins, e.begin)
            if at == len(begins) or begins[at] >= e.end:
                work.append(e)
    work.sort(key=lambda e: e.begin)
    waiting = iter(work)
    following = next(waiting, None)
    running: list[tuple[bool, float, float, str]] = []  # the one that counts comes first
    spans: list[Span] = []
    for begin, end in itertools.pairwise(sorted({x for e in work for x in (e.begin, e.end)})):
        while following is not None and following.begin <= begin:
            phase = of_operation.get(following.name, REST)
            heapq.heappush(running, (phase == REST, -following.begin, following.end, phase))
            following = next(waiting, None)
        while running and running[0][2] <= begin:
            heapq.heappop(running)
        if running:
            spans.append(Span(begin, end, running[0][3]))
    return spans


def slices(spans: Sequence[Span]) -> list[Span]:
    """Returns the phases as a reader sees them: one span until another phase begins."""
    of_phases = (span for span in spans if span.phase != REST)
    grouped = (list(group) for _, group in itertools.groupby(of_phases, lambda s: s.phase))
    return [Span(group[0].begin, group[-1].end, group[0].phase) for group in grouped]


def with_track(trace: dict[str, Any], phases: Sequence[Span]) -> dict[str, Any]:
    """Returns the trace with the phases on a track of their own, above all others."""
    events = trace["traceEvents"]
    pid = 1 + max((e["pid"] for e in events if "pid" in e), default=0)
    names = {"process_name": "magicjax", "thread_name": "phases of a round"}
    track = [
        {"ph": "M", "pid": pid, "tid": 1, "name": key, "args": {"name": name}}
        for key, name in names.items()
    ]
    first = {"args": {"sort_index": -1}, "name": "process_sort_index"}
    track.append({"ph": "M", "pid": pid, "tid": 1} | first)
    track += [
        {"ph": "X", "pid": pid, "tid": 1, "name": s.phase, "ts": s.begin, "dur": s.end - s.begin}
        for s in phases
    ]
    return trace | {"traceEvents": track + events}


def write(path: pathlib.Path, trace: dict[str, Any]) -> None:
    """Writes a trace, packed: to a temporary name in the same folder, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with gzip.open(partial, "wt", encoding="utf-8") as file:
            json.dump(trace, file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
