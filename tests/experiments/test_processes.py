"""Processes detect their rank, meet, and report in one sentence what failed."""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from experiments import processes
from experiments.processes import Processes
from tests.quick import quick
from tests.two_processes import free_port

SLURM = {
    "SLURM_JOB_ID": "70000",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NODELIST": "node[003-005,017],other2",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[003-005,017],other2", "node003"),
        ("node[7,9]", "node7"),
        ("alone", "alone"),
        ("a1,b2", "a1"),
    ],
)
def test_slurm_sets_coordinator_count_and_rank(nodes, first):
    detected = processes.detect(environment=SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert detected == Processes(f"{first}:{61440 + 61 * 70000 % 4096}", 16, 5)


def test_a_job_without_srun_or_with_one_task_is_one_process():
    without = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert processes.detect(environment=without) is None
    # mpirun in a batch script sets its own ranks.
    ranks = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    for slurm in (without, SLURM):
        assert processes.detect("here:1", environment=slurm | ranks) == Processes("here:1", 4, 3)
    assert (
        processes.detect(environment=SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})
        is None
    )
    assert processes.detect(environment={}) is None
    assert processes.detect(count=1, environment={}) is None
    assert processes.detect(count=1, environment=SLURM) is None
    other = processes.detect(environment=SLURM | {"SLURM_STEP_ID": "1"})
    assert other is not None and other != processes.detect(environment=SLURM)  # another port


def test_open_mpi_sets_the_coordinator_on_a_single_host_only():
    variables = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    assert processes.detect("here:1", environment=variables) == Processes("here:1", 4, 3)
    with pytest.raises(ValueError, match=r"coordinator missing \(processes=4, rank=3\)"):
        processes.detect(environment=variables)
    detected = processes.detect(environment=variables | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert detected is not None and detected.address[0] == "127.0.0.1"
    without_rank = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    with pytest.raises(ValueError, match=r"^rank missing \(processes=4, coordinator="):
        processes.detect(environment=without_rank)
    alone = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    assert processes.detect(environment=alone) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1", 1, 0), "processes=1 is too small: give 2 or more"),
        (("a:1", 2, 2), "rank=2 is out of range: 2 processes have the ranks 0 to 1"),
        (("a:0", 2, 0), "coordinator='a:0' is not an address"),
        ((None, 1, 5), r"coordinator missing \(processes=1, rank=5\)"),
        ((None, 2, 0), r"coordinator missing \(processes=2, rank=0\)"),
    ],
)
def test_bad_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        processes.detect(*arguments, environment={})


class Rank(threading.Thread):
    """A rank that meets the others in a thread of this process, without JAX."""

    def __init__(self, who, run, seconds):
        super().__init__()
        self.meeting = who, run, seconds
        self.result = None
        self.start()

    def run(self):
        meet = processes._gather if self.meeting[0].rank == 0 else processes._report
        try:
            self.result = meet(*self.meeting)
        except ValueError as error:
            self.result = str(error)


@pytest.fixture
def meet(monkeypatch):
    """Returns a function that gives the result of each rank: the service address or the error."""

    def meet(ranks, count, runs=None, seconds=2.0):
        monkeypatch.setattr(processes, "_peers", {})
        address = f"127.0.0.1:{free_port()}"
        threads = []
        for i, rank in enumerate(ranks):
            one = dataclasses.replace(Processes(address, count, 0), rank=rank)
            threads.append(Rank(one, runs[i] if runs else {}, seconds))
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        return address, [thread.result for thread in threads]

    return meet


def test_ranks_meet_in_any_order(meet):
    _, (first, second, third) = meet([2, 0, 1], 3)
    assert first == second == third
    assert first.startswith("127.0.0.1:")


def test_a_missing_rank_is_named_in_all_others(meet):
    address, output = meet([0, 2], 4, seconds=1.0)
    for text in output:
        assert text.startswith(f"rank 1, 3 of 4 did not connect to {address} within 1 s")


def test_a_duplicate_rank_is_named(meet):
    _, output = meet([0, 1, 1], 3)
    assert len(output) == 3
    for text in output:
        assert text.startswith("two processes have rank 1")


def test_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "_peers", {})
    address = f"127.0.0.1:{free_port()}"
    leader = Rank(Processes(address, 2, 0), {}, 2.0)
    other = Rank(Processes(address, 4, 3), {}, 2.0)
    leader.join(), other.join()
    assert leader.result == other.result
    assert leader.result.startswith(
        f"rank 3 connected to {address}, where rank 0 expects 2 processes"
    )


