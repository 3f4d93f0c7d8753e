"""Measures a cell in turns with plain decoding of the same prompts: plain, cell, plain, cell, ...

The first turn compiles and warms up and is not timed; a cell without repeats has no other, and
learns what does not depend on time. After the timed turns one more run is traced.
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
from experiments.prompts import metrics
from experiments.runner import exactness
from experiments.runner.provenance import device_name
from experiments.runner.workload import Bench
from experiments.schema.grid import Cell, columns, plain_of
from magicjax import cost_model, placement
from magicjax.benchmarks import profile_phases
from magicjax.cli.plan import written_tree
from pallas_kernels.benchmarks import bandwidth
from sharding import factored


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a cell gave: its metrics, and a line for each request."""

    metrics: dict[str, Any]
    requests: list[dict[str, Any]]


def measure(bench: Bench, cell: Cell, folder: pathlib.Path | None = None) -> Measured:
    """Returns what a cell gave.

    Args:
      bench: what runs it.
      cell: its settings.
      folder: for a trace; None: none is kept.

    Raises:
      RuntimeError: two runs of the cell differ, or a timed one compiled.
    """
    plain = plain_of(cell)
    outputs: dict[Cell, list] = {plain: [], cell: []}  # one, if the cell is plain decoding
    read_gbs = bandwidth.read_bandwidth() / 1e9 if cell.repeats else None
    for turn in range(cell.repeats + 1):
        for one, runs in outputs.items():
            print(f"{one.label}: {f'run {turn}' if turn else 'compiles'}", flush=True)
            runs.append(bench.run(one))
    return _measured(bench, cell, outputs[cell], outputs[plain], read_gbs, folder)


def _measured(
    bench: Bench,
    cell: Cell,
    runs: list,
    plain_runs: list,
    read_gbs: float | None,
    folder: pathlib.Path | None,
) -> Measured:
    """Returns what the runs of a cell, and plain decoding's beside them, come to."""
    warm_up, *timed = runs
    plain_timed = plain_runs[1:]
    if any(run.stats.compile_s for run in timed + plain_timed):
        raise RuntimeError(f"{cell.label}: a timed run compiled again, so its time means nothing")
    match = _match(bench, cell, runs, plain_runs)
    stats = warm_up.stats
    requests = _requests(bench, cell, runs, match)
    spent, untraced = _phases(bench, cell, folder) if timed else ({}, "")
    scores = [request["score"] for request in requests if request["score"] is not None]
    first = min(match.divergences, key=lambda d: d.position, default=None) if match else None
    row = columns(cell) | {
        "device": device_name(),
        "status": "ok",
        "error": "",
        "tau": stats.tau,
        "tau_by_request": stats.tau_by_request,
        "block_efficiency": 1 + stats.accepted / stats.rounds,
        "nodes_per_round": stats.nodes_per_round,
        "acceptance_rate": None if cell.draft == "none" else stats.acceptance_rate,
        "exact_match": match.exact if match else None,
        "noise_match": _same(plain_runs),
        "ties": match.ties if match else 0,
        "first_divergence": first.position if first else None,
        "top2_margin": first.margin if first else None,
        "score": statistics.mean(scores) if scores else None,
        "compile_s": sum(run.stats.compile_s for run in runs) + bench.choosing_s,
        "kv_mb_target": stats.kv_bytes_target / 1e6,
        "kv_mb_draft": stats.kv_bytes_draft / 1e6,
        "repeated_8grams": metrics.repeated_ngrams(np.asarray(warm_up.tokens)),
        "agreement": bench.agreement(cell),
        "rounds": stats.rounds,
        "steps": stats.steps,
        "chosen": _chosen(warm_up.choice),
        "attention_backend": stats.attention_backend,
        "memory_mb": _peak_memory() / 1e6,
    }
    row |= _times(bench, cell, timed, plain_timed, read_gbs)
    row |= {f"{name}_s": seconds for name, seconds in spent.items()}
    found = {
        "row": row,
        "runs": [_run(run) for run in timed],
        "plain_runs": [_run(run) for run in plain_timed],
        "histogram": list(stats.histogram),
        "acceptance_by_depth": list(stats.acceptance_by_depth),
        "acceptance_if_reached": list(stats.acceptance_if_reached),
        "phases": spent,
        "phases_error": untraced,
        "divergences": [str(d) for d in match.divergences] if match else [],
    }
    return Measured(found, requests)


