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
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tyro

import magicjax
from experiments import prompts
from experiments.runner.serving.workload import Run, Workload, arrivals, ragged, serve, zipf
from magicjax.benchmarks.tables import record_table
from magicjax.drafters.spec import make_drafter
from magicjax.files import write_atomically

ENGINE, ENGINE_BATCHES, GENERATE = "engine", "engine, static batches", "generate, static batches"


@dataclasses.dataclass
class Settings:
    """Requests, and the engine that serves them.

    Attributes:
      target: directory of the target.
      dtype: of the models.
      requests: their number.
      prompt_tokens: shortest and longest prompt, uniform in the logarithm.
      shared_tokens: that all prompts begin with, besides; 0: none.
      long_tokens: prompt of the request in the middle; None: as the others.
      new_tokens: fewest and most new tokens; n has a probability proportional to 1/n (Zipf).
      seed: of lengths and arrivals.
      drafter: as on the command line; "none": only plain decoding.
      tree: of the drafter.
      results: folder.
      slots: of the engine, and rows of a static batch.
      rate: requests per second, with exponential intervals; infinity: all arrive at once.
      rounds_per_step: of the engine.
      prefill_chunk: of the engine.
      repeats: of the timing, after one run that compiles.
    """

    target: str = "experiments/zoo/target"
    dtype: str = "float32"
    requests: int = 64
    prompt_tokens: tuple[int, int] = (16, 256)
    shared_tokens: int = 0
    long_tokens: int | None = None
    new_tokens: tuple[int, int] = (16, 512)
    seed: int = 0
    drafter: str = "prompt-lookup:4"
    tree: str = "chain:4"
    results: str = "results/serving"
    slots: int = 8
    rate: float = math.inf
    rounds_per_step: int = 8
    prefill_chunk: int = 512
    repeats: int = 3


def make_workload(settings: Settings, tokenizer: Any) -> Workload:
    """Returns requests of ragged lengths."""
    count, rng = settings.requests, np.random.default_rng(settings.seed)
    longest = max(settings.prompt_tokens[1], settings.long_tokens or 0)
    made = prompts.make(prompts.STDLIB, tokenizer, "", count, longest, settings.seed)
    lengths = ragged(rng, *settings.prompt_tokens, count)
    if settings.long_tokens is not None:
        lengths[count // 2] = settings.long_tokens
    shared = np.zeros(0, np.int32)
    if settings.shared_tokens:
        seed = settings.seed + 1
        (document,) = prompts.make(prompts.STDLIB, tokenizer, "", 1, settings.shared_tokens, seed)
        shared = document.tokens
    return Workload(
        [np.concatenate([shared, p.tokens[-n:]]) for p, n in zip(made, lengths, strict=True)],
        [
            magicjax.SamplingParams(max_tokens=limit)
            for limit in zipf(rng, *settings.new_tokens, count)
        ],
        arrivals("poisson", settings.rate, count, settings.seed),
    )


def static(settings: Settings, target, drafting: dict, workload: Workload) -> Run:
    """Returns the run in static batches, whose waiting is computed from their seconds."""
    texts, ttft_s, total_s, prefill_s, now = [], [], [], 0.0, 0.0
    everyone = range(len(workload.rows))
    for rows in (everyone[n : n + settings.slots] for n in everyone[:: settings.slots]):
        output = magicjax.generate(
            target,
            [workload.rows[i] for i in rows],
            [workload.params[i] for i in rows],
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
    return Run(texts, now, ttft_s, total_s, prefill_s)


def measure(settings: Settings) -> list[dict]:
    """Returns a record for each way of serving; medians over the repeats."""
    target = magicjax.load(settings.target, dtype=settings.dtype)
    workload = make_workload(settings, target.tokenizer)
    runs: dict[tuple[str, str], list[Run]] = {}
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

    def load(path, **options):
        return magicjax.load(path, dtype=settings.dtype, **options)

    tree = magicjax.parse_tree(settings.tree)
    drafter = make_drafter(settings.drafter, load)
    return {"plain": {}, settings.drafter: dict(drafter=drafter, tree=tree)}


def _engine(settings: Settings, target, workload: Workload, drafting: dict) -> magicjax.Engine:
    """Returns an engine that has compiled its programs."""
    lengths = [len(row) + n for row, n in zip(workload.rows, workload.limits, strict=True)]
    config = magicjax.EngineConfig(
        slots=settings.slots,
        capacity=max(lengths),
        max_tokens=settings.new_tokens[1],
        rounds_per_step=settings.rounds_per_step,
        prefill_chunk=settings.prefill_chunk,
        prefix_bytes=None if settings.shared_tokens else 0,
        eos_token_id=[],
    )
    engine = magicjax.Engine(target, config=config, **drafting)
    engine.warm_up()
    return engine


def _serve_all(
    settings: Settings, target, engine: magicjax.Engine, drafting: dict, workload: Workload
) -> Iterator[tuple[str, Run]]:
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