def test_different_settings_are_named(meet):
    runs = [{"batch": 4, "grid": {"context": [1, 2]}}, {"batch": 8, "grid": {"context": [1, 3]}}]
    _, output = meet([0, 1], 2, runs)
    for text in output:
        assert text == (
            "rank 1 has different settings: batch is 8 there and 4 in rank 0; "
            "grid.context is [1, 3] there and [1, 2] in rank 0"
        )


def test_an_address_without_a_coordinator_is_named(meet):
    address, (output,) = meet([1], 2, seconds=0.5)
    assert output.startswith(f"rank 0 does not answer at {address} within 0.5 s")
    assert "start rank 0 on that host" in output


def test_connections_of_other_programs_are_ignored(monkeypatch):
    monkeypatch.setattr(processes, "_peers", {})
    who = Processes(f"127.0.0.1:{free_port()}", 2, 0)
    leader = Rank(who, {}, 5.0)
    for message in (b"GET / HTTP/1.1\r\n\r\n", json.dumps(["x"]).encode() + b"\n", b""):
        with contextlib.closing(_connect(who.address)) as stranger:
            stranger.sendall(message)
    other = Rank(dataclasses.replace(who, rank=1), {}, 5.0)
    leader.join(), other.join()
    assert leader.result == other.result and leader.result.startswith("127.0.0.1:")


def _connect(address):
    until = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_another_program_at_the_port_is_not_mistaken_for_rank_0(monkeypatch):
    monkeypatch.setattr(processes, "_peers", {})
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        who = Processes(f"127.0.0.1:{stranger.getsockname()[1]}", 2, 1)
        other = Rank(who, {}, 5.0)
        with contextlib.closing(stranger.accept()[0]) as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            other.join()
    assert "does not answer like rank 0" in other.result


def test_two_coordinators_cannot_share_a_port():
    with socket.create_server(("", 0)) as taken:
        who = Processes(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(ValueError, match="rank 0 cannot listen at this port"):
            processes.join(who, {}, 1)


FAILS = """
import sys, time
from experiments import processes
from sharding import global_arrays
address, rank, fails, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
processes.join(processes.Processes(address, 2, rank), {}, 60)
with processes.leaving():
    if str(rank) in fails:
        kind = {"refusal": ValueError, "error": RuntimeError, "stop": KeyboardInterrupt}[how]
        raise kind("own error")
    print(global_arrays.broadcast_from_rank0(1))  # the other process does not call it
"""


ENDS = [
    ("01", "refusal", (2, 2)),
    ("01", "error", (1, 1)),
    ("0", "stop", (130, processes.LOST)),
    ("1", "refusal", (processes.LOST, 2)),
]


@pytest.mark.parametrize(("fails", "how", "statuses"), quick(ENDS, ENDS[1]))
def test_an_error_ends_all_processes_and_each_reports_its_own(fails, how, statuses):
    address = f"127.0.0.1:{free_port()}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, address, str(rank), fails, how],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(both):
        _, output = process.communicate(timeout=60)
        assert process.returncode == statuses[rank], output
        if str(rank) in fails:
            assert "own error" in output
        else:
            assert f"rank {1 - rank} ended with an error" in output
        assert "Check failure stack trace" not in output


ALONE = """
import sys, time
from experiments import processes
from tests.quick import quick
address, rank = sys.argv[1], int(sys.argv[2])
processes.join(processes.Processes(address, 3, rank), {}, 60)
print("joined", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("lost", quick([0, 2], 2))
def test_a_killed_process_is_named_by_all_others(lost):
    address = f"127.0.0.1:{free_port()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, address, str(rank)],
            stdout=subprocess.DEVNULL,  # messages of Gloo
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in ranks:
            assert process.stderr.readline() == "joined\n"
        ranks[lost].kill()
        begin = time.monotonic()
        for rank, process in enumerate(ranks):
            if rank != lost:
                _, output = process.communicate(timeout=60)
                assert process.returncode == processes.LOST
                assert f"rank {rank} of 3: rank {lost} was lost" in output
                assert output.count("rerun all processes") == 1
        assert time.monotonic() - begin < 60
    finally:
        for process in ranks:
            process.kill()
            process.wait()