def _requests(
    bench: Bench, cell: Cell, runs: list, match: exactness.Match | None
) -> list[dict[str, Any]]:
    """Returns a line for each row of the batch: what it gave, how it was accepted, how fast."""
    out, tasks = runs[0], bench.tasks(cell)
    parted = {d.row: d for d in match.divergences} if match else {}
    latencies = np.median([_tpot(run) for run in runs[1:]], 0) if runs[1:] else None
    lines = []
    for i, counted in enumerate(out.stats.histogram_by_request):
        parting, task = parted.get(i), tasks[i] if tasks else None
        text = out.texts[i] if out.texts else None
        scored = task is not None and task.answer and text is not None
        lines.append(
            {
                "request": i,
                "tokens": np.asarray(out.tokens)[i].tolist(),
                "text": text,
                "answer": list(task.answer) if task else [],
                "source": task.source if task else "",
                "score": prompts.score(task, text) if scored else None,
                "rounds": sum(counted),
                "tau": (cell.new_tokens - 1) / sum(counted),
                "histogram": list(counted),
                "exact": (parting is None or parting.is_tie) if match else None,
                "first_divergence": parting.position if parting else None,
                "top2_margin": parting.margin if parting else None,
                "tpot_ms": float(latencies[i]) if latencies is not None else None,
            }
        )
    return lines


def _chosen(choice: magicjax.Choice | None) -> str:
    """Returns what "auto" chose, as the tables name it; "" of other methods."""
    if choice is None:
        return ""
    return choice.name if choice.tree is None else f"{choice.name}, {written_tree(choice.tree)}"


def _phases(bench: Bench, cell: Cell, folder: pathlib.Path | None) -> tuple[dict[str, float], str]:
    """Returns (seconds of each phase in the first rounds of one more run, why there are none).

    A device that cannot be traced is no reason to lose what was measured, unless a trace was asked
    for. There are none either of a loop so small that XLA makes one operation of it.
    """
    if not (cell.phases or folder):
        return {}, ""
    target, text, given = bench.call(cell)
    try:
        found = profile_phases.trace(target, text, folder, **given).seconds
    except ValueError as error:
        if folder:
            raise
        print(f"{cell.label}: not traced: {error}", flush=True)
        return {}, str(error)
    return (found, "") if found["score"] else ({}, "the loop is one operation of the trace")


