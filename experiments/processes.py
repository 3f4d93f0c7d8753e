"""Multi-process runs: discovery of this process's rank, start of JAX's runtime, loss of a process.

After `join`, `jax.devices()` lists the devices of all processes, and every process must run the
same programs on their mesh.

JAX's coordination service cannot report failures in Python. In JAX 0.12 a missing or duplicate rank
ends `jax.distributed.initialize` with SIGABRT, and the log does not name the rank. A lost process
aborts all others after the heartbeat timeout, a lost rank 0 immediately, also with
`jax_enable_recoverability`; an exception in one process leaves the others in a collective. So the
ranks first meet over TCP connections to rank 0 and compare their settings. The connections stay
open, and a connection that closes reports the loss of its process.
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
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

JOIN_SECONDS = 120  # timeout of `join`
LOST = 4  # exit status after the loss of another process
_HEARTBEAT_S = 30
_RETRY_S = 0.2
_NOTICE_S = 1.0  # within which the loss of another process is detected
_GRACE_S = 10.0  # for a process to raise the error that another process has reported
_FIRST_PORT = 61440  # default ports: 4,096 from here
# Words in the runtime's errors when another process does not answer.
_PEER_ERRORS = ("Gloo", "NCCL", "Connection", "UNAVAILABLE", "DEADLINE_EXCEEDED")
_MESSAGE_BYTES = 1 << 24  # longest message


@dataclasses.dataclass(frozen=True)
class Processes:
    """The position of this process in a multi-process run.

    Attributes:
      coordinator: HOST:PORT at which rank 0 listens.
      count: the number of processes.
      rank: of this process, 0 to count - 1.

    Raises:
      ValueError: a count below 2, a rank out of range, or a malformed address.
    """

    coordinator: str
    count: int
    rank: int

    def __post_init__(self):
        if self.count < 2:
            raise ValueError(f"processes={self.count} is too small: give 2 or more, or omit it")
        if not 0 <= self.rank < self.count:
            raise ValueError(
                f"rank={self.rank} is out of range: {self.count} processes have the ranks 0 to "
                f"{self.count - 1}"
            )
        if not re.fullmatch(r".+:\d+", self.coordinator) or not 0 < self.address[1] <= 65535:
            raise ValueError(
                f"coordinator={self.coordinator!r} is not an address: give HOST:PORT of rank 0"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def detect(
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Processes | None:
    """Returns the position of this process in a multi-process run, or None if it runs alone.

    Omitted arguments are read from the variables of Open MPI (mpirun), SLURM (srun) or a Kubernetes
    Job with completion mode Indexed. Open MPI sets a coordinator only on a single host, Kubernetes
    sets only the rank. count=1 without the other arguments ignores these variables.

    Raises:
      ValueError: only some of the three values are known, or `Processes` rejects them.
    """
    if count == 1 and coordinator is None and rank in (None, 0):
        return None
    arguments = {"coordinator": coordinator, "processes": count, "rank": rank}
    chosen = {name: value for name, value in arguments.items() if value is not None}
    values = _cluster(environment) | chosen
    if not chosen and "processes" not in values:
        return None
    if missing := [name for name in arguments if name not in values]:
        known = ", ".join(f"{name}={value}" for name, value in values.items())
        raise ValueError(
            f"{' and '.join(missing)} missing ({known}): give coordinator, processes and rank, or "
            "start the processes with srun, mpirun or an Indexed Kubernetes Job"
        )
    return Processes(values["coordinator"], int(values["processes"]), int(values["rank"]))


def _cluster(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns those of coordinator, processes and rank that the cluster's variables define."""

    def number(name: str) -> int | None:
        return int(environment[name]) if environment.get(name, "").isdigit() else None

    def port(seed: int) -> int:
        return _FIRST_PORT + seed % 4096

    # mpirun may run inside a SLURM job, whose variables then do not describe mpirun's ranks.
    if (count := number("OMPI_COMM_WORLD_SIZE")) is not None:
        values: dict[str, Any] = {"processes": count, "rank": number("OMPI_COMM_WORLD_RANK")}
        if number("OMPI_COMM_WORLD_LOCAL_SIZE") == count:
            job = environment.get("OMPI_MCA_ess_base_jobid") or environment.get("PMIX_NAMESPACE")
            values["coordinator"] = f"127.0.0.1:{port(sum(map(ord, job or '')))}"
        known = {name: value for name, value in values.items() if value is not None}
        return known if count > 1 else {}
    # A batch script that srun did not start has no node list of a step.
    node = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", environment.get("SLURM_STEP_NODELIST", ""))
    count = number("SLURM_STEP_NUM_TASKS") or number("SLURM_NTASKS")
    rank = number("SLURM_PROCID")
    if node and rank is not None and count not in (None, 1):
        step = 61 * (number("SLURM_JOB_ID") or 0) + (number("SLURM_STEP_ID") or 0)
        address = f"{node[1]}{node[2] or ''}:{port(step)}"
        return {"coordinator": address, "processes": count, "rank": rank}
    rank = number("JOB_COMPLETION_INDEX")
    return {} if rank is None else {"rank": rank}


