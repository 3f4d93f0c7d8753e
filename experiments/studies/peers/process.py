"""A peer in its own process and environment, and timed runs of it and of magicjax."""

import contextlib
import json
import os
import pathlib
import subprocess
from typing import Any, NamedTuple

import numpy as np

from experiments.runner.workload import Bench
from experiments.schema import grid
from experiments.schema.fields import ConfigError


class Peer:
    """A process of another interpreter: it answers a request at a time, until closed or our exit.

    Attributes:
      versions: of the peer's libraries.
    """

    def __init__(self, folder: pathlib.Path, module: str):
        """Starts `serve.py` with a module beside it, in the environment of that name.

        Raises:
          ConfigError: the folder has no such environment.
          RuntimeError: the libraries are not installed.
        """
        self.environment = folder / module
        python = self.environment / "bin" / "python"
        if not python.is_file():
            raise ConfigError(f"{python} does not exist: run `make peers`, or set --environments")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)  # ours would shadow the other interpreter's packages
        command = [str(python), str(pathlib.Path(__file__).with_name("serve.py")), module]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self.versions: dict[str, str] = self._answer()

    def request(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Returns what a function of the peer's module returns.

        Raises:
          RuntimeError: the peer failed; the message has its traceback.
        """
        assert self.process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError):  # the process has exited
            self.process.stdin.write(json.dumps(arguments | {"function": function}) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process, which frees its memory."""
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None  # a pipe
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the Python of {self.environment} exited with status {self.process.wait()}; see "
                "its output above, and repeat `make peers`"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the peer failed: {answer['error']}\n{answer['trace']}")
        return answer


class Run(NamedTuple):
    """One timed call: new tokens [B, M], and the rate of decoding without prefill."""

    tokens: np.ndarray
    tokens_per_s: float
    prefill_s: float
    weights: str


def run_magicjax(bench: Bench, cell: grid.Cell) -> Run:
    """Returns a run of a cell."""
    out = bench.run(cell)
    rate = out.stats.emitted / out.stats.decode_s
    weights = str(bench.target_of(cell).weights or cell.dtype)
    return Run(np.asarray(out.tokens), rate, out.stats.prefill_s, weights)


def run_peer(
    peer: Peer, prompts: list[list[int]], new_tokens: int, weights: str, **arguments: Any
) -> Run:
    """Returns a run of a peer; decoding lies between the first and the last time stamp."""
    settings = arguments | {"new_tokens": new_tokens, "threads": os.cpu_count() or 1}
    answer = peer.request("generate", prompts=prompts, **settings)
    (begin, first), (end, last) = answer["stamps"][0], answer["stamps"][-1]
    rate = len(prompts) * (last - first) / (end - begin)
    return Run(np.array(answer["tokens"], np.int32), rate, begin, weights)
