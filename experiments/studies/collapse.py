"""What planning the depth anew is worth where acceptance collapses half-way.

`python -m experiments.studies.collapse` decodes a text with **synthetic acceptance**: a draft on a
small
cache of the target runs as it would, but proposes the target's own next tokens, in the first half
of the output right at a given rate, in the second half never. A fixed depth goes on paying for
drafts; the loop that plans anew between its calls stops. Ideal would be the fixed depth in the
first half and plain decoding in the second. All are timed in turns.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import tyro

import magicjax
from experiments import prompts
from experiments.schema import store
from magicjax import cost_model, planner
from magicjax.autotune.auto import run_replanned
from magicjax.autotune.depth_controller import Controller
from magicjax.autotune.search import DEPTHS
from magicjax.autotune.trial import Behind, behind_prompts
from magicjax.benchmarks.bench import Synthetic
from magicjax.decoding import runner
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request, prepare
from magicjax.planner.candidates import candidate_of, sizes_of_model
from magicjax.trees.token_tree import ROOT_ONLY, chain


@dataclasses.dataclass
class Settings:
    """A draft whose acceptance collapses half-way, at a fixed depth and planned anew.

    Attributes:
      target: directory of the target.
      profile: of this device; None: where `magicjax calibrate` writes it.
      results: folder.
      batch, context, new_tokens: of the prompts and outputs.
      budget: slots of the draft's cache.
      depth: of the chain that is fixed, and of the first calls.
      rate: of the first half.
      rounds: of a call.
      turns: of the timing.
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
    turns: int = 5


class Runs:
    """The prompts, read once, and the loops that run behind them."""

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
        self.behind: Behind = behind_prompts(self.request, [drafter])[0]
        self.seconds = self._foretold()

    def _foretold(self) -> dict[int, float]:
        """Returns the seconds of a round by depth, foretold from the profile."""
        settings, sizes = self.settings, sizes_of_model(self.target, None)
        profile = settings.profile
        device = cost_model.device_of(profile) if profile else cost_model.this_device()
        where = cost_model.Machine(device), settings.batch, settings.context
        way = candidate_of(self.inner, sizes, None, [[settings.rate]])
        depths = sorted({settings.depth, *DEPTHS})
        found = {d: planner.cost_of(sizes, way, *where, chain(d)).total for d in depths}
        return {0: sum(cost_model.plain_step(sizes, *where).values())} | found

    def _run(self, run: Callable[[Request, DecodeState], tuple]) -> tuple[float, list[int]]:
        state, _ = self.behind.state(self.request)
        state, calls, seconds = run(self.request, state)
        found = np.asarray(state.output)[:, : self.settings.new_tokens]
        ended = np.asarray(state.ended).all()
        self.behind.take_back(state, self.request)
        if ended and (found != self.text).any():
            raise RuntimeError("the text is not that of plain decoding")
        return seconds, calls

    def fixed(self, depth: int) -> float:
        """Returns the seconds at a depth; 0: plain decoding."""

        def run(request: Request, state: DecodeState) -> tuple:
            tree = chain(depth) if depth else ROOT_ONLY
            state, seconds, _ = runner.run(request, request.settings.with_tree(tree), state)
            return state, [], seconds

        return self._run(run)[0]

    def first_half(self) -> float:
        """Returns the seconds of the first half at the fixed depth, by tokens."""

        def run(request: Request, state: DecodeState) -> tuple:
            settings = request.settings.with_tree(chain(self.settings.depth))
            seconds, half = 0.0, self.settings.new_tokens / 2
            while float(np.asarray(state.emitted).mean()) < half:
                state, more, _ = runner.run(request, settings, state, 4)
                seconds += more
            return state, [], seconds

        return self._run(run)[0]

    def replanned(self) -> tuple[float, list[int]]:
        """Returns (the seconds of the loop that plans anew, the depth of each call)."""

        def run(request: Request, state: DecodeState) -> tuple:
            settings = self.settings
            controller = Controller(self.seconds, [settings.rate], settings.depth)
            depths = list(self.seconds)
            state, calls, seconds, _ = run_replanned(
                request, depths, controller, state, settings.rounds
            )
            return state, [depth for depth, _ in calls], seconds

        return self._run(run)


def measure(settings: Settings) -> dict:
    """Returns the medians of the turns, and what each way loses beside the ideal."""
    runs = Runs(settings)
    times: dict[str, list[float]] = {name: [] for name in ("plain", "fixed", "anew", "first half")}
    for _ in range(settings.turns + 1):
        times["plain"].append(runs.fixed(0))
        times["fixed"].append(runs.fixed(settings.depth))
        times["first half"].append(runs.first_half())
        seconds, depths = runs.replanned()
        times["anew"].append(seconds)
    of_turns = {name: np.array(found[1:]) for name, found in times.items()}
    ideal = of_turns["first half"] + of_turns["plain"] / 2
    losses = {name: of_turns[name] - ideal for name in ("fixed", "anew")}
    return {
        "settings": dataclasses.asdict(settings) | {"profile": None, "results": None},
        "seconds": {name: float(np.median(found)) for name, found in of_turns.items()},
        "ideal": float(np.median(ideal)),
        "loss": {name: float(np.median(loss)) for name, loss in losses.items()},
        "share": statistics.median(losses["anew"] / losses["fixed"]),
        "depths": depths,
    }


def main(settings: Settings) -> None:
    """Measures, prints and writes."""
    found = measure(settings)
    store.write_text(
        pathlib.Path(settings.results) / "collapse.json", json.dumps(found, indent=1) + "\n"
    )
    for name, seconds in found["seconds"].items():
        print(f"{name:10} {seconds:.3f} s")
    print(f"ideal      {found['ideal']:.3f} s: the fixed depth's first half, and half of plain")
    print(f"depths of the calls planned anew: {' '.join(map(str, found['depths']))}")
    of_plain = found["seconds"]["anew"] / found["seconds"]["plain"]
    print(f"planned anew / plain: {of_plain:.2f}")
    print(
        f"lost to the collapse: fixed {found['loss']['fixed']:.3f} s, planned anew "
        f"{found['loss']['anew']:.3f} s, {found['share']:.0%} of that (synthetic acceptance; the "
        "text is that of plain decoding)"
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
