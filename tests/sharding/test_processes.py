"""Processes find each other, or say in a sentence why not."""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from sharding import processes
from sharding.processes import Processes, find
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
def test_slurm_tells_all(nodes, first):
    found = find(environment=SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert found == Processes(f"{first}:{61440 + 61 * 70000 % 4096}", 16, 5)


def test_a_job_without_srun_or_of_one_task_is_one_process():
    without = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find(environment=without) is None
    # mpirun in a batch script has ranks of its own.
    ranks = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    for of_slurm in (without, SLURM):
        assert find("here:1", environment=of_slurm | ranks) == Processes("here:1", 4, 3)
    assert find(environment=SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert find(environment={}) is None
    assert find(count=1, environment={}) is None
    assert find(count=1, environment=SLURM) is None  # as was asked
    other = find(environment=SLURM | {"SLURM_STEP_ID": "1"})
    assert other is not None and other != find(environment=SLURM)  # meets at another port


def test_open_mpi_tells_ranks_and_on_one_host_all():
    tells = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    assert find("here:1", environment=tells) == Processes("here:1", 4, 3)
    with pytest.raises(ValueError, match="processes=4, rank=3, and coordinator not given"):
        find(environment=tells)
    found = find(environment=tells | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert found is not None and found.address[0] == "127.0.0.1"
    alone = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    assert find(environment=alone) is None


def test_kubernetes_tells_the_rank():
    tells = {"JOB_COMPLETION_INDEX": "1"}
    assert find("pod-0:1", 2, environment=tells) == Processes("pod-0:1", 2, 1)
    assert find(environment=tells) is None  # a job of many pods that have nothing to do


def test_what_is_given_wins_over_what_a_cluster_tells():
    assert find("there:9", 2, 0, SLURM) == Processes("there:9", 2, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1", 1, 0), "processes=1: give 2 or more"),
        (("a:1", 2, 2), "rank=2 of 2 processes: ranks go from 0 to 1"),
        (("a:1", 2, -1), "rank=-1 of 2"),
        (("a", 2, 0), "coordinator='a' is no address"),
        (("a:70000", 2, 0), "coordinator='a:70000' is no address"),
        (("a:0", 2, 0), "coordinator='a:0' is no address"),
        ((None, None, 3), "rank=3, and coordinator and processes not given"),
        ((None, 1, 5), "processes=1, rank=5, and coordinator not given"),
        (("a:1", None, None), "coordinator=a:1, and processes and rank not given"),
        ((None, 2, 0), "processes=2, rank=0, and coordinator not given"),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(ValueError, match=message):
        find(*given, environment={})


class Rank(threading.Thread):
    """A rank's meeting with the others, in a thread of this process; JAX is left out."""

    def __init__(self, who, run, seconds):
        super().__init__()
        self.meeting = who, run, time.monotonic() + seconds, seconds
        self.result = None
        self.start()

    def run(self):
        meet = processes._await_others if self.meeting[0].rank == 0 else processes._report
        try:
            self.result = meet(*self.meeting)
        except ValueError as error:
            self.result = str(error)


@pytest.fixture
def meet(monkeypatch):
    """Returns what each of some ranks says when all have met or given up."""

    def meet(ranks, count, runs=None, seconds=2.0):
        monkeypatch.setattr(processes, "_lines", {})
        where = f"127.0.0.1:{free_port()}"
        threads = []
        for i, rank in enumerate(ranks):
            one = dataclasses.replace(Processes(where, count, 0), rank=rank)
            threads.append(Rank(one, runs[i] if runs else {}, seconds))
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        return where, [thread.result for thread in threads]

    return meet


def test_ranks_meet_in_any_order(meet):
    _, (first, second, third) = meet([2, 0, 1], 3)
    assert first == second == third
    assert first.startswith("127.0.0.1:")


def test_a_rank_that_does_not_come_is_named_to_those_that_did(meet):
    where, said = meet([0, 2], 4, seconds=1.0)
    for text in said:
        assert text.startswith(f"rank 1, 3 of 4 did not come to {where} within 1 s")


def test_a_rank_that_comes_twice_is_named(meet):
    _, said = meet([0, 1, 1], 3)
    assert len(said) == 3
    for text in said:
        assert text.startswith("two of the processes are rank 1")


def test_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "_lines", {})
    where = f"127.0.0.1:{free_port()}"
    leads = Rank(Processes(where, 2, 0), {}, 2.0)
    comes = Rank(Processes(where, 4, 3), {}, 2.0)
    leads.join(), comes.join()
    assert leads.result == comes.result
    assert leads.result.startswith(f"rank 3 came to {where}, and this is rank 0 of 2")


def test_a_run_that_differs_is_said_where(meet):
    runs = [{"batch": 4, "grid": {"context": [1, 2]}}, {"batch": 8, "grid": {"context": [1, 3]}}]
    _, said = meet([0, 1], 2, runs)
    for text in said:
        assert text == (
            "rank 1 is to run something else: batch is 8 there and 4 in rank 0; "
            "grid.context is [1, 3] there and [1, 2] in rank 0"
        )


def test_a_coordinator_that_does_not_answer_is_named(meet):
    where, (said,) = meet([1], 2, seconds=0.5)
    assert said.startswith(f"nobody answers at {where} within 0.5 s")
    assert "start rank 0 there" in said


def test_somebody_elses_words_at_the_port_are_ignored(monkeypatch):
    monkeypatch.setattr(processes, "_lines", {})
    where = Processes(f"127.0.0.1:{free_port()}", 2, 0)
    leads = Rank(where, {}, 5.0)
    for words in (b"GET / HTTP/1.1\r\n\r\n", json.dumps(["x"]).encode() + b"\n", b""):
        with contextlib.closing(_connect(where.address)) as stranger:
            stranger.sendall(words)
    comes = Rank(dataclasses.replace(where, rank=1), {}, 5.0)
    leads.join(), comes.join()
    assert leads.result == comes.result and leads.result.startswith("127.0.0.1:")


def _connect(address):
    until = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_another_program_at_the_port_is_not_taken_for_rank_0(monkeypatch):
    monkeypatch.setattr(processes, "_lines", {})
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = Processes(f"127.0.0.1:{other.getsockname()[1]}", 2, 1)
        comes = Rank(where, {}, 5.0)
        with contextlib.closing(other.accept()[0]) as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            comes.join()
    assert "does not answer as rank 0 does" in comes.result


def test_an_address_of_ipv6_keeps_its_brackets(monkeypatch):
    monkeypatch.setattr(processes, "_lines", {})
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    where = Processes(f"[::1]:{free_port()}", 2, 0)
    assert where.address[0] == "::1"
    leads, comes = Rank(where, {}, 5.0), Rank(dataclasses.replace(where, rank=1), {}, 5.0)
    leads.join(), comes.join()
    assert leads.result == comes.result and leads.result.startswith("[::1]:")


def test_two_coordinators_cannot_have_one_port():
    with socket.create_server(("", 0)) as taken:
        where = Processes(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(ValueError, match="rank 0 cannot listen there"):
            processes.join(where, {}, 1)


FAILS = """
import sys, time
import numpy as np
from sharding import processes
where, rank, fails, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
processes.join(processes.Processes(where, 2, rank), {}, 60)
with processes.leaving():
    if str(rank) in fails:
        raise {"refusal": ValueError, "error": RuntimeError, "stop": KeyboardInterrupt}[how]("told")
    print(processes.of_first(1))  # nobody comes
"""


@pytest.mark.parametrize(
    ("fails", "how", "statuses"),
    [
        ("01", "refusal", (2, 2)),
        ("01", "error", (1, 1)),
        ("0", "stop", (130, processes.LOST)),
        ("1", "refusal", (processes.LOST, 2)),
    ],
)
def test_an_error_ends_all_processes_and_each_says_its_own(fails, how, statuses):
    where = f"127.0.0.1:{free_port()}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, where, str(rank), fails, how],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(both):
        _, said = process.communicate(timeout=60)
        assert process.returncode == statuses[rank], said
        if str(rank) in fails:
            assert "told" in said
        else:
            assert f"rank {1 - rank} ended with an error" in said
        assert "Check failure stack trace" not in said


ALONE = """
import sys, time
from sharding import processes
where, rank = sys.argv[1], int(sys.argv[2])
processes.join(processes.Processes(where, 3, rank), {}, 60)
print("joined", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("lost", [0, 2])
def test_a_process_that_is_killed_is_named_by_all_others_at_once(lost):
    where = f"127.0.0.1:{free_port()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, where, str(rank)],
            stdout=subprocess.DEVNULL,  # Gloo's
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
                _, said = process.communicate(timeout=60)
                assert process.returncode == processes.LOST
                assert f"rank {rank} of 3: rank {lost} was lost" in said
                assert "start all of them again" in said
        assert time.monotonic() - begin < 60
    finally:
        for process in ranks:
            process.kill()
            process.wait()
