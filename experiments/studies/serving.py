"""Continuous batching against static batches of the same size, on requests of ragged lengths.

`python -m experiments.studies.serving` decodes the same requests by an engine and by batches of
`slots` requests in the order of arrival, with and without a drafter. A static batch starts when all
of its requests have arrived and the batch before it has ended, and lasts as long as its longest
request. Compilation is not timed. The runs are interleaved.
"""

import dataclasses
import json
import pathlib
import time
from typing import Any

import numpy as np
import tyro

import magicjax
from experiments import prompts
from magicjax.benchmarks.tables import record_table
from magicjax.drafters.spec import make_drafter
from magicjax.engine.handle import Handle
from magicjax.files import write_atomically


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
      ttft_s: time to first token.
      total_s: time to the end of the request, or of its static batch.
    """

    texts: list[np.ndarray]
    seconds: float
    ttft_s: list[float]
    total_s: list[float]

    def record(self) -> dict[str, float]:
        tokens = sum(map(len, self.texts))
        found = {"tokens/s": tokens / self.seconds, "seconds": self.seconds}
        for name, values in (("TTFT", self.ttft_s), ("total", self.total_s)):
            found |= {f"{name} p{p} s": float(np.percentile(values, p)) for p in (50, 95)}
        later = [
            (total - first) / max(1, len(text) - 1)
            for text, first, total in zip(self.texts, self.ttft_s, self.total_s, strict=True)
        ]
        return found | {f"TPOT p{p} ms": 1e3 * float(np.percentile(later, p)) for p in (50, 95)}


def make_workload(settings: Settings, tokenizer) -> Workload:
    """Returns requests of ragged lengths."""
    rng, (low, high) = np.random.default_rng(settings.seed), settings.prompt_tokens
    made = prompts.make(prompts.STDLIB, tokenizer, "", settings.requests, high, settings.seed)
    lengths = np.exp(rng.uniform(np.log(low), np.log(high), settings.requests)).astype(int)
    counts = np.arange(settings.new_tokens[0], settings.new_tokens[1] + 1)
    limits = rng.choice(counts, settings.requests, p=(1 / counts) / (1 / counts).sum())
    gaps = np.zeros(settings.requests)
    if settings.rate is not None:
        gaps = rng.exponential(1 / settings.rate, settings.requests)
    return Workload(
        [prompt.tokens[-n:] for prompt, n in zip(made, lengths, strict=True)],
        limits.tolist(),
        np.cumsum(gaps).tolist(),
    )


def serve(engine: magicjax.Engine, workload: Workload) -> Served:
    """Returns the run of an engine; sleeps while no request has arrived."""
    start, count = time.monotonic(), len(workload.rows)
    handles: list[Handle] = []
    requests = list(zip(workload.rows, workload.limits, workload.arrivals, strict=True))
    while len(handles) < count or not all(handle.finished for handle in handles):
        now = time.monotonic() - start
        for row, limit, arrival in requests[len(handles) :]:
            if arrival > now:
                break
            handles.append(engine.submit(row, max_new_tokens=limit))
        if all(handle.finished for handle in handles) and len(handles) < count:
            time.sleep(max(0.0, requests[len(handles)][2] - now))
        engine.step()
    seconds = time.monotonic() - start
    results = [handle.result() for handle in handles]
    # From the arrival, which can be during a step that ends before `submit`.
    late = [
        handle.submitted.submitted_s - start - arrival
        for handle, arrival in zip(handles, workload.arrivals, strict=True)
    ]
    return Served(
        [result.tokens for result in results],
        seconds,
        [(result.stats.ttft_s or 0.0) + wait for result, wait in zip(results, late, strict=True)],
        [result.stats.total_s + wait for result, wait in zip(results, late, strict=True)],
    )


def static(settings: Settings, target, drafting: dict, workload: Workload) -> Served:
    """Returns the run in static batches, whose waiting is computed from their seconds."""
    texts, ttft_s, total_s, now = [], [], [], 0.0
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
        texts += [row[:n] for row, n in zip(output.tokens, output.lengths, strict=True)]
        ttft_s += [start + stats.prefill_s - arrival for arrival in arrivals]
        total_s += [now - arrival for arrival in arrivals]
    return Served(texts, now, ttft_s, total_s)


def measure(settings: Settings) -> list[dict]:
    """Returns a record for each way of serving; medians over the repeats."""
    target = magicjax.load(settings.target, dtype=settings.dtype)
    workload = make_workload(settings, target.tokenizer)
    drafters: dict[str, dict] = {"plain": {}}
    if settings.drafter != "none":

        def load(path):
            return magicjax.load(path, dtype=settings.dtype)

        drafter = make_drafter(settings.drafter, load)
        tree = magicjax.parse_tree(settings.tree)
        drafters[settings.drafter] = dict(drafter=drafter, tree=tree)
    engines = {
        name: magicjax.Engine(
            target,
            slots=settings.slots,
            capacity=settings.prompt_tokens[1] + settings.new_tokens[1],
            max_new_tokens=settings.new_tokens[1],
            rounds_per_step=settings.rounds_per_step,
            prefill_chunk=settings.prefill_chunk,
            prefix_bytes=0,  # the repeats have the same prompts
            eos_token_id=[],
            **drafting,
        )
        for name, drafting in drafters.items()
    }
    for engine in engines.values():
        engine.warm_up()
    runs: dict[tuple[str, str], list[Served]] = {}
    for _ in range(settings.repeats + 1):
        for name, drafting in drafters.items():
            served = serve(engines[name], workload)
            runs.setdefault(("engine", name), []).append(served)
            served = static(settings, target, drafting, workload)
            runs.setdefault(("static batches", name), []).append(served)
    records: list[dict[str, Any]] = []
    reference = runs["static batches", "plain"][0].texts
    for (how, name), repeats in runs.items():
        measured = [served.record() for served in repeats[1:]]
        medians = {key: float(np.median([m[key] for m in measured])) for key in measured[0]}
        differing = sum(
            not np.array_equal(a, b) for a, b in zip(repeats[0].texts, reference, strict=True)
        )
        records.append({"serving": how, "drafter": name, **medians, "differing": differing})
        if how == "engine":
            stats = engines[name].stats
            records[-1]["host share"] = stats.host_s / (stats.host_s + stats.loop_s)
    baseline = {r["drafter"]: r["tokens/s"] for r in records if r["serving"] != "engine"}
    return [r | {"speedup": r["tokens/s"] / baseline[r["drafter"]]} for r in records]


def main(settings: Settings) -> None:
    """Measures, prints a table and writes a JSON file."""
    records = measure(settings)
    written = {"settings": dataclasses.asdict(settings), "records": records}
    path = pathlib.Path(settings.results) / "serving.json"
    write_atomically(path, json.dumps(written, indent=1) + "\n")
    print(record_table(records))
    print(
        "Speedup: tokens/s of the engine over static batches with the same drafter. Differing: "
        "texts that differ from those of plain static batches."
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
