"""Measures a cell; its runs are interleaved with plain decoding of the same prompts.

The first run of each compiles, and is not timed. A cell with repeats=0 has no other runs. After the
timed runs one more is traced. Batches of different prompts are measured one after the other, and
their runs are added; nothing compiles for the later ones, whose first timed run counts as the first
run, too.
"""

import dataclasses
import pathlib
import resource
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import magicjax
from experiments import prompts
from experiments.prompts.metrics import repeated_ngrams
from experiments.runner import exactness
from experiments.runner.provenance import device_name
from experiments.runner.workload import Bench, Runs, merge
from experiments.schema.columns import complete
from experiments.schema.grid import Cell, columns, plain_of
from magicjax import placement
from magicjax.cli.plan import tree_spec
from magicjax.prediction.planner.candidates import model_sizes
from pallas_kernels.benchmarks import bandwidth
from sharding import factored

CURVES = ("histogram", "acceptance_by_depth", "acceptance_if_reached")  # of `metrics.json`


def measure(
    bench: Bench, cell: Cell, folder: pathlib.Path | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the content of a cell's `metrics.json`, and the lines of its `requests.jsonl`.

    With a folder, a trace is kept in it.

    Raises:
      RuntimeError: two runs of the cell differ, or a timed run compiled.
    """
    plain = plain_of(cell)
    outputs: dict[Cell, list] = {plain: [], cell: []}  # one entry if the cell is plain decoding
    read_gbs = None
    if cell.repeats:
        bench.steps("measuring the bandwidth of the memory")
        read_gbs = bandwidth.read_bandwidth() / 1e9
    streams, bench.streams = bench.streams, False
    prefill_compile_s, shared = 0.0, None
    batches = bench.batches(cell)
    for number, prompt_rows in enumerate(batches):
        which = f", prompts {number + 1} of {len(batches)}" if len(batches) > 1 else ""
        shared = None  # frees the caches of the last batch
        batch_cells = {measured: _with_batch_seed(measured, number) for measured in outputs}
        bench.steps(f"batch {cell.batch}, context {cell.context}: prefill{which}")
        shown = streams and number == 0
        if shown:
            bench.steps.text(f"… {bench.end_of_prompt(cell)}\n")
        shared = bench.runs(list(batch_cells.values()), prompt_rows)
        prefill_compile_s += shared.compile_s
        batch_outputs: dict[Cell, list] = {measured: [] for measured in outputs}
        first = 1 if number and cell.repeats else 0
        for repeat in range(first, cell.repeats + 1):
            run = f"timed run {repeat} of {cell.repeats}" if repeat else "compiling, first run"
            for measured in outputs:
                bench.steps(f"{measured.label}: {run}{which}")
                output = shared.run(batch_cells[measured], shown and repeat == 0)
                batch_outputs[measured].append(output)
        for measured, cell_outputs in batch_outputs.items():
            outputs[measured].append(cell_outputs[:1] * first + cell_outputs)
    assert shared is not None  # a cell has at least one batch
    # Of each repeat, the run over all batches.
    repeats = {measured: list(zip(*batches, strict=True)) for measured, batches in outputs.items()}
    runs = {measured: [merge(run) for run in cell_runs] for measured, cell_runs in repeats.items()}
    if any(run.stats.compile_s for cell_runs in runs.values() for run in cell_runs[1:]):
        raise RuntimeError(f"{cell.label}: a timed run compiled, so its time is invalid")
    rows: dict[Cell, dict[str, Any]] = {}
    for measured, cell_runs in runs.items():  # the cell's are the last
        match = _match(bench, measured, cell_runs, runs[plain])
        # The time per output token of every request.
        timed = repeats[measured][1:]
        latencies = [np.concatenate([_tpot(run) for run in batches]) for batches in timed]
        requests = _requests(bench, measured, cell_runs, match, latencies)
        row: dict[str, Any] = {"device": device_name(), "status": "ok", "error": ""}
        if read_gbs:
            row |= _times(bench, measured, cell_runs[1:], runs[plain][1:], latencies, read_gbs)
        row |= _acceptance(bench, measured, cell_runs[0], requests) | exactness.columns(match)
        row["noise_match"] = _equal_rows(runs[plain])
        row |= _resources(cell_runs, prefill_compile_s + bench.choosing_s)
        rows[measured] = complete(columns(measured), row)
    if cell.repeats and (cell.phases or folder):
        bench.steps(f"{cell.label}: tracing")
    seconds, phases_error = _phases(shared, batch_cells[cell], folder) if cell.repeats else ({}, "")
    rows[cell] |= {f"{name}_s": s for name, s in seconds.items()} | {"phases_error": phases_error}
    rows[cell]["memory_mb"] = peak_memory() / 1e6
    stats = runs[cell][0].stats
    metrics = {
        "row": rows[cell],
        "plain_row": rows[plain],
        **{
            name: [
                _run(merged, batches)
                for merged, batches in zip(runs[measured][1:], repeats[measured][1:], strict=True)
            ]
            for name, measured in (("runs", cell), ("plain_runs", plain))
        },
        **{name: list(getattr(stats, name)) for name in CURVES},
        "phases": seconds,
        "divergences": [str(d) for d in match.divergences] if match else [],
    }
    return metrics, requests


def _with_batch_seed(cell: Cell, number: int) -> Cell:
    """Returns the cell of a batch: batches of a sampled cell draw different random numbers."""
    return dataclasses.replace(cell, seed=cell.seed + number) if cell.temperature else cell


def _run(merged: Any, batches: Sequence[Any]) -> dict[str, Any]:
    """Returns the sums of a run over all batches, and the seconds of each if there are several."""
    times = ("prefill_s", "decode_s", "tokens_per_s")
    names = (*times, "target_passes", "rounds", "emitted", "drafted", "accepted")
    run: dict[str, Any] = {name: float(getattr(merged.stats, name)) for name in names}
    if len(batches) > 1:
        run["decode_s_by_batch"] = [batch.stats.decode_s for batch in batches]
    return run


def _acceptance(
    bench: Bench, cell: Cell, run: Any, requests: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    stats = run.stats
    scores = [request["score"] for request in requests if request["score"] is not None]
    return {
        "tau": stats.tau,
        "tau_by_request": stats.tau_by_request,
        "block_efficiency": stats.block_efficiency,
        "acceptance_rate": None if cell.draft == "none" else stats.acceptance_rate,
        "nodes_per_round": stats.nodes_per_round,
        "target_passes": stats.target_passes,
        "rounds": stats.rounds,
        "repeated_8grams": repeated_ngrams(np.asarray(run.tokens)),
        "agreement": bench.agreement(cell),
        "score": statistics.mean(scores) if scores else None,
        "chosen": _chosen(run.choice),
        "templated": bench.templated(cell),
    }


def _chosen(choice: magicjax.Choice | None) -> str:
    """Returns the name of the drafter and tree that "auto" chose, "" for other methods."""
    if choice is None:
        return ""
    return choice.name if choice.tree is None else f"{choice.name}, {tree_spec(choice.tree)}"


def _resources(runs: Sequence[Any], other_compile_s: float) -> dict[str, Any]:
    stats = runs[0].stats
    return {
        "compile_s": sum(run.stats.compile_s for run in runs) + other_compile_s,
        "kv_mb_target": stats.kv_bytes_target / 1e6,
        "kv_mb_draft": stats.kv_bytes_draft / 1e6,
        "attention_backend": stats.attention_backend,
    }


def peak_memory() -> float:
    """Returns the peak bytes in use: of a GPU, or of this process if devices do not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return float(max(device["peak_bytes_in_use"] for device in stats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _requests(
    bench: Bench,
    cell: Cell,
    runs: Sequence[Any],
    match: exactness.Match | None,
    latencies: Sequence[np.ndarray],
) -> list[dict[str, Any]]:
    """Returns a line for each request: its tokens, acceptance and latency."""
    output, tasks = runs[0], bench.tasks(cell)
    divergences = {d.row: d for d in match.divergences} if match else {}
    median = np.median(latencies, 0) if latencies else None
    lines = []
    for i, counts in enumerate(output.stats.by_request):
        divergence, task = divergences.get(i), tasks[i] if tasks else None
        text = output.texts[i] if output.texts else None
        new = np.asarray(output.tokens)[i].tolist()
        scored = task is not None and task.answer and text is not None
        lines.append(
            {
                "request": i,
                "category": task.category if task else "",
                "tokens": new,
                "text": text,
                "answer": list(task.answer) if task else [],
                "source": task.source if task else "",
                "score": prompts.score(task, bench.answer(cell, new)) if scored else None,
                "rounds": counts.target_passes,
                "tau": counts.tau,
                "histogram": list(counts.histogram),
                "exact": (divergence is None or divergence.is_tie) if match else None,
                "first_divergence": divergence.position if divergence else None,
                "top2_margin": divergence.margin if divergence else None,
                "tpot_ms": float(median[i]) if median is not None else None,
            }
        )
    return lines


def _phases(runs: Runs, cell: Cell, folder: pathlib.Path | None) -> tuple[dict[str, float], str]:
    """Returns (seconds of each phase in the first rounds of one more run, why there are none).

    A device that cannot be traced is an error only if a trace was asked for. A loop so small that
    XLA makes one operation of it has no phases.
    """
    if not (cell.phases or folder):
        return {}, ""
    try:
        seconds = runs.trace(cell, folder).seconds
    except ValueError as error:
        if folder:
            raise
        print(f"{cell.label}: not traced: {error}", flush=True)
        return {}, str(error)
    return (seconds, "") if seconds["score"] else ({}, "XLA compiled the loop to one operation")


def _times(
    bench: Bench,
    cell: Cell,
    runs: Sequence[Any],
    plain_runs: Sequence[Any],
    latencies: Sequence[np.ndarray],
    read_gbs: float,
) -> dict[str, float | None]:
    """Returns the times of the timed runs; `read_gbs` is the measured bandwidth of a device."""
    rates, plain_rates = [_rate(run) for run in runs], [_rate(run) for run in plain_runs]
    rate, plain_rate = statistics.median(rates), statistics.median(plain_rates)
    prefill_s = statistics.median(run.stats.prefill_s for run in runs)
    ar_gbs = _step_bytes(bench.target_of(cell), cell) / _step_s(plain_runs) / 1e9
    devices = cell.devices.size if cell.devices else 1
    if jax.default_backend() != "cpu":  # devices on a CPU share its memory
        read_gbs *= devices
    # Offloaded weights come over a link, and stages read theirs once for every micro-batch.
    reads_memory = not cell.offload and not (cell.devices and cell.devices.shape["stage"] > 1)
    return {
        "decode_tok_s": rate,
        "decode_tok_s_user": rate / cell.batch,
        "decode_tok_s_device": rate / devices,
        "ar_decode_tok_s": plain_rate,
        "speedup": rate / plain_rate,
        "ttft_s": prefill_s / (cell.num_requests // cell.batch),
        "tpot_ms_p50": float(np.percentile(np.concatenate(latencies), 50)),
        "tpot_ms_p99": float(np.percentile(np.concatenate(latencies), 99)),
        "prefill_s": prefill_s,
        "decode_s": statistics.median(run.stats.decode_s for run in runs),
        "round_ms": 1e3 * _step_s(runs),
        "ar_gbs": ar_gbs,
        "read_gbs": read_gbs,
        "bandwidth_share": ar_gbs / read_gbs if reads_memory else None,
    }


def _step_bytes(target: Any, cell: Cell) -> float:
    """Returns the bytes that all devices read in an average step of plain decoding."""
    sizes = model_sizes(target, None)
    weights = sizes.read_bytes(cell.batch)
    slots = sizes.slots_per_layer(cell.context + (cell.new_tokens - 1) / 2)
    entries = cell.batch * slots * sizes.kv_bytes
    if not cell.devices:
        return weights + entries
    split = placement.split_of(target.config, None, factored(cell.devices))
    # Every data shard has the weights, and KV heads may be replicated.
    return cell.devices.shape["data"] * weights + entries * split.shards / split.kv_shards


def _match(
    bench: Bench, cell: Cell, runs: Sequence[Any], plain_runs: Sequence[Any]
) -> exactness.Match | None:
    """Returns how the cell's tokens compare with plain decoding's.

    None if only the distribution is the same: naive verification samples the tokens of plain
    sampling, other verifiers do not.

    Raises:
      RuntimeError: two runs of the cell differ, but those of plain decoding do not.
    """
    if _equal_rows(runs) < 1 and _equal_rows(plain_runs) == 1:
        raise RuntimeError(f"{cell.label}: two runs on the same prompts differ")
    plain, tokens = np.asarray(plain_runs[0].tokens), np.asarray(runs[0].tokens)
    if cell.temperature and cell.draft != "none" and cell.verifier != "naive":
        return None
    if np.array_equal(plain, tokens):
        return exactness.Match(len(plain), ())
    # Without a model no divergence is a tie.
    target = None if cell.temperature else bench.read_by(cell.target, cell)
    return exactness.compare(target, bench.prompts(cell), plain, tokens)


def _equal_rows(runs: Sequence[Any]) -> float:
    """Returns the share of rows with the same tokens in all runs."""
    tokens = np.stack([np.asarray(run.tokens) for run in runs])
    return float((tokens == tokens[0]).all((0, 2)).mean())


def _tpot(run: Any) -> np.ndarray:
    """Returns [batch], ms per token of a row after its first.

    All rows decode in one compiled loop, and a round takes the same time for every row; a row that
    needs fewer rounds finishes earlier.
    """
    rounds = np.array([counts.target_passes for counts in run.stats.by_request])
    round_ms = 1e3 * run.stats.decode_s / run.stats.rounds
    return round_ms * rounds / (run.stats.emitted / len(rounds))


def _rate(run: Any) -> float:
    return run.stats.emitted / run.stats.decode_s


def _step_s(runs: Sequence[Any]) -> float:
    """Returns the median seconds of a step."""
    return statistics.median(run.stats.decode_s / run.stats.rounds for run in runs)
