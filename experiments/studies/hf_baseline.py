"""Times magicjax and Hugging Face transformers' `generate` on the same models and prompts.

    python -m experiments.studies.hf_baseline FILE --baseline-python PYTHON [--key value]

PYTHON has torch and transformers; it runs `hf_baseline_worker.py`. Runs of both are interleaved,
greedy, in float32, and only decoding is timed: of transformers from the first call of a stopping
criterion, after prefill, to the last.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.runner import exactness
from experiments.runner.provenance import device_name
from experiments.runner.workload import Bench
from experiments.schema import config, grid
from experiments.schema.fields import ConfigError
from magicjax.benchmarks.tables import markdown_table
from magicjax.files import write_atomically

PROG = "python -m experiments.studies.hf_baseline"
PLAIN, STATIC = "magicjax plain", "HF static cache"
HEADER = ("batch", "context", "method", "tok/s", "over static", "prefill s", "equal", "ties")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Options of transformers' `generate`.

    Attributes:
      name: in the table.
      cache: "static" or "dynamic", the library's default.
      compiled: through torch.compile.
      assistant_tokens: None for plain decoding; 0 for an assistant with the library's settings,
        else the tokens it drafts at a time. The library supports assistants for one row only.
    """

    name: str
    cache: str
    compiled: bool = False
    assistant_tokens: int | None = None


SETTINGS = (
    Setting(STATIC, "static"),
    Setting("HF static cache, compiled", "static", compiled=True),
    Setting("HF dynamic cache", "dynamic"),
    Setting("HF assisted, its settings", "dynamic", assistant_tokens=0),
    Setting("HF assisted, 4 tokens", "dynamic", assistant_tokens=4),
)


class Baseline:
    """A process of the other interpreter, which answers one request at a time."""

    def __init__(self, python: str, threads: int):
        worker = pathlib.Path(__file__).with_name("hf_baseline_worker.py")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)  # ours would shadow the other interpreter's packages
        self.process = subprocess.Popen(
            [python, str(worker)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None  # both piped
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.versions = self.request("start", threads=threads)

    def request(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
          RuntimeError: the worker failed; the message has its traceback.
        """
        try:
            self.requests.write(json.dumps({"method": method, **arguments}) + "\n")
            self.requests.flush()
            line = self.answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(
                f"the baseline's Python exited with status {self.process.wait()}: it needs torch "
                "and transformers; see its output above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the baseline failed: {answer['error']}\n{answer['trace']}")
        return answer

    def close(self) -> None:
        """Waits for the worker to exit."""
        self.requests.close()
        self.process.wait()


@dataclasses.dataclass(frozen=True)
class Run:
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
    baseline: Baseline, setting: Setting, cell: grid.Cell, prompts: list, assistant: str
) -> Run:
    """Returns a run of transformers; decoding lies between the first and the last time stamp."""
    assisted = setting.assistant_tokens is not None
    answer = baseline.request(
        "generate",
        directory=str(pathlib.Path(cell.target).resolve()),
        prompts=prompts,
        new_tokens=cell.new_tokens,
        cache=setting.cache,
        compiled=setting.compiled,
        assistant=str(pathlib.Path(assistant).resolve()) if assisted else "",
        assistant_tokens=setting.assistant_tokens or 0,
    )
    (begin, first), (end, last) = answer["stamps"][0], answer["stamps"][-1]
    rate = cell.batch * (last - first) / (end - begin)
    return Run(np.array(answer["tokens"], np.int32), rate, begin)


def compare_group(
    bench: Bench,
    baseline: Baseline,
    group: list[grid.Cell],
    settings: Sequence[Setting],
    bar: tqdm,
) -> list[dict[str, Any]]:
    """Returns a row for each cell and for each of the settings that supports the batch."""
    plain = group[0]
    prompts = bench.prompts(plain)
    assistants = [cell.model for cell in group if cell.draft == "small"]
    calls: dict[str, tuple[Callable[..., Run], Any]] = {
        f"magicjax {cell.method}": (run_magicjax, (bench, cell)) for cell in group
    }
    for setting in settings:
        if setting.assistant_tokens is None or (plain.batch == 1 and assistants):
            draft = assistants[0] if assistants else ""
            arguments = (baseline, setting, plain, prompts.tolist(), draft)
            calls[setting.name] = (run_baseline, arguments)
    runs: dict[str, list[Run]] = {name: [] for name in calls}
    for repeat in range(plain.repeats + 1):  # repeat 0 compiles and warms up
        for name, (call, arguments) in calls.items():
            shape = f"batch {plain.batch}, context {plain.context}"
            bar.set_description(f"{shape}, repeat {repeat}: {name}")
            runs[name].append(call(*arguments))
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
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    settings = [s for s in SETTINGS if options.compiled or not s.compiled]
    bench, baseline = Bench(), Baseline(options.baseline_python, threads=os.cpu_count() or 1)
    rows: list[dict[str, Any]] = []
    with tqdm(unit="run", dynamic_ncols=True) as bar:
        for group in grid.groups(experiment):
            rows += compare_group(bench, baseline, group, settings, bar)
    baseline.close()
    path = pathlib.Path(experiment.results) / experiment.name / "hf_baseline.json"
    record = {"versions": baseline.versions, "device": device_name(), "rows": rows}
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(table(rows))
    print(f"torch {baseline.versions['torch']}, transformers {baseline.versions['transformers']}")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
