"""Times magicjax and Hugging Face transformers' `generate` on the same models and prompts.

    python -m experiments.studies.hf_baseline FILE --baseline-python PYTHON [--key value]

PYTHON has torch and transformers; it runs `hf_baseline_worker.py`. Runs of both are interleaved,
greedy, in float32, and only decoding is timed: of transformers from the first call of a stopping
criterion, after prefill, to the last.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.runner import exactness
from experiments.runner.provenance import device_name
from experiments.runner.workload import Bench
from experiments.schema import config, grid
from experiments.schema.fields import ConfigError
from magicjax.benchmarks.tables import markdown_table
from magicjax.files import write_atomically
from magicjax.sources import checkpoint_directory

PROG = "python -m experiments.studies.hf_baseline"
PLAIN, STATIC = "magicjax plain", "HF static cache"
HEADER = ("batch", "context", "method", "tok/s", "over static", "prefill s", "equal", "ties")


# Arguments of `generate` in hf_baseline_worker.py by name in the table. assistant_tokens: 0 for an
# assistant with the library's settings, else the tokens it drafts at a time. The library supports
# assistants for one row only.
SETTINGS: dict[str, dict[str, Any]] = {
    STATIC: {"cache": "static"},
    "HF static cache, compiled": {"cache": "static", "compiled": True},
    "HF dynamic cache": {"cache": "dynamic"},
    "HF assisted, its settings": {"cache": "dynamic", "assistant_tokens": 0},
    "HF assisted, 4 tokens": {"cache": "dynamic", "assistant_tokens": 4},
}


class Baseline:
    """A process of the other interpreter, which answers one request at a time until we exit."""

    def __init__(self, python: str, threads: int):
        worker = pathlib.Path(__file__).with_name("hf_baseline_worker.py")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)  # ours would shadow the other interpreter's packages
        command = [python, str(worker), str(threads)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self.versions = self._answer()

    def request(self, **arguments: Any) -> dict[str, Any]:
        """Returns what `generate` of the worker returns.

        Raises:
          RuntimeError: the worker failed; the message has its traceback.
        """
        assert self.process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError):  # the worker has exited
            self.process.stdin.write(json.dumps(arguments) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None  # a pipe
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the baseline's Python exited with status {self.process.wait()}: it needs torch "
                "and transformers; see its output above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the baseline failed: {answer['error']}\n{answer['trace']}")
        return answer


class Run(NamedTuple):
    """One timed call: new tokens [B, M], and the rate of decoding without prefill."""

    tokens: np.ndarray
    tokens_per_s: float
    prefill_s: float


def run_magicjax(bench: Bench, cell: grid.Cell) -> Run:
    """Returns a run of a cell."""
    out = bench.run(cell)
    rate = out.stats.emitted / out.stats.decode_s
    return Run(np.asarray(out.tokens), rate, out.stats.prefill_s)


def run_baseline(
    baseline: Baseline, setting: dict[str, Any], cell: grid.Cell, prompts: list, assistant: str
) -> Run:
    """Returns a run of transformers; decoding lies between the first and the last time stamp."""
    directories = {"directory": cell.target}
    if "assistant_tokens" in setting:
        directories["assistant"] = assistant
    resolved = {name: str(checkpoint_directory(s).resolve()) for name, s in directories.items()}
    answer = baseline.request(prompts=prompts, new_tokens=cell.new_tokens, **setting, **resolved)
    (begin, first), (end, last) = answer["stamps"][0], answer["stamps"][-1]
    rate = cell.batch * (last - first) / (end - begin)
    return Run(np.array(answer["tokens"], np.int32), rate, begin)


def compare_group(
    bench: Bench, baseline: Baseline, group: list[grid.Cell], names: Sequence[str], bar: tqdm
) -> list[dict[str, Any]]:
    """Returns a row for each cell and for each named setting that supports the batch."""
    plain = group[0]
    prompts = bench.prompts(plain)
    assistants = [cell.model for cell in group if cell.draft == "small"]
    calls = {f"magicjax {c.method}": functools.partial(run_magicjax, bench, c) for c in group}
    for name in names:
        assisted = "assistant_tokens" in SETTINGS[name]
        if not assisted or (plain.batch == 1 and assistants):
            arguments = SETTINGS[name], plain, prompts.tolist(), assistants[0] if assisted else ""
            calls[name] = functools.partial(run_baseline, baseline, *arguments)
    runs: dict[str, list[Run]] = {name: [] for name in calls}
    for repeat in range(plain.repeats + 1):  # repeat 0 compiles and warms up
        for name, call in calls.items():
            shape = f"batch {plain.batch}, context {plain.context}"
            bar.set_description(f"{shape}, repeat {repeat}: {name}")
            runs[name].append(call())
            bar.update()
    target, expected = bench.target_of(plain), runs[PLAIN][0].tokens
    rows = []
    for name, (_, *timed) in runs.items():
        match = exactness.compare(target, prompts, expected, timed[0].tokens)
        rows.append(
            {
                "batch": plain.batch,
                "context": plain.context,
                "method": name,
                "tok_s": statistics.median(run.tokens_per_s for run in timed),
                "prefill_s": statistics.median(run.prefill_s for run in timed),
                "equal": float((timed[0].tokens == expected).all(1).mean()),
                "ties": match.ties,
                "divergences": [str(d) for d in match.divergences],
                "runs_tok_s": [run.tokens_per_s for run in timed],
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the comparison; `over static` divides by transformers with a static cache."""
    static = {(r["batch"], r["context"]): r["tok_s"] for r in rows if r["method"] == STATIC}
    return markdown_table(
        HEADER,
        (
            [r["batch"], r["context"], r["method"], f"{r['tok_s']:.1f}"]
            + [f"{r['tok_s'] / static[r['batch'], r['context']]:.2f}×", f"{r['prefill_s']:.2f}"]
            + [f"{r['equal']:.3f}", r["ties"]]
            for r in rows
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the settings are invalid."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    python_help = "a Python with torch and transformers"
    parser.add_argument("--baseline-python", required=True, help=python_help)
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile")
    options, overrides = parser.parse_known_args(arguments)
    try:
        experiment, _ = config.from_command_line(overrides, f"{PROG} --baseline-python PYTHON")
        if experiment.repeats < 1:
            raise ConfigError("repeats=0 times nothing: choose at least 1")
        if any(group[0].num_requests > group[0].batch for group in grid.groups(experiment)):
            raise ConfigError(
                "requests is not supported here, where a cell is one batch: remove it"
            )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    names = [n for n, s in SETTINGS.items() if options.compiled or "compiled" not in s]
    bench, baseline = Bench(), Baseline(options.baseline_python, threads=os.cpu_count() or 1)
    rows: list[dict[str, Any]] = []
    with tqdm(unit="run", dynamic_ncols=True) as bar:
        for group in grid.groups(experiment):
            rows += compare_group(bench, baseline, group, names, bar)
    path = pathlib.Path(experiment.results) / experiment.name / "hf_baseline.json"
    record = {"versions": baseline.versions, "device": device_name(), "rows": rows}
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(table(rows))
    print(f"torch {baseline.versions['torch']}, transformers {baseline.versions['transformers']}")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
