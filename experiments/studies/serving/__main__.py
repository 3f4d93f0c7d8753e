"""Continuous batching against static batches of the same size, on requests of ragged lengths.

`python -m experiments.studies.serving` decodes the same requests in several ways, with and without
a drafter, and interleaves them:

- an engine, which keeps prefixes if the prompts share one;
- the same engine with static batches: `slots` requests at a time, in the order of arrival;
- `magicjax.generate` with the same static batches, each in the smallest caches that hold it.

A static batch starts when all of its requests have arrived and the batch before it has ended, and
lasts as long as its longest request. Compilation is not timed; `generate` compiles for every batch.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tyro

import magicjax
from experiments import prompts
from magicjax.benchmarks.tables import record_table
from magicjax.drafters.spec import make_drafter
from magicjax.engine.handle import Handle
from magicjax.files import write_atomically

ENGINE, ENGINE_BATCHES, GENERATE = "engine", "engine, static batches", "generate, static batches"


@dataclasses.dataclass
class Settings:
    """Requests, and the engine that serves them.

    Attributes:
      target: directory of the target.
      dtype: of the models.
      drafter: as on the command line; "none": only plain decoding.
      tree: of the drafter.
      results: folder.
      slots: of the engine, and rows of a static batch.
      requests: their number.
      rate: requests per second, with exponential intervals; None: all arrive at once.
      prompt_tokens: shortest and longest prompt, uniform in the logarithm.
      shared_tokens: that all prompts begin with, besides; 0: none.
      long_tokens: prompt of the request in the middle; None: as the others.
      new_tokens: fewest and most new tokens; n has a probability proportional to 1/n (Zipf).
      rounds_per_step: of the engine.
      prefill_chunk: of the engine.
      repeats: of the timing, after one run that compiles.
      seed: of lengths and arrivals.
    """

    target: str = "experiments/zoo/target"
    dtype: str = "float32"
    drafter: str = "prompt-lookup:4"
    tree: str = "chain:4"
    results: str = "results/serving"
    slots: int = 8
    requests: int = 64
    rate: float | None = None
    prompt_tokens: tuple[int, int] = (16, 256)
    shared_tokens: int = 0
    long_tokens: int | None = None
    new_tokens: tuple[int, int] = (16, 512)
    rounds_per_step: int = 8
    prefill_chunk: int = 512
    repeats: int = 3
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests: token ids, limits of new tokens, and seconds of arrival."""

    rows: list[np.ndarray]
    limits: list[int]
    arrivals: list[float]


@dataclasses.dataclass(frozen=True)
class Served:
    """One run: its texts and seconds, and of each request the seconds from its arrival.

    Attributes:
      texts: new tokens of each request.
      seconds: from the first arrival to the last end.
      prefill_s: of all requests.
      stall_s: the longest time between two pieces of any request; None for `generate`.
      ttft_s: time to first token.
      total_s: time to the end of the request, or of its static batch.
    """

    texts: list[np.ndarray]
    seconds: float
    ttft_s: list[float]
    total_s: list[float]
    prefill_s: float
    stall_s: float | None = None

    def record(self) -> dict[str, float]:
        tokens = sum(map(len, self.texts))
        found = {"tokens/s": tokens / self.seconds, "seconds": self.seconds}
        found |= {"prefill s": self.prefill_s}
        for name, values in (("TTFT", self.ttft_s), ("total", self.total_s)):
            found |= {f"{name} p{p} s": float(np.percentile(values, p)) for p in (50, 95)}
        later = [
            (total - first) / max(1, len(text) - 1)
            for text, first, total in zip(self.texts, self.ttft_s, self.total_s, strict=True)
        ]
        found |= {f"TPOT p{p} ms": 1e3 * float(np.percentile(later, p)) for p in (50, 95)}
        return found if self.stall_s is None else found | {"longest stall s": self.stall_s}