def _peak_memory() -> float:
    """Returns the most bytes held so far, of a GPU, or of this process if devices do not tell."""
    of_device = [device.memory_stats() for device in jax.local_devices()]
    if all(of_device):
        return float(max(stats["peak_bytes_in_use"] for stats in of_device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


TIMES = (
    *("decode_tok_s", "ar_decode_tok_s", "speedup", "speedup_low", "speedup_high", "prefill_s"),
    *("decode_s", "round_ms", "ar_gbs", "read_gbs", "bandwidth_share", "ttft_s", "tpot_ms_p50"),
    *("tpot_ms_p99", "decode_tok_s_user", "decode_tok_s_device"),
)


def _in_stages(cell: Cell) -> bool:
    return cell.devices is not None and cell.devices.shape["stage"] > 1


def _moved(target: Any, cell: Cell) -> float:
    """Returns the bytes that all devices together read in an average step of plain decoding."""
    weights = cost_model.weight_bytes(target)
    entries = cost_model.step_bytes(target, cell.batch, cell.context, cell.new_tokens) - weights
    if not cell.devices:
        return weights + entries
    split = placement.split_of(target.config, None, factored(cell.devices))
    # Every group has the weights, and KV heads may be held several times.
    return cell.devices.shape["data"] * weights + entries * split.shards / split.kv_shards


def _times(
    bench: Bench, cell: Cell, timed: list, plain_timed: list, read_gbs: float | None
) -> dict[str, float | None]:
    """Returns the columns that say how long a cell took; None in all if nothing was timed."""
    if read_gbs is None:
        return dict.fromkeys(TIMES)
    median = statistics.median
    rate = median(_rate(run) for run in timed)
    plain_rate = median(_rate(run) for run in plain_timed)
    paired = [_rate(a) / _rate(b) for a, b in zip(timed, plain_timed, strict=True)]
    target = bench.target_of(cell)
    step_s = median(run.stats.decode_s / run.stats.steps for run in plain_timed)
    moved = _moved(target, cell)
    latencies = np.concatenate([_tpot(run) for run in timed])
    ar_gbs = moved / step_s / 1e9
    if cell.devices and jax.default_backend() != "cpu":  # devices on a CPU share its memory
        read_gbs *= cell.devices.size
    return {
        "decode_tok_s": rate,
        "ar_decode_tok_s": plain_rate,
        "speedup": rate / plain_rate,
        "speedup_low": min(paired),
        "speedup_high": max(paired),
        "decode_tok_s_user": rate / cell.batch,
        "decode_tok_s_device": rate / (cell.devices.size if cell.devices else 1),
        "ttft_s": median(run.stats.prefill_s for run in timed),
        "tpot_ms_p50": float(np.percentile(latencies, 50)),
        "tpot_ms_p99": float(np.percentile(latencies, 99)),
        "prefill_s": median(run.stats.prefill_s for run in timed),
        "decode_s": median(run.stats.decode_s for run in timed),
        "round_ms": 1e3 * median(run.stats.decode_s / run.stats.steps for run in timed),
        "ar_gbs": ar_gbs,
        "read_gbs": read_gbs,
        # Of weights that come over a link the share would say nothing, nor of stages, which read
        # theirs once for every micro-batch.
        "bandwidth_share": None if cell.offload or _in_stages(cell) else ar_gbs / read_gbs,
    }


def _match(bench: Bench, cell: Cell, runs: list, plain_runs: list) -> exactness.Match | None:
    """Returns how the cell's tokens compare with plain decoding's; every run must say the same.

    None where only the distribution is the same: naive verification samples the very tokens of
    plain sampling, the other rules do not.

    Raises:
      RuntimeError: two runs of the cell differ, where those of plain decoding do not.
    """
    if _same(runs) < 1 and _same(plain_runs) == 1:
        raise RuntimeError(f"{cell.label}: two runs on the same prompts differ")
    plain, first = np.asarray(plain_runs[0].tokens), np.asarray(runs[0].tokens)
    if cell.do_sample:
        comparable = cell.draft == "none" or cell.verifier == "naive"
        return exactness.compare_sampled(plain, first) if comparable else None
    if np.array_equal(plain, first):
        return exactness.Match(len(plain), ())
    target = bench.read_by(cell.target, cell)
    if target is None:  # who could say whether they part at a tie
        return exactness.compare_sampled(plain, first)
    return exactness.compare(target, bench.prompts(cell), plain, first)


def _same(runs: Sequence[Any]) -> float:
    """Returns the share of rows whose tokens are the same in all runs."""
    tokens = np.stack([np.asarray(run.tokens) for run in runs])
    return float((tokens == tokens[0]).all((0, 2)).mean())


def _tpot(run: Any) -> np.ndarray:
    """Returns [batch], ms for each token of a row after its first.

    All rows decode in one compiled loop, each round taking as long for every row: a row that needs
    fewer rounds is done earlier.
    """
    rounds = np.array([sum(counted) for counted in run.stats.histogram_by_request])
    round_ms = 1e3 * run.stats.decode_s / run.stats.steps
    return round_ms * rounds / (run.stats.emitted / len(rounds))


def _rate(run: Any) -> float:
    return run.stats.emitted / run.stats.decode_s


def _run(run: Any) -> dict[str, float]:
    times, counts = ("prefill_s", "decode_s", "tokens_per_s"), ("rounds", "steps", "emitted")
    names = (*times, *counts, "drafted", "accepted")
    return {name: float(getattr(run.stats, name)) for name in names}
