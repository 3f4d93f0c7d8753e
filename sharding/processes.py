"""Many processes, on one host or several: how they find each other, and notice that one is lost.

JAX's own multi-host runtime is the engine: after `join`, `jax.devices()` are those of all
processes, and a program for their mesh runs on all of them, if all of them call it. JAX ends a
process with a stack trace where another does not come, comes twice, or is lost. So the ranks meet
before it starts, over sockets that then stay open: who waits for whom, what differs, and who was
lost is said in a sentence.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SECONDS = 120  # for which the ranks wait for each other
LOST = 4  # the exit status where another process was lost
_HEARTBEAT_S = 30
_POLL_S = 0.2
_NOTICE_S = 1.0  # in which the loss of another process is seen
_GRACE_S = 10.0  # for a process to come upon the error that another one has told
_BYE, _ENDED, _LOST = "bye", "ended", "lost"  # what processes tell each other
_PORTS = 61440  # the first of 4,096 that are taken where nobody gives one
# What the runtime's errors say where another process does not answer.
_OF_OTHERS = ("Gloo", "NCCL", "Connection", "UNAVAILABLE", "DEADLINE_EXCEEDED")
_LONGEST = 1 << 24  # bytes of a message


@dataclasses.dataclass(frozen=True)
class Processes:
    """Who this process is among others.

    Attributes:
      coordinator: HOST:PORT, where rank 0 listens.
      count: of all processes.
      rank: this one's, 0 to count - 1.

    Raises:
      ValueError: no such rank, a count below 2, or no such address.
    """

    coordinator: str
    count: int
    rank: int

    def __post_init__(self):
        if self.count < 2:
            raise ValueError(f"processes={self.count}: give 2 or more, or leave it out for one")
        if not 0 <= self.rank < self.count:
            raise ValueError(
                f"rank={self.rank} of {self.count} processes: ranks go from 0 to {self.count - 1}"
            )
        if not re.fullmatch(r".+:\d+", self.coordinator) or not 0 < self._port <= 65535:
            raise ValueError(
                f"coordinator={self.coordinator!r} is no address: write HOST:PORT, of rank 0"
            )

    @property
    def _port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the coordinator."""
        return self.coordinator.rpartition(":")[0].strip("[]"), self._port


