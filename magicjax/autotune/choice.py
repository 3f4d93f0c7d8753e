"""What users say of `drafter="auto"`, and what came of it."""

import dataclasses
import os
from collections.abc import Sequence

from magicjax import planner
from magicjax.autotune.trial import ROUNDS, Trial
from magicjax.drafters import Drafter
from magicjax.planner.candidates import name_of
from magicjax.trees.token_tree import TokenTree, chain

LEAST_ROUNDS = 32
LEAST_TRIAL = 2 * ROUNDS


@dataclasses.dataclass(frozen=True)
class Auto:
    """How `drafter="auto"` chooses.

    Attributes:
      drafters: what is tried; None: the target on streaming and SnapKV caches of 64, 256 and 1,024
        slots, where the prompts are longer, and a look-up.
      profile: of the device, with whose costs is planned: a file that `magicjax calibrate` wrote,
        or the name of a preset (`magicjax.cost_model.DEVICES`); None: the profile of this device,
        where
        calibrate writes it if it is not told otherwise. A profile knows no link between devices, so
        that models divided over several need a preset.
      trial_rounds: of each drafter.
      tree: that drafters are tried with. No deeper one is planned. With one that branches, optimal
        trees are planned too, because it tells how often later choices are accepted.
      replan: whether the depth of a chain is planned anew; None: in greedy decoding.
      rounds: of a call of the loop, after which it is.

    Under sampling the distribution stays the target's, whatever is chosen and however often: trials
    have random numbers of their own. But times have a say in the choice, and with `replan` in every
    depth: another run may choose otherwise, and then give another text of the same seed. A `Choice`
    used again without `replan` gives the same; and so does verifier="naive" in any case.

    Raises:
      ValueError: no drafter, too few rounds, or a tree without a child.
    """

    drafters: Sequence[Drafter] | None = None
    profile: str | os.PathLike | None = None
    trial_rounds: int = 32
    tree: TokenTree = chain(8)
    replan: bool | None = None
    rounds: int = LEAST_ROUNDS

    def __post_init__(self):
        if self.drafters is not None:
            object.__setattr__(self, "drafters", tuple(self.drafters))
            if not self.drafters:
                raise ValueError("Auto(drafters=()): give at least one to try, or leave it out")
            for drafter in self.drafters:
                name_of(drafter)
        if self.trial_rounds < LEAST_TRIAL:
            raise ValueError(
                f"trial_rounds={self.trial_rounds} must be at least {LEAST_TRIAL}: the first "
                f"{LEAST_TRIAL // 2} load the program, and their time means nothing"
            )
        if self.rounds < LEAST_ROUNDS:
            raise ValueError(
                f"rounds={self.rounds}: a call of the loop has at least {LEAST_ROUNDS}, or the "
                "words with the host would be felt"
            )
        if not isinstance(self.tree, TokenTree) or self.tree.num_nodes < 2:
            raise ValueError("Auto(tree=...) must be a static tree with at least one child")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen; passed as `drafter`, it is used again without trials.

    Attributes:
      drafter, tree: what speculates; None: plain decoding is faster.
      plan: the planner's answer; None: nothing was tried, because nothing could have paid. Its
        times are those of the run-off, where the best were timed beside plain decoding.
      foretold: the speed-up of each of them before that, from the profile and the trials.
      trials: what was measured, plain decoding first.
      skipped: drafters that were not tried, each with the reason.
      seconds: foretold of a round, by depth, for planning the depth anew.
      auto: how it was chosen.
    """

    drafter: Drafter | None
    tree: TokenTree | None
    plan: planner.Plan | None
    trials: tuple[Trial, ...]
    skipped: dict[str, str]
    seconds: dict[int, float]
    foretold: dict[str, float]
    auto: Auto

    @property
    def name(self) -> str:
        """The drafter as commands write it, or "off"."""
        return "off" if self.drafter is None else name_of(self.drafter)

    def __str__(self) -> str:
        """A few lines that say what was measured and chosen."""
        lines = [_line(trial) for trial in self.trials]
        lines += [f"not tried {name}: {why}" for name, why in self.skipped.items()]
        if self.plan is None:
            return "\n".join([*lines, "off: no drafter could pay here"])
        best = self.plan.best
        what = "chosen"
        if self.drafter is None:
            what = "off, the gain is too small:" if self.plan.pays else "off; the least slow is"
        lines.append(
            f"{what} {best.drafter}, depth {best.tree.depth}, {best.tree.num_nodes} nodes: "
            f"expected speed-up {best.speed_up:.2f}"
        )
        if other := self.plan.runner_up:
            lines.append(f"next {other.drafter}, depth {other.tree.depth}: {other.speed_up:.2f}")
        return "\n".join(lines)


def _line(trial: Trial) -> str:
    line = f"tried {trial.name or 'plain decoding'}: {1e3 * trial.seconds:.2f} ms a round"
    if not trial.name:
        return line
    return f"{line}, accepted {'  '.join(f'{sum(row):.2f}' for row in trial.acceptance)}"
