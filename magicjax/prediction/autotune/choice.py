"""The settings of `drafter="auto"`, and the choice it makes."""

import dataclasses
import os
from collections.abc import Sequence

from magicjax.drafters import Drafter, PromptLookup
from magicjax.prediction import planner
from magicjax.prediction.autotune.trial import ROUNDS, Trial
from magicjax.prediction.planner.candidates import name_of
from magicjax.trees.token_tree import TokenTree, chain, expansion

MIN_ROUNDS_PER_CALL = 32
MIN_TRIAL_ROUNDS = 2 * ROUNDS
# Of the trial of tree="auto", which measures acceptance by rank; prompt lookup proposes chains.
RANKS = expansion((2, 2, 1, 1, 1, 1))


@dataclasses.dataclass(frozen=True)
class Auto:
    """Settings of `drafter="auto"`.

    Each candidate runs a short trial on the prompts. The planner combines the trials' acceptance
    and times with a profile of the device. The three best candidates are timed against plain
    decoding, and the fastest runs, or plain decoding if none is at least 3 % faster.

    The choice depends on timings and can differ between runs. Sampled text follows the target's
    distribution in any case, but with a given seed it depends on the choice, and with
    `adaptive_depth` also on every depth. For reproducible text, pass the returned `Choice` as
    `drafter` without `adaptive_depth`, or use verifier="naive".

    Limits: trials see only the first `trial_rounds` rounds. They do not see gains that appear later
    in the text; prompt lookup, for example, improves with text length. A choice is for a batch and
    context similar to those of the prompts. Meshes with pipeline stages are not supported.

    Attributes:
      drafters: the candidates; None: prompt lookup, and self-speculation with streaming and SnapKV
        caches of 64, 256 and 1,024 slots, as far as the prompts are longer.
      profile: of the device: a file from `magicjax calibrate`, or the name of a preset (one of
        `cost_model.DEVICES`). None: the file that calibrate writes by default. A calibrated
        profile has no link between devices, so tensor parallelism needs a preset.
      trial_rounds: rounds of each trial.
      tree: of the trials; no deeper tree is planned. A tree with branches also measures acceptance
        by rank, and the planner then considers optimal trees as well as chains.
      adaptive_depth: whether the depth of a chain adapts during the run; None: in greedy decoding.
      rounds_per_call: rounds between two changes of the depth.

    Raises:
      ValueError: no drafter, one that the planner does not support, too few rounds, or a tree that
        is not static or has no child.
    """

    drafters: Sequence[Drafter] | None = None
    profile: str | os.PathLike | None = None
    trial_rounds: int = 32
    tree: TokenTree = chain(8)
    adaptive_depth: bool | None = None
    rounds_per_call: int = MIN_ROUNDS_PER_CALL

    def __post_init__(self):
        if self.drafters is not None:
            object.__setattr__(self, "drafters", tuple(self.drafters))
            if not self.drafters:
                raise ValueError("drafters=() is empty: give at least one, or omit drafters")
            for drafter in self.drafters:
                name_of(drafter)
        if self.trial_rounds < MIN_TRIAL_ROUNDS:
            raise ValueError(
                f"trial_rounds={self.trial_rounds} is too small: at least {MIN_TRIAL_ROUNDS}; the "
                f"first {ROUNDS} load the program and are not timed"
            )
        if self.rounds_per_call < MIN_ROUNDS_PER_CALL:
            raise ValueError(
                f"rounds_per_call={self.rounds_per_call} is too small: at least "
                f"{MIN_ROUNDS_PER_CALL}, so that host synchronization costs little"
            )
        if not isinstance(self.tree, TokenTree) or self.tree.num_nodes < 2:
            raise ValueError(f"tree={self.tree!r} must be a static tree with at least one child")


def for_tree(drafter: Drafter, profile: str | os.PathLike | None = None) -> Auto:
    """Returns the settings that choose the tree of one drafter, `tree="auto"`.

    Raises:
      ValueError: the planner does not support the drafter.
    """
    tree = Auto.tree if isinstance(drafter, PromptLookup) else RANKS
    return Auto((drafter,), profile, tree=tree)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of `drafter="auto"`. Pass it as `drafter` to reuse it without trials.

    Attributes:
      drafter, tree: the fastest; None: plain decoding is faster.
      timed: the timed drafters and trees, the fastest first, with measured tokens and costs.
      trials: measurements, plain decoding first.
      skipped: the reason for each candidate without a trial.
      round_seconds: per round by depth, for `Auto.adaptive_depth`; empty if a tree was chosen.
      predicted_speedup: of each finalist, before the comparison.
      auto: the settings.
    """

    drafter: Drafter | None
    tree: TokenTree | None
    timed: tuple[planner.Prediction, ...]
    trials: tuple[Trial, ...]
    skipped: dict[str, str]
    round_seconds: dict[int, float]
    predicted_speedup: dict[str, float]
    auto: Auto

    @property
    def name(self) -> str:
        """The drafter as commands write it, or "off"."""
        return "off" if self.drafter is None else name_of(self.drafter)

    def __str__(self) -> str:
        """Returns the measurements and the choice as lines of text."""
        lines = [_trial_line(trial) for trial in self.trials]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        if not self.timed:
            return "\n".join([*lines, "chosen: plain decoding; no drafter was timed"])
        best, *others = self.timed
        off = "plain decoding; the fastest drafter is " if self.drafter is None else ""
        lines.append(f"chosen: {off}{self._line(best)}")
        runner_up = [other for other in others if other.drafter != best.drafter][:1]
        return "\n".join([*lines, *(f"runner-up: {self._line(other)}" for other in runner_up)])

    def _line(self, timed: planner.Prediction) -> str:
        line = f"{timed.drafter}, depth {timed.tree.depth}, {timed.tree.num_nodes} nodes"
        if timed.drafter in self.predicted_speedup:
            line += f", predicted speedup {self.predicted_speedup[timed.drafter]:.2f}"
        return f"{line}, measured {timed.speedup:.2f}"


def _trial_line(trial: Trial) -> str:
    if not trial.name:
        return f"plain decoding: {1e3 * trial.seconds:.2f} ms per step"
    rates = " ".join(f"{sum(row):.2f}" for row in trial.acceptance)
    return f"{trial.name}: {1e3 * trial.seconds:.2f} ms per round, acceptance by depth {rates}"


def settings_of(auto: Auto | str) -> Auto:
    """Returns the settings; raises ValueError for a string other than "auto"."""
    if isinstance(auto, Auto):
        return auto
    if auto != "auto":
        raise ValueError(
            f"drafter={auto!r} is not a choice of drafters: pass 'auto', or magicjax.Auto(...)"
        )
    return Auto()
