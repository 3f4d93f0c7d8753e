"""Measures a cell with slots: an engine serves requests, interleaved with plain decoding.

Both engines get the same requests at the same times, one run after the other. `Engine.warm_up`
compiles, and is not timed. Every request generates as many tokens as it is allowed.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

import magicjax
from experiments.prompts import Prompt
from experiments.runner import exactness
from experiments.runner.measure import CURVES, peak_memory
from experiments.runner.provenance import device_name
from experiments.runner.serving.workload import (
    ServingRun,
    Workload,
    arrivals,
    percentiles,
    ragged,
    serve,
    zipf,
)
from experiments.runner.workload import Bench
from experiments.schema.columns import complete
from experiments.schema.grid import Cell, columns, options, plain_of
from magicjax.decoding import program_cache
from magicjax.decoding.counts import Counts, tau_by_request


def measure(bench: Bench, cell: Cell) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the content of a cell's `metrics.json`, and the lines of its `requests.jsonl`.

    Raises:
      RuntimeError: a timed run compiled.
    """
    workload, plain = make_workload(bench, cell), plain_of(cell)
    engines = {served: _engine(bench, served) for served in dict.fromkeys((plain, cell))}
    compiled = program_cache.totals()
    runs_by_cell: dict[Cell, list[ServingRun]] = {served: [] for served in engines}
    for repeat in range(max(1, cell.repeats)):
        for served, engine in engines.items():
            bench.steps(f"{served.label}: run {repeat + 1} of {max(1, cell.repeats)}")
            engine.forget_texts()  # those of the run before are the same
            runs_by_cell[served].append(serve(engine, workload))
    if program_cache.totals() != compiled:
        raise RuntimeError(f"{cell.label}: a timed run compiled, so its time is invalid")
    rows: dict[Cell, dict[str, Any]] = {}
    for served, runs in runs_by_cell.items():  # the cell's are the last
        match = _match(bench, served, workload, runs, runs_by_cell[plain][0])
        row: dict[str, Any] = {"device": device_name(), "status": "ok", "error": ""}
        row |= _times(served, runs, runs_by_cell[plain]) if cell.repeats else {}
        row |= _acceptance(served, runs) | exactness.columns(match)
        rows[served] = complete(columns(served), row)
    rounds = runs[0].rounds_by_arm
    if cell.adaptive:
        rows[cell]["rounds_by_arm"] = ", ".join(f"{n} {mode}" for mode, n in rounds.items())
    rows[cell] |= {"compile_s": compiled[1], "memory_mb": peak_memory() / 1e6}
    metrics = {
        "row": rows[cell],
        "plain_row": rows[plain],
        "runs": [*map(_run, runs)],
        "plain_runs": [*map(_run, runs_by_cell[plain])],
        **_curves(cell, runs),
        "rounds_by_arm": {str(mode): n for mode, n in rounds.items()},
        "divergences": [str(d) for d in match.divergences] if match else [],
    }
    return metrics, _requests(bench.tasks(cell), workload, runs[0])


def make_workload(bench: Bench, cell: Cell) -> Workload:
    """Returns the requests of a cell, the same for all methods and rates."""
    count, rng = cell.num_requests, np.random.default_rng(cell.prompt_seed)
    lengths = ragged(rng, cell.min_context or cell.context, cell.context, count)
    limits = zipf(rng, cell.min_new_tokens or cell.new_tokens, cell.new_tokens, count)
    params = [dataclasses.replace(cell.params, max_tokens=limit) for limit in limits]
    if cell.temperature:  # each request has a seed of its own
        params = [dataclasses.replace(row, seed=cell.seed + i) for i, row in enumerate(params)]
    return Workload(
        [row[-n:] for row, n in zip(bench.prompts(cell), lengths, strict=True)],
        params,
        arrivals(cell.arrivals, cell.rate, count, cell.prompt_seed),
    )


def _engine(bench: Bench, cell: Cell) -> magicjax.Engine:
    """Returns an engine that has compiled its programs."""
    request = options(cell, lambda directory: bench.draft(directory, cell))
    config = magicjax.EngineConfig(
        slots=cell.slots,
        capacity=cell.context + cell.new_tokens,
        max_tokens=cell.new_tokens,
        sampling=cell.temperature > 0,
        verifier=request.verifier,
        eos_token_id=request.eos_token_id,
        adaptive=cell.adaptive,
        queue_limit=cell.num_requests,
        prefix_bytes=0,  # the runs repeat the same prompts
    )
    engine = magicjax.Engine(
        bench.target_of(cell), request.drafter, request.tree, config, mesh=request.mesh
    )
    engine.warm_up()
    return engine