def make_workload(settings: Settings, tokenizer: Any) -> Workload:
    """Returns requests of ragged lengths."""
    rng, (low, high) = np.random.default_rng(settings.seed), settings.prompt_tokens
    count, longest = settings.requests, max(high, settings.long_tokens or 0)
    made = prompts.make(prompts.STDLIB, tokenizer, "", count, longest, settings.seed)
    lengths = np.exp(rng.uniform(np.log(low), np.log(high), count)).astype(int)
    if settings.long_tokens is not None:
        lengths[count // 2] = settings.long_tokens
    counts = np.arange(settings.new_tokens[0], settings.new_tokens[1] + 1)
    limits = rng.choice(counts, count, p=(1 / counts) / (1 / counts).sum())
    gaps = np.zeros(count)
    if settings.rate is not None:
        gaps = rng.exponential(1 / settings.rate, count)
    shared = np.zeros(0, np.int32)
    if settings.shared_tokens:
        seed = settings.seed + 1
        (document,) = prompts.make(prompts.STDLIB, tokenizer, "", 1, settings.shared_tokens, seed)
        shared = document.tokens
    return Workload(
        [np.concatenate([shared, p.tokens[-n:]]) for p, n in zip(made, lengths, strict=True)],
        limits.tolist(),
        np.cumsum(gaps).tolist(),
    )


def serve(engine: magicjax.Engine, workload: Workload, batch: int | None = None) -> Served:
    """Returns the run of an engine; sleeps while no request has arrived.

    Args:
      engine: idle.
      workload: the requests.
      batch: submit as many requests at a time, when those before have finished; None: each when it
        arrives.
    """
    before, start, count = engine.stats.prefill_s, time.monotonic(), len(workload.rows)
    handles: list[Handle] = []
    newest: dict[int, float] = {}  # time of the newest piece of each request
    stall_s = 0.0
    while len(handles) < count or not all(handle.finished for handle in handles):
        now = time.monotonic() - start
        idle = all(handle.finished for handle in handles)
        arrived = sum(arrival <= now for arrival in workload.arrivals)
        if batch is not None:
            following = min(count, len(handles) + batch)
            arrived = following if idle and arrived >= following else len(handles)
        for i in range(len(handles), arrived):
            handles.append(engine.submit(workload.rows[i], max_new_tokens=workload.limits[i]))
        if idle and len(handles) < count and arrived <= len(handles) and not engine.stats.waiting:
            last = len(handles) if batch is None else min(count, len(handles) + batch) - 1
            time.sleep(max(0.0, workload.arrivals[last] - now))
        engine.step()
        for i, handle in enumerate(handles):
            if handle.arrived():
                now = time.monotonic()
                stall_s = max(stall_s, now - newest.get(i, now))
                newest[i] = now
    results = [handle.result() for handle in handles]
    late = [  # from the arrival, which can be during a step, to `submit`
        handle.submitted.submitted_s - start - arrival
        for handle, arrival in zip(handles, workload.arrivals, strict=True)
    ]
    return Served(
        [result.tokens for result in results],
        time.monotonic() - start,
        [(result.stats.ttft_s or 0.0) + wait for result, wait in zip(results, late, strict=True)],
        [result.stats.total_s + wait for result, wait in zip(results, late, strict=True)],
        engine.stats.prefill_s - before,
        stall_s,
    )


def static(settings: Settings, target, drafting: dict, workload: Workload) -> Served:
    """Returns the run in static batches, whose waiting is computed from their seconds."""
    texts, ttft_s, total_s, prefill_s, now = [], [], [], 0.0, 0.0
    everyone = range(len(workload.rows))
    for rows in (everyone[n : n + settings.slots] for n in everyone[:: settings.slots]):
        output = magicjax.generate(
            target,
            [workload.rows[i] for i in rows],
            max_new_tokens=[workload.limits[i] for i in rows],
            eos_token_id=[],
            **drafting,
        )
        arrivals = [workload.arrivals[i] for i in rows]
        start, stats = max(now, *arrivals), output.stats
        now = start + stats.prefill_s + stats.decode_s
        prefill_s += stats.prefill_s
        texts += [row[:n] for row, n in zip(output.tokens, output.lengths, strict=True)]
        ttft_s += [start + stats.prefill_s - arrival for arrival in arrivals]
        total_s += [now - arrival for arrival in arrivals]
    return Served(texts, now, ttft_s, total_s, prefill_s)


def measure(settings: Settings) -> list[dict]:
    """Returns a record for each way of serving; medians over the repeats."""
    target = magicjax.load(settings.target, dtype=settings.dtype)
    workload = make_workload(settings, target.tokenizer)
    runs: dict[tuple[str, str], list[Served]] = {}
    drafters = _drafters(settings)
    engines = {name: _engine(settings, target, workload, d) for name, d in drafters.items()}
    for _ in range(settings.repeats + 1):
        for name, drafting in drafters.items():
            for way, served in _serve_all(settings, target, engines[name], drafting, workload):
                runs.setdefault((way, name), []).append(served)
    reference = runs[GENERATE, "plain"][0].texts
    records: list[dict[str, Any]] = []
    for (way, name), repeats in runs.items():
        measured = [served.record() for served in repeats[1:]]
        medians = {key: float(np.median([m[key] for m in measured])) for key in measured[0]}
        pairs = zip(repeats[0].texts, reference, strict=True)
        differing = sum(not np.array_equal(a, b) for a, b in pairs)
        records.append({"serving": way, "drafter": name, **medians, "differing": differing})
    baseline = {r["drafter"]: r["tokens/s"] for r in records if r["serving"] == GENERATE}
    return [r | {"speedup": r["tokens/s"] / baseline[r["drafter"]]} for r in records]


def _drafters(settings: Settings) -> dict[str, dict]:
    """Returns the options of each drafter, "plain" first."""
    if settings.drafter == "none":
        return {"plain": {}}

    def load(path):
        return magicjax.load(path, dtype=settings.dtype)

    tree = magicjax.parse_tree(settings.tree)
    drafter = make_drafter(settings.drafter, load)
    return {"plain": {}, settings.drafter: dict(drafter=drafter, tree=tree)}


def _engine(settings: Settings, target, workload: Workload, drafting: dict) -> magicjax.Engine:
    """Returns an engine that has compiled its programs."""
    lengths = [len(row) + n for row, n in zip(workload.rows, workload.limits, strict=True)]
    engine = magicjax.Engine(
        target,
        slots=settings.slots,
        capacity=max(lengths),
        max_new_tokens=settings.new_tokens[1],
        rounds_per_step=settings.rounds_per_step,
        prefill_chunk=settings.prefill_chunk,
        prefix_bytes=None if settings.shared_tokens else 0,
        eos_token_id=[],
        **drafting,
    )
    engine.warm_up()
    return engine


def _serve_all(
    settings: Settings, target, engine: magicjax.Engine, drafting: dict, workload: Workload
) -> Iterator[tuple[str, Served]]:
    """Yields the name of each way of serving, and a run."""
    for way, batch in ((ENGINE, None), (ENGINE_BATCHES, settings.slots)):
        engine.forget_prefixes()
        yield way, serve(engine, workload, batch)
    yield GENERATE, static(settings, target, drafting, workload)


def main(settings: Settings) -> None:
    """Measures, prints a table and writes a JSON file."""
    records = measure(settings)
    written = {"settings": dataclasses.asdict(settings), "records": records}
    path = pathlib.Path(settings.results) / "serving.json"
    write_atomically(path, json.dumps(written, indent=1) + "\n")
    print(record_table(records))
    print(
        "Speedup: tokens/s divided by those of generate with the same drafter. Differing: texts "
        "that differ from those of plain generate. Longest stall: between two pieces of a text."
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
