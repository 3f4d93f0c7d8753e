"""Idle time and network traffic of pipeline stages: `python -m experiments.studies.stages`.

`schedule` measures the idle share of the stages and compares it with (S - 1) / (M + S - 1). It runs
the real schedule with stages that sleep, so that a CPU with two cores can simulate eight devices.

`hosts` compiles a decoding step for 2, 4 and 8 nodes of eight GPUs and reports what the program
sends between nodes: with the target's layers (stage), heads (model) or only rows (data) sharded
across the nodes.
"""

import argparse
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.schema import store
from magicjax.aot.aot_compile import Workload, abstract_request
from magicjax.benchmarks.tables import record_table
from magicjax.cli import fit
from magicjax.files import write_atomically
from sharding import DATA, STAGE, MeshSize, abstract_mesh, factored, make_mesh, pipeline

OUT = pathlib.Path(__file__).parents[1] / "results" / "stages"
ROWS = 8
GPUS, NODES = 8, (2, 4, 8)
ROWS_OF_NODE, CONTEXT, TARGET, DRAFTER = 8, 8192, "llama-3.1-70b", "self:streaming:512"
LINKS = (100, 400)  # Gb/s of a host
# The mesh for a number of nodes, by the axis that spans them.
ACROSS = {
    "stage": lambda nodes: MeshSize(model=GPUS, stage=nodes),
    "model": lambda nodes: MeshSize(model=GPUS * nodes),
    "data": lambda nodes: MeshSize(data=nodes, model=GPUS),
}


def schedule(stages: int, micro_batches: int, seconds: float) -> dict[str, Any]:
    """Runs a pipeline and returns the work of each stage, outputs, inputs, and the idle share.

    Every stage adds 1 to each of 8 rows, which start as 0, 1, …, and sleeps.

    Args:
      stages, micro_batches: S, and M, which divides 8. S devices are needed.
      seconds: of a stage's work on a micro-batch.
    """
    work, lock = [], threading.Lock()

    def sleep(stage, first):
        begin = time.perf_counter()
        time.sleep(seconds)
        with lock:
            work.append((int(stage), int(first), begin, time.perf_counter()))
        return np.float32(1)

    def run(x, first):
        first = jnp.int32(0) if first is None else first
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        one = jax.pure_callback(sleep, shape, pipeline.stage_index(), first)
        return x + one, (x,)

    def whole(x):
        out, (inputs,) = pipeline.pipelined(run, x, micro_batches)
        return pipeline.broadcast_from_last(out), inputs[None]

    rows = PartitionSpec(DATA)
    mapped = jax.shard_map(
        whole,
        mesh=factored(make_mesh(stage=stages)),
        in_specs=rows,
        out_specs=(rows, PartitionSpec(STAGE, DATA)),
        check_vma=False,
    )
    program, x = jax.jit(mapped), jnp.arange(float(ROWS))[:, None]
    jax.block_until_ready(program(x))  # compiles
    work.clear()
    out, inputs = jax.block_until_ready(program(x))
    busy = sum(end - begin for _, _, begin, end in work)
    span = max(end for *_, end in work) - min(begin for _, _, begin, _ in work)
    return {
        "work": sorted((stage, first) for stage, first, *_ in work),
        "out": np.asarray(out)[:, 0].tolist(),
        "inputs": np.asarray(inputs)[..., 0].tolist(),
        "idle": 1 - busy / (stages * span),
    }


def idle_table(seconds: float) -> list[dict[str, Any]]:
    """Returns measured and expected idle shares by number of stages and micro-batches.

    Args:
      seconds: of a stage's work on all rows.
    """
    rows = []
    for stages in (2, 4, 8):
        for micro_batches in (1, 2, 4, 8):
            idle = schedule(stages, micro_batches, seconds / micro_batches)["idle"]
            row = {"stages": stages, "micro-batches": micro_batches, "idle": idle}
            expected = pipeline.idle_share(stages, micro_batches)
            rows.append(row | {"(S - 1) / (M + S - 1)": expected})
    return rows


def workload(axis: str, nodes: int) -> Workload:
    """Returns a decoding workload with 8 rows per node, whose `axis` spans the nodes."""
    mesh = ACROSS[axis](nodes)
    return Workload(
        target=TARGET,
        drafter=DRAFTER,
        tree="chain:4",
        batch=ROWS_OF_NODE * nodes,
        context=CONTEXT,
        device="h100",
        micro_batches=nodes if axis == "stage" else None,
        **mesh._asdict(),
    )


def between_hosts(axis: str, nodes: int, load: Workload) -> dict[str, Any]:
    """Returns the traffic of a decoding step between nodes.

    Args:
      axis, nodes: as for `workload`.
      load: the workload.

    Raises:
      ValueError: the compiler is unavailable or failed.
    """
    report, reason = fit.compile_apart(load, "--programs", "decode", "--group", str(GPUS))
    if report is None:
        raise ValueError(reason)
    sent = [each for each in report["decode"]["collectives"] if each["between"]]
    received = sum(_received(each, axis, nodes) for each in sent)
    row = {
        "across": axis,
        "nodes": nodes,
        "mesh": str(load.mesh_size),
        "rows": load.batch,
        "messages": sum(each["count"] for each in sent),
        "MB to a host": received / 1e6,
    }
    return row | {f"ms at {link} Gb/s": 1e3 * received / (link * 1e9 / 8) for link in LINKS}


def _received(collective: dict[str, Any], axis: str, nodes: int) -> float:
    """Returns the bytes of a collective that a host receives.

    An all-reduce of n members sends 2 * (n - 1) / n of its bytes around a ring. Along `stage` each
    of a host's devices is in a separate ring; along `model` one ring enters each host once.
    """
    members = nodes if axis == "stage" else GPUS * nodes
    times = 2 * (members - 1) / members if collective["kind"] == "all-reduce" else 1
    return collective["bytes"] * times * (GPUS if axis == "stage" else 1)


def hosts_table(out: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each axis and number of nodes; rows in `out` are not compiled again."""
    rows = []
    for axis in ACROSS:
        for nodes in NODES:
            name = f"{axis}-{nodes}"
            row = store.read_record(out, name)
            if row is None:
                load = workload(axis, nodes)
                try:
                    abstract_request(load, abstract_mesh(*load.mesh_size))
                except ValueError as error:  # the model does not divide over so many devices
                    print(f"{name}: {error}", flush=True)
                    continue
                row = between_hosts(axis, nodes, load)
                store.write_record(out, name, row)
            print(row, flush=True)
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table and writes it."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.stages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("schedule", "hosts"))
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="folder; %(default)s")
    parser.add_argument("--seconds", type=float, default=1.0, help="a stage's work on all rows")
    options = parser.parse_args(arguments)
    if options.what == "schedule":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        rows = idle_table(options.seconds)
    else:
        rows = hosts_table(options.out)
    table = record_table(rows)
    write_atomically(options.out / f"{options.what}.md", table + "\n")
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
