"""The value of an adaptive depth when acceptance collapses halfway through the output.

`python -m experiments.studies.collapse` decodes a text with **synthetic acceptance**: a draft on a
small cache of the target runs at full cost, but proposes the target's own next tokens. In the first
half of the output each is correct at a given rate, in the second half none is. A fixed depth keeps
paying for drafts; an adaptive depth falls back to plain decoding. The ideal is the fixed depth in
the first half and plain decoding in the second. All runs are interleaved.
"""

import dataclasses
import json
import pathlib
import statistics

import jax.numpy as jnp
import numpy as np
import tyro

import magicjax
from experiments import prompts
from magicjax import cost_model, planner
from magicjax.autotune.auto import run_adaptive
from magicjax.autotune.depth_controller import DepthController
from magicjax.autotune.search import DEPTHS
from magicjax.benchmarks.synthetic import Synthetic
from magicjax.decoding import runner
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.decoding.request import prepare
from magicjax.files import write_atomically
from magicjax.planner.candidates import make_candidate, model_sizes
from magicjax.trees.token_tree import ROOT_ONLY, chain


@dataclasses.dataclass
class Settings:
    """A draft whose acceptance collapses halfway, at a fixed and an adaptive depth.

    Attributes:
      target: directory of the target.
      profile: of this device; None: the default file of `magicjax calibrate`.
      results: folder.
      batch, context, new_tokens: of the prompts and outputs.
      budget: slots of the draft's cache.
      depth: of the fixed chain, and of the first adaptive calls.
      rate: acceptance rate in the first half.
      rounds: per call.
      repeats: of the timing.
    """

    target: str = "experiments/zoo/target"
    profile: str | None = None
    results: str = "results/collapse"
    batch: int = 1
    context: int = 4096
    new_tokens: int = 512
    budget: int = 256
    depth: int = 4
    rate: float = 0.95
    rounds: int = 32
    repeats: int = 5


class Runs:
    """The prompts after one prefill, and the runs that start from there."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.target = magicjax.load(settings.target, dtype="float32")
        made = prompts.make(
            prompts.STDLIB, self.target.tokenizer, "", settings.batch, settings.context
        )
        rows = [prompt.tokens for prompt in made]
        plain = magicjax.generate(
            self.target, rows, max_new_tokens=settings.new_tokens, eos_token_id=[]
        )
        text = np.stack(plain.sequences)
        half = settings.context + settings.new_tokens // 2
        rate = np.where(np.arange(text.shape[1]) < half, settings.rate, 0.0)
        self.inner = magicjax.SelfSpeculation(budget=settings.budget)
        drafter = Synthetic(self.inner, jnp.asarray(text), jnp.asarray(rate, jnp.float32))
        self.request = prepare(
            self.target,
            rows,
            drafter=drafter,
            tree=chain(max(settings.depth, *DEPTHS)),
            max_new_tokens=settings.new_tokens,
            eos_token_id=[],
        )
        self.text = text[:, settings.context :]
        self.prefilled = PrefilledPrompts.create(self.request, [drafter])
        self.round_seconds = self._predicted()

    def _predicted(self) -> dict[int, float]:
        """Returns the seconds per round by depth, predicted from the profile."""
        settings, sizes = self.settings, model_sizes(self.target, None)
        device = cost_model.device_of(settings.profile or cost_model.default_profile())
        workload = cost_model.Machine(device), settings.batch, settings.context
        candidate = make_candidate(self.inner, sizes, None, [[settings.rate]])
        depths = sorted({settings.depth, *DEPTHS})
        costs = {d: planner.cost_of(sizes, candidate, *workload, chain(d)) for d in depths}
        return {0: costs[depths[0]].target} | {d: cost.total for d, cost in costs.items()}

    def _start(self) -> DecodeState:
        return self.prefilled.start(self.request)

    def _finish(self, state: DecodeState) -> None:
        """Makes the prompts usable again; raises RuntimeError unless the text is exact."""
        output = np.asarray(state.output)[:, : self.settings.new_tokens]
        ended = np.asarray(state.ended).all()
        self.prefilled = self.prefilled.reset(state)
        if ended and (output != self.text).any():
            raise RuntimeError("the text differs from that of plain decoding")

    def fixed(self, depth: int) -> float:
        """Returns the seconds at a depth; 0: plain decoding."""
        tree = chain(depth) if depth else ROOT_ONLY
        settings = self.request.settings.with_tree(tree)
        state, seconds = runner.run(self.request, settings, self._start())
        self._finish(state)
        return seconds

    def first_half(self) -> float:
        """Returns the seconds of the first half of the tokens at the fixed depth."""
        settings = self.request.settings.with_tree(chain(self.settings.depth))
        state, total = self._start(), 0.0
        while float(np.asarray(state.emitted).mean()) < self.settings.new_tokens / 2:
            state, seconds = runner.run(self.request, settings, state, 4)
            total += seconds
        self._finish(state)
        return total

    def adaptive(self) -> tuple[float, list[int]]:
        """Returns (the seconds with an adaptive depth, the depth of each call)."""
        settings, seconds = self.settings, self.round_seconds
        controller = DepthController.create(seconds, [settings.rate], settings.depth)
        state, calls, total = run_adaptive(
            self.request, list(seconds), controller, self._start(), settings.rounds
        )
        self._finish(state)
        return total, [depth for depth, _ in calls]


def measure(settings: Settings) -> dict:
    """Returns median times, and what each run loses compared with the ideal."""
    runs, times = Runs(settings), []
    for _ in range(settings.repeats + 1):
        fixed = runs.fixed(0), runs.fixed(settings.depth), runs.first_half()
        seconds, depths = runs.adaptive()
        times.append((*fixed, seconds))
    names = ("plain", "fixed", "first half", "adaptive")
    repeats = dict(zip(names, np.transpose(times[1:]), strict=True))
    ideal = repeats["first half"] + repeats["plain"] / 2
    losses = {name: repeats[name] - ideal for name in ("fixed", "adaptive")}
    return {
        "settings": dataclasses.asdict(settings) | {"profile": None, "results": None},
        "seconds": {name: float(np.median(seconds)) for name, seconds in repeats.items()},
        "ideal": float(np.median(ideal)),
        "loss": {name: float(np.median(loss)) for name, loss in losses.items()},
        "share": statistics.median(losses["adaptive"] / losses["fixed"]),
        "depths": depths,
    }


def main(settings: Settings) -> None:
    """Measures, prints and writes a JSON file."""
    results = measure(settings)
    path = pathlib.Path(settings.results) / "collapse.json"
    write_atomically(path, json.dumps(results, indent=1) + "\n")
    for name, seconds in results["seconds"].items():
        print(f"{name:10} {seconds:.3f} s")
    print(f"{'ideal':10} {results['ideal']:.3f} s: first half of fixed, then half of plain")
    print(f"depth of each adaptive call: {' '.join(map(str, results['depths']))}")
    ratio = results["seconds"]["adaptive"] / results["seconds"]["plain"]
    print(f"adaptive / plain: {ratio:.2f}")
    print(
        f"loss compared with the ideal: fixed {results['loss']['fixed']:.3f} s, adaptive "
        f"{results['loss']['adaptive']:.3f} s ({results['share']:.0%} of fixed). Acceptance is "
        "synthetic; the text is that of plain decoding."
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