def find(
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Processes | None:
    """Returns this process among others; None: it is the only one.

    What is not given is what Open MPI (mpirun), SLURM (srun) or a Kubernetes Job of completion
    mode Indexed say. Open MPI says where rank 0 is on a single host only, Kubernetes says nothing
    but the rank. A count of 1 alone: the only one, whatever they say.

    Raises:
      ValueError: some of the three are known and others are not, or they are none.
    """
    if count == 1 and coordinator is None and rank in (None, 0):
        return None
    found, nothing_given = _of_environment(environment), (coordinator, count, rank) == (None,) * 3
    coordinator = coordinator or found.get("coordinator")
    count = found.get("count") if count is None else count
    rank = found.get("rank") if rank is None else rank
    if nothing_given and count is None:
        return None
    known = {"coordinator": coordinator, "processes": count, "rank": rank}
    missing = [name for name, value in known.items() if value is None]
    if missing:
        given = ", ".join(f"{name}={value}" for name, value in known.items() if value is not None)
        raise ValueError(
            f"{given}, and {' and '.join(missing)} not given, nor told by SLURM, Open MPI or "
            "Kubernetes: processes find each other by all of coordinator, processes and rank"
        )
    assert coordinator is not None and count is not None and rank is not None
    return Processes(coordinator, int(count), int(rank))


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a cluster says of this process."""

    def number(name: str) -> int | None:
        return int(environment[name]) if environment.get(name, "").isdigit() else None

    # mpirun may itself run under SLURM, whose variables then say nothing of its ranks.
    count = number("OMPI_COMM_WORLD_SIZE")
    if count is not None:
        if count == 1:
            return {}
        found: dict[str, Any] = {"count": count, "rank": number("OMPI_COMM_WORLD_RANK")}
        if number("OMPI_COMM_WORLD_LOCAL_SIZE") == count:
            job = environment.get("OMPI_MCA_ess_base_jobid") or environment.get("PMIX_NAMESPACE")
            found["coordinator"] = f"127.0.0.1:{_PORTS + sum(map(ord, job or '')) % 4096}"
        return found
    # The nodes of a step: a batch script itself, which srun has not started, has none.
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    count = number("SLURM_STEP_NUM_TASKS") or number("SLURM_NTASKS")
    if first and number("SLURM_PROCID") is not None and count not in (None, 1):
        step = 61 * (number("SLURM_JOB_ID") or 0) + (number("SLURM_STEP_ID") or 0)
        where = f"{first[1]}{first[2] or ''}:{_PORTS + step % 4096}"
        return {"coordinator": where, "count": count, "rank": number("SLURM_PROCID")}
    if (rank := number("JOB_COMPLETION_INDEX")) is not None:
        return {"rank": rank}
    return {}


@dataclasses.dataclass
class _Line:
    """A connection over which lines of JSON go."""

    connection: socket.socket
    rest: bytes = b""

    def send(self, value: Any) -> None:
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """Returns the next line. Raises OSError if the connection ends or is silent."""
        while b"\n" not in self.rest:
            more = self.connection.recv(1 << 16)
            if not more or len(self.rest) > _LONGEST:
                raise ConnectionError("the connection has ended")
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)


_lines: dict[int, _Line] = {}  # to rank 0, or of rank 0 to all others
_leaving = threading.Event()  # what becomes of the others is no matter any more
_failing = threading.Event()  # this process ends with an error of its own
_erring = threading.Event()  # this process has met an error, its own or another's


def join(who: Processes, run: Mapping[str, Any], seconds: float = SECONDS) -> None:
    """Returns when all processes are there, agree, and JAX knows all of their devices.

    From then on a process whose companion is lost ends with a sentence and status `LOST`.

    Args:
      who: this process.
      run: what all of them must agree on, as JSON has it.
      seconds: for which they wait for each other.

    Raises:
      ValueError: ranks are missing or twice, nobody answers at the coordinator's address, or
        what is to be run differs, and where. It is raised in every process that is there.
    """
    agreed = json.loads(json.dumps(dict(run) | {"jax": jax.__version__, "processes": who.count}))
    meet = _await_others if who.rank == 0 else _report
    service = meet(who, agreed, time.monotonic() + seconds, seconds)
    for rank in _lines:
        threading.Thread(target=_watch, args=(who, rank), daemon=True).start()
    jax.distributed.initialize(
        service,
        who.count,
        who.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=int(seconds),
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        shutdown_timeout_seconds=_HEARTBEAT_S,
    )
    multihost_utils.sync_global_devices("joined")  # connects all of them, while all are here


def leave() -> None:
    """Says goodbye: what the others see of this process's end is then no loss."""
    _leaving.set()
    _tell({"said": _BYE})


def abandon(status: int) -> None:
    """Tells the others of an error, which they may have too, or else wait where nobody comes.

    They end within seconds, and this process does with `status` when it exits, without JAX, which
    would wait for them and end with a stack trace.
    """
    _failing.set()
    _erring.set()
    _tell({"said": _ENDED})
    atexit.register(_end, status)


def _tell(message: dict[str, Any], but: int | None = None) -> None:
    for rank, line in _lines.items():
        if rank != but:
            with contextlib.suppress(OSError):
                line.send(message)


def _end(status: int) -> None:
    """Ends this process; rank 0, whose end JAX would end the others for, after they have."""
    until = time.monotonic() + _GRACE_S + 2 * _NOTICE_S
    for rank, line in _lines.items():
        with contextlib.suppress(OSError):
            while rank > 0:  # it is rank 0 that has lines to the others
                line.connection.settimeout(max(until - time.monotonic(), 0.01))
                if not line.connection.recv(1 << 16):
                    break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def leaving(refusals: tuple[type[BaseException], ...] = (ValueError, OSError)):
    """Leaves the others in the end; after an error it tells them (`abandon`).

    The process's exit status is then 1, 2 after one of `refusals`, or 130 after Ctrl-C.
    """
    try:
        yield
    except BaseException as error:
        await_loss(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        abandon(130 if interrupted else 2 if isinstance(error, refusals) else 1)
        raise
    if not _failing.is_set():
        leave()


def _await_others(who: Processes, run: dict, until: float, seconds: float) -> str:
    """Returns the address of JAX's service, when all ranks have come to this one, rank 0."""
    came: dict[int, tuple[_Line, dict]] = {}
    problem = None
    with _listening(who) as listening:
        while len(came) < who.count - 1 and not problem:
            listening.settimeout(max(until - time.monotonic(), 0.01))
            try:
                line = _Line(listening.accept()[0])
            except TimeoutError:
                missing = [str(r) for r in range(1, who.count) if r not in came]
                problem = (
                    f"rank {', '.join(missing)} of {who.count} did not come to {who.coordinator} "
                    f"within {seconds:g} s: start every rank with the same coordinator"
                )
                break
            try:
                line.connection.settimeout(10)
                said = line.receive()
                rank, _ = int(said["rank"]), said["run"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # somebody else's
            if rank in came or not 0 < rank < who.count:
                problem = (
                    f"rank {rank} came to {who.coordinator}, and this is rank 0 of {who.count}: "
                    "give every process a rank of its own, and the same number of processes"
                )
                if rank in came:
                    problem = f"two of the processes are rank {rank}: {problem}"
                came[-1] = line, said  # so that it is told too
            else:
                came[rank] = line, said
    for rank, (_, said) in sorted(came.items()):
        problem = problem or _difference(rank, said["run"], run)
    service = f"{who.coordinator.rpartition(':')[0]}:{_free_port()}"
    for rank, (line, _) in came.items():
        with contextlib.suppress(OSError):
            line.send({"problem": problem, "service": service})
            _keep(line.connection)
        _lines[rank] = line
    if problem:
        _lines.clear()
        raise ValueError(problem)
    return service


@contextlib.contextmanager
def _listening(who: Processes):
    """Yields the socket at which rank 0 awaits the others."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        listening = socket.create_server(
            ("", who.address[1]), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise ValueError(
            f"coordinator={who.coordinator}: rank 0 cannot listen there ({error}): is another "
            "rank 0 running? give another port"
        ) from error
    with listening:
        yield listening


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


def _report(who: Processes, run: dict, until: float, seconds: float) -> str:
    """Returns the address of JAX's service, when rank 0 has given it."""
    problem: Exception | str = ""
    while time.monotonic() < until:
        try:
            line = _Line(socket.create_connection(who.address, timeout=10))
        except OSError as error:  # rank 0 is not there yet
            problem = error
            time.sleep(_POLL_S)
            continue
        try:
            line.send({"rank": who.rank, "host": socket.gethostname(), "run": run})
            line.connection.settimeout(max(until - time.monotonic(), 0.01) + 10)
            said = line.receive()
            problem, service = said["problem"], said["service"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{who.coordinator} does not answer as rank 0 does ({error!r}): see what it says, "
                "or whether another program has that port"
            ) from error
        if problem:
            raise ValueError(problem)
        _keep(line.connection)
        _lines[0] = line
        return service
    raise ValueError(
        f"nobody answers at {who.coordinator} within {seconds:g} s ({problem}): start rank 0 "
        "there, and see that this host can reach it"
    )


def _keep(connection: socket.socket) -> None:
    """Makes the connection end within half a minute of its other end's host."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _difference(rank: int, its: Any, ours: Any) -> str | None:
    """Returns where what a rank is to run differs from what rank 0 is to, or None."""
    found = []

    def compare(path: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for name in dict.fromkeys((*a, *b)):
                compare(f"{path}.{name}" if path else name, a.get(name), b.get(name))
        elif a != b:
            found.append(f"{path} is {a!r} there and {b!r} in rank 0")

    compare("", its, ours)
    if not found:
        return None
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return f"rank {rank} is to run something else: {'; '.join(found[:3])}{more}"


def _watch(who: Processes, rank: int) -> None:
    """Ends this process when another one is lost; rank 0 sees all, and all others see it."""
    try:
        told = _lines[rank].receive()
        said, lost = told["said"], told.get("rank", rank)
    except (OSError, ValueError):
        said, lost = _LOST, rank
    if said == _BYE or _leaving.is_set():
        return
    if said == _ENDED:
        _erring.wait(_GRACE_S)  # this process may be about to say the same
    if _failing.is_set():  # it says what it has to say, and ends by itself
        return
    if who.rank == 0:
        _tell({"said": _LOST, "rank": lost}, but=rank)
    how = "ended with an error" if said == _ENDED else "was lost"
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    print(
        f"rank {who.rank} of {who.count}: rank {lost} {how}, so this process ends too; "
        f"what is finished is kept: see what rank {lost} said, and start all of them again",
        file=sys.__stderr__,
        flush=True,
    )
    os._exit(LOST)


def await_loss(error: BaseException) -> None:
    """Waits a little, where an error may be due to a process that was lost: then this one ends.

    Args:
      error: that was met, and of which this process will end, unless it is one of those with which
        the runtime says that another does not answer.
    """
    if not _lines:
        return
    if not _of_others(error):
        _failing.set()
    _erring.set()
    time.sleep(_NOTICE_S)


def _of_others(error: BaseException) -> bool:
    """Returns whether an error may say that another process does not answer."""
    text = str(error)
    return any(word in text for word in _OF_OTHERS)


def fetch(tree: Any) -> Any:
    """Returns arrays as numpy's, also those that lie on other processes' devices.

    All processes must call it.
    """

    def whole(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(whole, tree)


def put(x: Any, sharding: jax.sharding.Sharding) -> Any:
    """Returns an array where it should lie; each process puts its own part.

    All processes must call it, and have the same array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # it lies on all processes
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data, impl = np.asarray(jax.random.key_data(x)), jax.random.key_impl(x)
        return jax.random.wrap_key_data(put(data, sharding), impl=impl)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def of_first(value: Any) -> Any:
    """Returns rank 0's value, which JSON must be able to write; all processes must call it."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    padded = np.zeros(size, np.uint8)
    padded[: min(size, text.size)] = text[:size]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)))
