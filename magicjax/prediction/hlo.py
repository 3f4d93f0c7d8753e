"""Reads the text of compiled programs (HLO): operations, copies and collectives."""

import collections
import dataclasses
import re
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

import numpy as np

CONTROL_FLOW = ("while", "conditional", "call", "async-start", "async-done")
FLOATS = ("bf16", "f16", "f32", "f64")
QUANTIZED = ("s4", "u4", "s8", "u8", "f8")  # dtypes of quantized matrices, f8 of several kinds

# The first line of a computation; ENTRY marks the main one.
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
OPERATION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(")
SCOPE = re.compile(r'op_name="([^"]*)"')
REFERENCE = re.compile(r"%([\w.\-]+)")
FUSED = re.compile(r"calls=%([\w.\-]+)")
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)
ZEROS = r"%(?:loop_|wrapped_)?broadcast(?:_fusion)?[.\d]*[),]"
ON_CHIP = r"\{[^}]*S\(1\)\}"  # a layout in a TPU's VMEM, to which the compiler prefetches
COPIED = re.compile(rf"= \(?\w+\[([\d,]+)\](?!{ON_CHIP})[^=\n]* copy(?:-start)?\((?!{ZEROS})")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)[a-z\d]*\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
TRUE_FALSE = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
# The devices of a collective, as a list of groups {{0,1},{2,3}}, as an iota [2,2]<=[4] or
# [2,2]<=[2,2]T(1,0), or as axes of a mesh, mesh['a'=2,'b'=2] {'b'}.
GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
GROUP = re.compile(r"\{([\d, ]+)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
AXIS_SIZE, AXIS_NAME = re.compile(r"'(\w+)'=(\d+)"), re.compile(r"'(\w+)'")


class Operation(NamedTuple):
    """An operation of a computation.

    Attributes:
      name: in the program.
      results: (dtype, dimensions) of each array that it returns, such as ("bf16", "2,8").
      opcode: such as `dot` or `fusion`.
      operands: names of the operations that it reads.
      references: names in its attributes, such as those of the computations that it calls.
      scope: the `op_name` of its metadata, a path of named scopes; None if a compiler pass made it.
      text: its line.
    """

    name: str
    results: list[tuple[str, str]]
    opcode: str
    operands: list[str]
    references: list[str]
    scope: str | None
    text: str

    @property
    def fused(self) -> str | None:
        """The computation of a fusion."""
        match = FUSED.search(self.text)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a program or step.

    Attributes:
      kind: XLA's name.
      count: number of executions.
      bytes: size of their results on one device, summed.
      between: whether they connect different groups of devices, such as stages or hosts.
    """

    kind: str
    count: int
    bytes: int
    between: bool = False


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation by name, callees first, and the main one's name."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = HEAD.match(line)
        if head:
            lines = bodies[head[2]] = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return bodies, entry


def operations(text: str) -> dict[str, list[Operation]]:
    """Returns the operations of each computation by name, callees first."""
    bodies, _ = computations(text)
    return {
        name: [operation for line in lines if (operation := _operation(line))]
        for name, lines in bodies.items()
    }


def _operation(line: str) -> Operation | None:
    match = OPERATION.match(line)
    if match is None:
        return None
    arguments, _, attributes = line[match.end() :].partition("), ")
    names = REFERENCE.findall(arguments), REFERENCE.findall(attributes)
    results = ARRAY.findall(line[: match.start(2)].partition("=")[2])
    scope = SCOPE.search(line)
    return Operation(match[1], results, match[2], *names, scope[1] if scope else None, line)


def copied_sizes(text: str) -> Iterator[int]:
    """Yields the number of elements of each array that is copied in a device's memory.

    Zeros that fill a new array are not counted, nor what a TPU prefetches to its VMEM.
    """
    for match in COPIED.finditer(text):
        yield _elements(match[1])


def dequantized(text: str, sizes: Container[int]) -> int:
    """Returns the number of quantized arrays of these sizes that are written as floating point.

    Each is converted by an operation of its own, or in a fusion that writes an array of such a
    size. A fusion that converts it for a matrix product writes the product only.
    """
    bodies_by_name = operations(text)
    fused = {operation.fused for body in bodies_by_name.values() for operation in body}

    def converted(body: list[Operation]) -> int:
        results = {operation.name: operation.results for operation in body}
        return sum(
            operation.opcode == "convert"
            and _has_array(operation.results, FLOATS, sizes)
            and _has_array(results.get(operation.operands[0], []), QUANTIZED, sizes)
            for operation in body
        )

    def writes_converted(operation: Operation) -> bool:
        inside = bodies_by_name.get(operation.fused or "", [])
        is_product = any(each.opcode == "dot" for each in inside)
        is_floating = _has_array(operation.results, FLOATS, sizes)
        return is_floating and not is_product and converted(inside) > 0

    bodies = [body for name, body in bodies_by_name.items() if name not in fused]
    return sum(converted(body) + sum(map(writes_converted, body)) for body in bodies)


def _has_array(
    arrays: Iterable[tuple[str, str]], dtypes: Container[str], sizes: Container[int]
) -> bool:
    return any(dtype in dtypes and _elements(dims) in sizes for dtype, dims in arrays)


def collectives(text: str, group: int | None = None) -> list[Collective]:
    """Returns the collectives that the program executes, by kind.

    The body of a loop of known length, such as that over the levels of a draft, counts as often as
    it runs. The body of a loop of unknown length counts once: for `decode`, that is one step.

    Args:
      text: the program's text.
      group: devices are grouped by this many consecutive ids; collectives between groups are
        counted separately. None: one group.
    """
    bodies, entry = computations(text)

    def executed(name: str) -> collections.Counter:  # by (kind, between, "count" or "bytes")
        total: collections.Counter = collections.Counter()
        for line in bodies[name]:
            match = COLLECTIVE.search(line)
            if match:
                key = match[1], group is not None and _goes_between(line, group)
                total[*key, "count"] += 1
                total[*key, "bytes"] += _result_bytes(line[: match.start()], match[0])
                continue
            trips = TRIPS.search(line)
            times = int(trips[1]) if trips else 1
            called = [executed(name) for name in _called(line) if name in bodies]
            branches = [executed(name) for name in _branches(line) if name in bodies]
            # Of the branches, only the one with the most traffic counts.
            called += sorted(branches, key=lambda c: sum(c.values()))[-1:]
            for counter in called:
                total.update({key: times * n for key, n in counter.items()})
        return total

    total = executed(entry)
    kinds = sorted({(kind, between) for kind, between, _ in total})
    return [
        Collective(kind, total[kind, between, "count"], total[kind, between, "bytes"], between)
        for kind, between in kinds
    ]


def _goes_between(line: str, group: int) -> bool:
    """Returns whether any set of devices of a collective spans several groups."""
    if mesh := MESH.search(line):
        sizes = {name: int(size) for name, size in AXIS_SIZE.findall(mesh[1])}
        members = [list(sizes).index(name) for name in AXIS_NAME.findall(mesh[2])]
        others = [axis for axis in range(len(sizes)) if axis not in members]
        devices = np.arange(np.prod([*sizes.values()])).reshape([*sizes.values()])
        count = np.prod([devices.shape[axis] for axis in members], dtype=int)
        sets = devices.transpose(others + members).reshape(-1, count).tolist()
    elif iota := IOTA.search(line):
        shape, axes = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
        order = [int(n) for n in iota[3].split(",")] if iota[3] else range(len(axes))
        sets = np.arange(np.prod(axes)).reshape(axes).transpose(order).reshape(shape).tolist()
    elif groups := GROUPS.search(line):
        sets = [[int(n) for n in members.split(",")] for members in GROUP.findall(groups[1])]
    else:
        return True  # replica_groups={} means all devices
    return any(len({device // group for device in members}) > 1 for members in sets)


def _called(line: str) -> list[str]:
    """Returns the computations that an operation runs; the function of a reduction is not one."""
    return [] if " reduce(" in line else CALLED.findall(line)


def _branches(line: str) -> list[str]:
    """Returns the computations of which a conditional runs one."""
    listed = [name for names in BRANCHES.findall(line) for name in names.split(",")]
    return [name.strip().lstrip("%") for name in listed] + TRUE_FALSE.findall(line)


def _result_bytes(result: str, operation: str) -> int:
    """Returns the bytes of a collective's results; the type of a -start also lists its operands."""
    arrays = ARRAY.findall(result.split("=", 1)[1])
    if "-start(" in operation and "all-reduce" not in operation:
        arrays = [array for array in arrays if array[1]]  # contexts are scalars
        arrays = arrays[len(arrays) // 2 :]
    return sum(_item_bytes(dtype) * _elements(dims) for dtype, dims in arrays)


def _item_bytes(dtype: str) -> int:
    return 1 if dtype == "pred" else max(1, int(re.sub(r"\D", "", dtype)) // 8)


def _elements(dims: str) -> int:
    return int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64))