def _times(
    cell: Cell, runs: Sequence[ServingRun], plain_runs: Sequence[ServingRun]
) -> dict[str, float]:
    """Returns tokens/s and goodput, medians over the runs, and percentiles over the requests."""

    def rate(runs: Sequence[ServingRun]) -> float:
        return statistics.median(_tokens(run) / run.seconds for run in runs)

    def goodput(runs: Sequence[ServingRun]) -> float:
        tpot_limit_s = cell.tpot_limit_ms / 1e3
        return statistics.median(run.goodput(cell.ttft_limit_s, tpot_limit_s) for run in runs)

    ttft, tpot, e2e = (
        percentiles(value for run in runs for value in getattr(run, name))
        for name in ("ttft_s", "tpot_s", "total_s")
    )
    return {
        "decode_tok_s": rate(runs),
        "ar_decode_tok_s": rate(plain_runs),
        "speedup": rate(runs) / rate(plain_runs),
        "decode_s": statistics.median(run.seconds for run in runs),
        "prefill_s": statistics.median(run.prefill_s for run in runs),
        "goodput": goodput(runs),
        "ar_goodput": goodput(plain_runs),
        **{f"ttft_s_p{p}": value for p, value in ttft.items()},
        **{f"tpot_ms_p{p}": 1e3 * value for p, value in tpot.items()},
        **{f"e2e_s_p{p}": value for p, value in e2e.items()},
    }


def _tokens(run: ServingRun) -> int:
    return sum(map(len, run.texts))


def _run(run: ServingRun) -> dict[str, Any]:
    return {
        "decode_s": run.seconds,
        "prefill_s": run.prefill_s,
        "tokens_per_s": _tokens(run) / run.seconds,
        "ttft_s": run.ttft_s,
        "tpot_s": run.tpot_s,
        "e2e_s": run.total_s,
    }


def _acceptance(cell: Cell, runs: Sequence[ServingRun]) -> dict[str, float | None]:
    """Returns means over all runs."""
    counts = _counts(runs)
    # With adaptive the rounds of a request have different trees, which are not counted.
    has_rate = not cell.is_plain and not cell.adaptive
    return {
        "tau": counts.tau,
        "tau_by_request": tau_by_request(request for run in runs for request in run.stats),
        "block_efficiency": counts.block_efficiency,
        "acceptance_rate": counts.acceptance_rate if has_rate else None,
        "target_passes": counts.target_passes / len(runs),
    }


def _curves(cell: Cell, runs: Sequence[ServingRun]) -> dict[str, Sequence[float]]:
    """Returns the histogram of accepted tokens and acceptance by depth; empty without a depth."""
    counts = Counts() if cell.is_plain or cell.adaptive else _counts(runs)
    return {name: list(getattr(counts, name)) for name in CURVES}


def _counts(runs: Sequence[ServingRun]) -> Counts:
    """Returns the counts of all requests of all runs."""
    return sum((request for run in runs for request in run.stats), Counts())


def _match(
    bench: Bench, cell: Cell, workload: Workload, runs: Sequence[ServingRun], plain: ServingRun
) -> exactness.Match | None:
    """Returns how the texts of all runs compare with plain decoding's.

    None if only the distribution is the same, as under sampling unless verified by "naive". A
    request counts once, by its first text that differs.
    """
    if cell.temperature and not cell.is_plain and cell.verifier != "naive":
        return None
    run_texts = [
        next((text for text in texts if not np.array_equal(text, expected)), expected)
        for expected, *texts in zip(plain.texts, *(run.texts for run in runs), strict=True)
    ]
    target = None if cell.temperature else bench.target_of(cell)
    return exactness.compare(target, workload.rows, _padded(plain.texts), _padded(run_texts))


def _padded(texts: Sequence[Int[np.ndarray, "T"]]) -> Int[np.ndarray, "N M"]:
    """Returns texts of different lengths as one array, filled up with zeros."""
    padded = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


def _requests(tasks: Sequence[Prompt], workload: Workload, run: ServingRun) -> list[dict[str, Any]]:
    """Returns a line for each request: lengths, acceptance, arrival, latencies, tokens."""
    names = ("prompt_tokens", "new_tokens", "rounds", "tau", "histogram")
    return [
        {
            "request": i,
            "category": tasks[i].category if tasks else "",
            "source": tasks[i].source if tasks else "",
            "score": None,  # a request may end before its answer
            **{name: getattr(run.stats[i], name) for name in names},
            "arrival_s": workload.arrivals[i],
            "ttft_s": run.ttft_s[i],
            "tpot_ms": None if (tpot_s := run.tpot_s[i]) is None else 1e3 * tpot_s,
            "e2e_s": run.total_s[i],
            "tokens": run.texts[i].tolist(),
        }
        for i in range(len(run.texts))
    ]
