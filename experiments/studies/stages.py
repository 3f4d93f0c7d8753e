"""Pipeline stages on paper and in time: `python -m experiments.studies.stages schedule` and `…
hosts`.

`schedule` measures the share of the time in which stages are idle, beside (S - 1) / (M + S - 1):
the real schedule, of stages whose work is to sleep, so that a CPU of two cores shows eight devices.

`hosts` compiles a decoding step for 2, 4 and 8 nodes of eight GPUs, by XLA's CUDA compiler, and
says what its program sends between them: with the target's layers divided over the nodes (stage),
its heads (model), or only the rows (data).
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
from magicjax.aot.aot_compile import Workload, request_of
from magicjax.cli import fit
from sharding import DATA, STAGE, MeshSize, abstract_mesh, factored, make_mesh, pipeline

OUT = pathlib.Path(__file__).parents[1] / "results" / "stages"
ROWS = 8
GPUS, NODES = 8, (2, 4, 8)
ROWS_OF_NODE, CONTEXT, TARGET, DRAFTER = 8, 8192, "llama-3.1-70b", "self:streaming:512"
LINKS = (100, 400)  # Gb/s of a host
# Axes that go across the nodes: the mesh of so many.
ACROSS = {
    "stage": lambda nodes: MeshSize(model=GPUS, stage=nodes),
    "model": lambda nodes: MeshSize(model=GPUS * nodes),
    "data": lambda nodes: MeshSize(data=nodes, model=GPUS),
}


def schedule(stages: int, micro_batches: int, seconds: float) -> dict[str, Any]:
    """Returns which stage worked on what, what came out, and the share of idle time.

    Every stage adds 1 to each of 8 rows, the first of which are 0, 1, …, and sleeps.

    Args:
      stages, micro_batches: S, and M, which divides 8. There must be S devices.
      seconds: of a stage's work on a micro-batch.
    """
    worked, guard = [], threading.Lock()

    def sleep(stage, first):
        begin = time.perf_counter()
        time.sleep(seconds)
        with guard:
            worked.append((int(stage), int(first), begin, time.perf_counter()))
        return np.float32(1)

    def run(x, first):
        first = jnp.int32(0) if first is None else first
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        one = jax.pure_callback(sleep, shape, pipeline.place(), first)
        return x + one, (x,)

    def whole(x):
        out, (came,) = pipeline.pipelined(run, x, micro_batches)
        return pipeline.from_last(out), came[None]

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
    worked.clear()
    out, came = jax.block_until_ready(program(x))
    busy = sum(end - begin for _, _, begin, end in worked)
    span = max(end for *_, end in worked) - min(begin for _, _, begin, _ in worked)
    return {
        "worked": sorted((stage, first) for stage, first, *_ in worked),
        "out": np.asarray(out)[:, 0].tolist(),
        "came": np.asarray(came)[..., 0].tolist(),
        "idle": 1 - busy / (stages * span),
    }


def idle_table(seconds: float) -> list[dict[str, Any]]:
    """Returns measured and expected idle shares, a row for each number of stages and micro-batches.

    Args:
      seconds: of a stage's work on all rows; a micro-batch takes its share of it.
    """
    rows = []
    for stages in (2, 4, 8):
        for micro_batches in (1, 2, 4, 8):
            found = schedule(stages, micro_batches, seconds / micro_batches)
            expected = pipeline.idle_share(stages, micro_batches)
            rows.append(
                {
                    "stages": stages,
                    "micro-batches": micro_batches,
                    "idle": found["idle"],
                    "(S - 1) / (M + S - 1)": expected,
                }
            )
    return rows


def workload(axis: str, nodes: int) -> Workload:
    """Returns a decoding step of 8 rows for each node.

    Args:
      axis: of `ACROSS`.
      nodes: of eight GPUs.
    """
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
    """Returns what a decoding step sends between nodes.

    Args:
      axis, nodes, load: as for `workload`, and what it returns.

    Raises:
      ValueError: the compiler cannot be had, or failed.
    """
    found, why_not = fit.compile_apart(load, "--programs", "decode", "--group", str(GPUS))
    if found is None:
        raise ValueError(why_not)
    sent = [one for one in found["decode"]["collectives"] if one["between"]]
    arriving = sum(_arriving(one, axis, nodes) for one in sent)
    row = {
        "across": axis,
        "nodes": nodes,
        "mesh": str(load.mesh_size),
        "rows": load.batch,
        "messages": sum(one["count"] for one in sent),
        "MB to a host": arriving / 1e6,
    }
    return row | {f"ms at {link} Gb/s": 1e3 * arriving / (link * 1e9 / 8) for link in LINKS}


def _arriving(exchange: dict[str, Any], axis: str, nodes: int) -> float:
    """Returns the bytes of an exchange that arrive at a host.

    Sums go round a ring: nearly twice, of n members (n - 1) / n. Along `stage` each of a host's
    devices is in a ring of its own, along `model` one ring has them all and enters a host once.
    """
    members = nodes if axis == "stage" else GPUS * nodes
    times = 2 * (members - 1) / members if exchange["kind"] == "all-reduce" else 1
    return exchange["bytes"] * times * (GPUS if axis == "stage" else 1)


def hosts_table(out: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each axis and number of nodes; what is in `out` is not compiled again."""
    rows = []
    for axis in ACROSS:
        for nodes in NODES:
            name = f"{axis}-{nodes}"
            row = store.read_record(out, name)
            if row is None:
                load = workload(axis, nodes)
                try:
                    request_of(load, abstract_mesh(*load.mesh_size))
                except ValueError as error:  # that many devices do not divide it
                    print(f"{name}: {error}", flush=True)
                    continue
                row = between_hosts(axis, nodes, load)
                store.write_record(out, name, row)
            print(row, flush=True)
            rows.append(row)
    return rows


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table."""

    def text(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(map(text, row.values())) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


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
    parser.add_argument("--seconds", type=float, default=1.0, help="of a stage's work on all rows")
    options = parser.parse_args(arguments)
    if options.what == "schedule":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        rows = idle_table(options.seconds)
    else:
        rows = hosts_table(options.out)
    table = as_markdown(rows)
    store.write_text(options.out / f"{options.what}.md", table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
