"""Times our decoding against Hugging Face transformers' `generate` on the same models and prompts.

    python -m experiments.studies.hf_baseline --peer-python PATH experiments/configs/peer.yaml
    [--key value]

PATH is a Python with torch and transformers; it runs `peer_worker.py` and nothing else of ours.
Both sides take turns, greedy, in float32. Decoding alone is timed on either side: theirs from the
first call of a stopping criterion, when the prompt is done, to the last.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from experiments.runner import exactness
from experiments.runner.provenance import device_name
from experiments.runner.workload import Bench
from experiments.schema import config, grid, store
from experiments.schema.fields import ConfigError

PROG = "python -m experiments.studies.hf_baseline --peer-python PATH"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way for the peer to generate.

    Attributes:
      name: in the table.
      cache: "static" or "dynamic", the library's default.
      compiled: through torch.compile.
      assistant_tokens: None for plain decoding; 0 for an assistant with the library's settings,
        else how many tokens it drafts at a time. Only for one row, the library's limit.
    """

    name: str
    cache: str
    compiled: bool = False
    assistant_tokens: int | None = None


SETTINGS = (
    Setting("HF static cache", "static"),
    Setting("HF static cache, compiled", "static", compiled=True),
    Setting("HF dynamic cache", "dynamic"),
    Setting("HF assisted, its settings", "dynamic", assistant_tokens=0),
    Setting("HF assisted, 4 tokens", "dynamic", assistant_tokens=4),
)


class Peer:
    """The other interpreter, which answers one request at a time."""

    def __init__(self, python: str, threads: int):
        worker = pathlib.Path(__file__).with_name("hf_baseline_worker.py")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)  # ours would shadow the peer's packages
        self.process = subprocess.Popen(
            [python, str(worker)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None  # both piped
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.versions = self.ask("start", threads=threads)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
          RuntimeError: the peer failed; its own trace is in the message.
        """
        try:
            self.requests.write(json.dumps({"do": do, **arguments}) + "\n")
            self.requests.flush()
            line = self.answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(
                f"the peer's Python ended with status {self.process.wait()}: it needs torch and "
                "transformers; what it printed stands above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the peer failed: {answer['error']}\n{answer['trace']}")
        return answer

    def close(self) -> None:
        """Lets the worker end by itself."""
        self.requests.close()
        self.process.wait()


@dataclasses.dataclass(frozen=True)
class Run:
    """One timed call, on either side: new tokens [B, M], and the rate of decoding alone."""

    tokens: np.ndarray
    tokens_per_s: float
    prefill_s: float


def ours(bench: Bench, cell: grid.Cell) -> Run:
    """Returns a run of ours."""
    out = bench.run(cell)
    rate = out.stats.emitted / out.stats.decode_s
    return Run(np.asarray(out.tokens), rate, out.stats.prefill_s)


def theirs(peer: Peer, setting: Setting, cell: grid.Cell, prompts: list, assistant: str) -> Run:
    """Returns a run of the peer's; its decoding is what lies between the first and last note."""
    assisted = setting.assistant_tokens is not None
    answer = peer.ask(
        "generate",
        directory=str(pathlib.Path(cell.target).resolve()),
        prompts=prompts,
        new_tokens=cell.new_tokens,
        cache=setting.cache,
        compiled=setting.compiled,
        assistant=str(pathlib.Path(assistant).resolve()) if assisted else "",
        assistant_tokens=setting.assistant_tokens or 0,
    )
    (begin, first), (end, last) = answer["notes"][0], answer["notes"][-1]
    rate = cell.batch * (last - first) / (end - begin)
    return Run(np.array(answer["tokens"], np.int32), rate, begin)


def compare_group(
    bench: Bench, peer: Peer, group: list[grid.Cell], settings: Sequence[Setting], bar: tqdm
) -> list[dict[str, Any]]:
    """Returns a row for each of our cells and each of the peer's settings that fits the batch."""
    plain = group[0]
    prompts = bench.prompts(plain)
    assistants = [cell.model for cell in group if cell.draft == "small"]
    calls: dict[str, Any] = {f"ours {cell.method}": (ours, bench, cell) for cell in group}
    for setting in settings:
        if setting.assistant_tokens is None or (plain.batch == 1 and assistants):
            draft = assistants[0] if assistants else ""
            calls[setting.name] = (theirs, peer, setting, plain, prompts.tolist(), draft)
    runs: dict[str, list[Run]] = {name: [] for name in calls}
    for turn in range(plain.repeats + 1):  # the first compiles and warms up
        for name, (call, *arguments) in calls.items():
            bar.set_description(
                f"batch {plain.batch}, context {plain.context}, turn {turn}: {name}"
            )
            runs[name].append(call(*arguments))
            bar.update()
    target, wanted = bench.target_of(plain), runs["ours plain"][0].tokens
    rows = []
    for name, (_, *timed) in runs.items():
        match = exactness.compare(target, prompts, wanted, timed[0].tokens)
        rows.append(
            {
                "batch": plain.batch,
                "context": plain.context,
                "what": name,
                "tok_s": statistics.median(run.tokens_per_s for run in timed),
                "prefill_s": statistics.median(run.prefill_s for run in timed),
                "equal": float((timed[0].tokens == wanted).all(1).mean()),
                "ties": match.ties,
                "divergences": [str(d) for d in match.divergences],
                "runs_tok_s": [run.tokens_per_s for run in timed],
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns the comparison; `over static` divides by the peer's plain static-cache decoding."""
    out = Table(title="decoding beside Hugging Face transformers, float32, greedy")
    for name in ("batch", "context", "what", "tok/s", "over static", "prefill s", "equal", "ties"):
        out.add_column(name, justify="left" if name == "what" else "right")
    for i, row in enumerate(rows):
        shape = row["batch"], row["context"]
        (static,) = (
            r["tok_s"]
            for r in rows
            if (r["batch"], r["context"]) == shape and r["what"] == "HF static cache"
        )
        out.add_row(
            *map(str, shape),
            row["what"],
            f"{row['tok_s']:.1f}",
            f"{row['tok_s'] / static:.2f}×",
            f"{row['prefill_s']:.2f}",
            f"{row['equal']:.3f}",
            str(row["ties"]),
            end_section=i + 1 == len(rows)
            or (rows[i + 1]["batch"], rows[i + 1]["context"]) != shape,
        )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the settings are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.hf_baseline", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--peer-python", required=True, help="a Python with torch, transformers")
    parser.add_argument(
        "--compiled", action="store_true", help="also time theirs through torch.compile"
    )
    options, rest = parser.parse_known_args(arguments)
    try:
        experiment, _ = config.from_command_line(rest, PROG)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    settings = [s for s in SETTINGS if options.compiled or not s.compiled]
    groups, bench = grid.groups(experiment), Bench()
    if experiment.repeats < 1:
        print("repeats=0: a comparison of times needs at least 1", file=sys.stderr)
        return 2
    peer = Peer(options.peer_python, threads=os.cpu_count() or 1)
    rows: list[dict[str, Any]] = []
    with tqdm(unit="run", dynamic_ncols=True) as bar:
        for group in groups:
            rows += compare_group(bench, peer, group, settings, bar)
    peer.close()
    directory = pathlib.Path(experiment.results) / experiment.name
    about = {"peer": peer.versions, "device": device_name(), "rows": rows}
    store.write_text(directory / "peer.json", json.dumps(about, indent=1) + "\n")
    Console().print(table(rows))
    print(f"peer: torch {peer.versions['torch']}, transformers {peer.versions['transformers']}")
    print(f"written to {directory / 'peer.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
