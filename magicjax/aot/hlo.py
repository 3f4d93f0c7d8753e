"""What is read out of a compiled program's text: copies, and what devices tell each other."""

import collections
import dataclasses
import re
from collections.abc import Iterator

import numpy as np

# A computation's first line: its name, its parameters, an arrow; ENTRY comes before the main one.
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)
ZEROS = r"%(?:loop_|wrapped_)?broadcast(?:_fusion)?[.\d]*[),]"
COPIED = re.compile(rf"= \(?\w+\[([\d,]+)\][^=\n]* copy(?:-start)?\((?!{ZEROS})")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)[a-z\d]*\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
EITHER = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# Who takes part: {{0,1},{2,3}} listed, [2,2]<=[4] and [2,2]<=[2,2]T(1,0) counted, or by axes,
# mesh['a'=2,'b'=2] {'b'}.
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
INNER = re.compile(r"\{([\d, ]+)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
SIZE, NAME = re.compile(r"'(\w+)'=(\d+)"), re.compile(r"'(\w+)'")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """What devices exchange in one way, in a step.

    Attributes:
      kind: as XLA calls it.
      count: how often.
      bytes: what a device has of it afterwards, of all of them together.
      between: whether it goes between groups of devices, such as stages or hosts.
    """

    kind: str
    count: int
    bytes: int
    between: bool = False


def copied_sizes(text: str) -> Iterator[int]:
    """Yields the sizes of arrays that are copied; zeros that fill a new one are no copy."""
    for match in COPIED.finditer(text):
        yield int(np.prod([int(n) for n in match[1].split(",")]))


def collectives(text: str, group: int | None = None) -> list[Collective]:
    """Returns what devices exchange when the program runs, by kind.

    A loop of unknown length counts once: of `decode`, that is one step. One of known length counts
    as often as it runs, such as that over the levels of a draft.

    Args:
      text: of the program.
      group: what goes between the first so many devices, the next, and so on, is told apart.
    """
    bodies, entry = computations(text)

    def within(name: str) -> collections.Counter:  # (kind, between, what) -> count or bytes
        found: collections.Counter = collections.Counter()
        for line in bodies[name]:
            match = COLLECTIVE.search(line)
            if match:
                kind = match[1], group is not None and _goes_between(line, group)
                found[*kind, "count"] += 1
                found[*kind, "bytes"] += _result_bytes(line[: match.start()], match[0])
                continue
            trips = TRIPS.search(line)
            times = int(trips[1]) if trips else 1
            called = [within(name) for name in _called(line) if name in bodies]
            branches = [within(name) for name in _branches(line) if name in bodies]
            # One branch is taken: count that which exchanges most.
            called += sorted(branches, key=lambda c: sum(c.values()))[-1:]
            for one in called:
                found.update({key: times * n for key, n in one.items()})
        return found

    found = within(entry)
    kinds = sorted({(kind, between) for kind, between, _ in found})
    return [
        Collective(kind, found[kind, between, "count"], found[kind, between, "bytes"], between)
        for kind, between in kinds
    ]


def _goes_between(line: str, group: int) -> bool:
    """Returns whether devices of different groups take part in one exchange of a collective."""
    if mesh := MESH.search(line):
        sizes = {name: int(size) for name, size in SIZE.findall(mesh[1])}
        within = [list(sizes).index(name) for name in NAME.findall(mesh[2])]
        others = [axis for axis in range(len(sizes)) if axis not in within]
        devices = np.arange(np.prod([*sizes.values()])).reshape([*sizes.values()])
        count = np.prod([devices.shape[axis] for axis in within], dtype=int)
        sets = devices.transpose(others + within).reshape(-1, count).tolist()
    elif iota := IOTA.search(line):
        shape, axes = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
        order = [int(n) for n in iota[3].split(",")] if iota[3] else range(len(axes))
        sets = np.arange(np.prod(axes)).reshape(axes).transpose(order).reshape(shape).tolist()
    elif listed := LISTED.search(line):
        sets = [[int(n) for n in one.split(",")] for one in INNER.findall(listed[1])]
    else:
        return True  # of all devices, of which there are several groups
    return any(len({device // group for device in one}) > 1 for one in sets)


def largest_collective(text: str) -> int:
    """Returns the most elements that any exchange gives a device; 0 if there is none."""
    sizes = [0]
    for line in text.splitlines():
        found = COLLECTIVE.search(line)
        if found:
            sizes += [_elements(dims) for _, dims in ARRAY.findall(line[: found.start()])]
    return max(sizes)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns (the lines of each computation, the name of the main one)."""
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


def _called(line: str) -> list[str]:
    """Returns the computations that the line runs; what a reduction applies is arithmetic."""
    return [] if " reduce(" in line else CALLED.findall(line)


def _branches(line: str) -> list[str]:
    """Returns the computations of which the line runs one."""
    listed = [name for names in BRANCHES.findall(line) for name in names.split(",")]
    return [name.strip().lstrip("%") for name in listed] + EITHER.findall(line)


def _result_bytes(line: str, operation: str) -> int:
    """Returns the bytes of the arrays left of the operation; a started one names operands too."""
    arrays = ARRAY.findall(line.split("=", 1)[1])
    if "-start(" in operation and "all-reduce" not in operation:
        arrays = [array for array in arrays if array[1]]  # contexts are scalars
        arrays = arrays[len(arrays) // 2 :]
    return sum(_item_bytes(dtype) * _elements(dims) for dtype, dims in arrays)


def _item_bytes(dtype: str) -> int:
    return 1 if dtype == "pred" else max(1, int(re.sub(r"\D", "", dtype)) // 8)


def _elements(dims: str) -> int:
    return int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64))