class _Peer:
    """A connection to another process that carries one JSON value per line."""

    def __init__(self, connection: socket.socket):
        self.connection, self._lines = connection, connection.makefile("rb")

    def send(self, value: Any) -> None:
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """Returns the next value; raises OSError or ValueError if the connection ends first."""
        line = self._lines.readline(_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection is closed")
        return json.loads(line)

    def keep_alive(self) -> None:
        """Lets the connection end within half a minute of the other host."""
        self.connection.settimeout(None)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_peers: dict[int, _Peer] = {}  # in rank 0: all other ranks; elsewhere: rank 0
_leaving = threading.Event()  # this process has finished, or has reported a loss
_failing = threading.Event()  # this process ends with its own error
_error_seen = threading.Event()  # this process has met an error, its own or due to another process


def join(who: Processes, run: Mapping[str, Any], seconds: float = JOIN_SECONDS) -> None:
    """Waits for all processes, checks that they agree, and starts JAX's distributed runtime.

    If another process is lost later, this one prints which and exits with status `LOST`.

    Args:
      who: this process.
      run: JSON values that must be equal in all processes.
      seconds: the timeout.

    Raises:
      ValueError: in every process that has arrived: ranks are missing or duplicate, rank 0 does
        not answer, or `run` differs.
    """
    agreed = json.loads(json.dumps(dict(run) | {"jax": jax.__version__, "processes": who.count}))
    service = (_gather if who.rank == 0 else _report)(who, agreed, seconds)
    for rank in _peers:
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
    multihost_utils.sync_global_devices("joined")  # opens all connections while all processes live


def _gather(who: Processes, run: dict, seconds: float) -> str:
    """Waits in rank 0 for all other ranks; returns the address of JAX's coordination service."""
    deadline = time.monotonic() + seconds
    runs: dict[int, Any] = {}
    arrived: list[tuple[int, _Peer]] = []
    problem = ""
    with _listen(who) as listener:
        while len(runs) < who.count - 1 and not problem:
            if (hello := _accept(listener, deadline)) is None:
                missing = ", ".join(str(r) for r in range(1, who.count) if r not in runs)
                problem = (
                    f"rank {missing} of {who.count} did not connect to {who.coordinator} within "
                    f"{seconds:g} s: start every rank with the same coordinator"
                )
                break
            rank, its_run, peer = hello
            arrived.append((rank, peer))
            if rank in runs:
                problem = f"two processes have rank {rank}: give every process its own rank"
            elif not 0 < rank < who.count:
                problem = (
                    f"rank {rank} connected to {who.coordinator}, where rank 0 expects "
                    f"{who.count} processes: give all ranks the same number of processes"
                )
            runs[rank] = its_run
    for rank in sorted(runs):
        problem = problem or _difference(rank, runs[rank], run)
    with socket.create_server(("", 0)) as free:
        service = f"{who.coordinator.rpartition(':')[0]}:{free.getsockname()[1]}"
    for _, peer in arrived:
        with contextlib.suppress(OSError):
            peer.send({"problem": problem, "service": service})
            peer.keep_alive()
    if problem:
        raise ValueError(problem)
    _peers.update(arrived)
    return service


def _listen(who: Processes) -> socket.socket:
    """Returns the socket at which rank 0 accepts the other ranks."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", who.address[1]), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ValueError(
            f"coordinator={who.coordinator}: rank 0 cannot listen at this port ({error}): stop the "
            "other rank 0, or give another port"
        ) from error


def _accept(listener: socket.socket, deadline: float) -> tuple[int, Any, _Peer] | None:
    """Returns rank, run and connection of the next process, None at the deadline.

    Connections of other programs are ignored.
    """
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            peer = _Peer(listener.accept()[0])
            peer.connection.settimeout(10)
            hello = peer.receive()
            return int(hello["rank"]), hello["run"], peer
    return None


def _report(who: Processes, run: dict, seconds: float) -> str:
    """Connects to rank 0; returns the address of JAX's coordination service."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            peer = _Peer(socket.create_connection(who.address, timeout=10))
            break
        except OSError as error:  # rank 0 may start later
            if time.monotonic() > deadline:
                raise ValueError(
                    f"rank 0 does not answer at {who.coordinator} within {seconds:g} s ({error}): "
                    "start rank 0 on that host, and check that this host can reach it"
                ) from error
            time.sleep(_RETRY_S)
    try:
        peer.send({"rank": who.rank, "run": run})
        peer.connection.settimeout(max(deadline - time.monotonic(), 0) + 10)
        reply = peer.receive()
        problem, service = reply["problem"], reply["service"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{who.coordinator} does not answer like rank 0 ({error!r}): see the output of rank 0, "
            "or give a port that no other program uses"
        ) from error
    if problem:
        raise ValueError(problem)
    peer.keep_alive()
    _peers[0] = peer
    return service


def _difference(rank: int, its_run: Any, run: Any) -> str:
    """Returns where the run of a rank differs from that of rank 0, or an empty string."""
    differences = []

    def compare(path: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for name in dict.fromkeys((*a, *b)):
                compare(f"{path}.{name}" if path else name, a.get(name), b.get(name))
        elif a != b:
            differences.append(f"{path} is {a!r} there and {b!r} in rank 0")

    compare("", its_run, run)
    if not differences:
        return ""
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return f"rank {rank} has different settings: {'; '.join(differences[:3])}{more}"


def _watch(who: Processes, rank: int) -> None:
    """Exits when another process fails or is lost; rank 0 tells the others, which watch rank 0."""
    try:
        message = _peers[rank].receive()
    except (OSError, ValueError):
        message = {"event": "lost", "rank": None}
    event, culprit = message["event"], rank if message["rank"] is None else message["rank"]
    if event == "left" or _leaving.is_set():
        return
    if event == "failed":
        _error_seen.wait(_GRACE_S)  # this process may be about to raise the same error
    if _failing.is_set():  # this process reports its own error and exits
        return
    if who.rank == 0:
        _leaving.set()  # connections that close from now on are not reported
        _send("lost", culprit)
    how = "ended with an error" if event == "failed" else "was lost"
    print(
        f"rank {who.rank} of {who.count}: rank {culprit} {how}, so this process exits too. "
        f"Finished results are kept: see the output of rank {culprit}, and rerun all processes",
        file=sys.__stderr__,
        flush=True,
    )
    _exit(LOST)


def _send(event: str, culprit: int | None = None) -> None:
    """Sends an event about `culprit`, by default this process, to all peers but the culprit."""
    for rank, peer in _peers.items():
        if rank != culprit:
            with contextlib.suppress(OSError):
                peer.send({"event": event, "rank": culprit})


def _exit(status: int) -> NoReturn:
    """Exits without JAX's shutdown barrier, which would wait for lost processes and then abort.

    Rank 0 exits last: the end of JAX's service, which it runs, aborts the others.
    """
    deadline = time.monotonic() + _GRACE_S + 2 * _NOTICE_S
    for rank, peer in _peers.items():
        with contextlib.suppress(OSError):
            while rank > 0:  # until the other process closes the connection
                peer.connection.settimeout(max(deadline - time.monotonic(), 0.01))
                if not peer.connection.recv(1 << 16):
                    break
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def leaving(refusals: tuple[type[BaseException], ...] = (ValueError, OSError)):
    """Calls `leave` at the end, or `abandon` after an error.

    The exit status after an error is 1, 2 for one of `refusals`, and 130 after Ctrl-C.
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


def leave() -> None:
    """Reports that this process has finished, so that the others do not report its loss."""
    _leaving.set()
    _send("left")


def abandon(status: int) -> None:
    """Reports an error to the other processes; this one exits with `status` when Python ends.

    The others exit within seconds, with their own error if they raise one.
    """
    _failing.set()
    _error_seen.set()
    _send("failed")
    atexit.register(_exit, status)


def await_loss(error: BaseException) -> None:
    """Gives `_watch` time to exit if `error` may be due to the loss of another process.

    Any other error counts as this process's own, which it reports itself.
    """
    if not _peers:
        return
    if not any(word in str(error) for word in _PEER_ERRORS):
        _failing.set()
    _error_seen.set()
    time.sleep(_NOTICE_S)
