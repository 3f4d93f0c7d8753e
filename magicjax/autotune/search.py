"""Chooses a drafter: trials on the prompts, a plan of what came of them, a run-off of the best.

Nothing that is drawn here decides about what is drawn in the run: trials have their own numbers.
"""

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from magicjax import cost_model, planner
from magicjax.autotune.choice import Auto, Choice
from magicjax.autotune.trial import Behind, Trial, behind_prompts, counted_again, run_trial
from magicjax.decoding.paired_timing import Variant, take_turns, variants_of
from magicjax.decoding.request import Request, prepare
from magicjax.drafters import Drafter, LookUp, SelfSpeculation
from magicjax.model import Model
from magicjax.planner.candidates import candidate_of, name_of, sizes_of_model
from magicjax.trees.token_tree import ROOT_ONLY, TokenTree, chain
from sharding import DATA, STAGE, factored

logger = logging.getLogger("magicjax")

BUDGETS = (64, 256, 1024)
DEPTHS = (1, 2, 4, 6, 8)  # among which the depth is planned anew, beside the plan's own
LEAST_GAIN = 1.03  # below, plain decoding is chosen: plans err by more
MARGIN = 1.15  # what a plan without a trial may be off by
FINALISTS = 3
TURNS, RUN_OFF_S = 11, 5.0  # of the run-off; of short rounds as many turns as take so long
MORE_TURNS, NEAR = 20, 0.08  # of those that are so much slower than the fastest, at most


@dataclasses.dataclass(frozen=True)
class Question:
    """A checked call.

    Attributes:
      auto: how to choose.
      requests: of each candidate by its name, with the tree of the trial.
      machine: what they run on.
      refused: usual drafters that the options do not allow, each with the reason.
    """

    auto: Auto
    requests: dict[str, Request]
    machine: cost_model.Machine
    refused: dict[str, str]

    @property
    def request(self) -> Request:
        """The first; what is no matter of drafters is the same in all."""
        return next(iter(self.requests.values()))

    @property
    def target(self) -> Model:
        return self.request.target

    @property
    def sizes(self) -> cost_model.Sizes:
        return sizes_of_model(self.target, None)

    def drafter(self, name: str) -> Drafter:
        """Returns a candidate."""
        drafter = self.requests[name].drafter
        assert drafter is not None
        return drafter

    @property
    def where(self) -> tuple[cost_model.Machine, int, int]:
        """The machine, the rows, and the tokens of a row half-way through its output."""
        request = self.request
        tokens = np.asarray(request.lengths) + np.asarray(request.limits) / 2
        return self.machine, len(request.prompts), int(tokens.mean())

    @property
    def allocated(self) -> tuple[cost_model.Machine, int, int]:
        """The machine, the rows, and the slots that caches have for each of them."""
        return self.machine, len(self.request.prompts), self.request.settings.capacity


def question(target: Model, prompts: Any, auto: Auto, options: dict[str, Any]) -> Question:
    """Returns the checked call; nothing has run.

    Args:
      target: a skeleton will do, to be checked only.
      prompts, options: as for `magicjax.generate`, without drafter.
      auto: how to choose.

    Raises:
      ValueError, TypeError, FileNotFoundError: as for `magicjax.choose_drafter`.
    """
    if options.get("tree") is not None:
        raise ValueError("drafter='auto' chooses the tree itself: leave tree out")
    options = {name: value for name, value in options.items() if name != "tree"}
    mesh = options.get("mesh")
    shape = {DATA: 1, STAGE: 1} if mesh is None else factored(mesh).shape
    if shape[STAGE] > 1:
        raise ValueError(
            f"drafter='auto' on stage={shape[STAGE]}: the cost model knows no stages; name a "
            "drafter, or use a mesh without stages"
        )
    device = (
        cost_model.this_device() if auto.profile is None else cost_model.device_of(auto.profile)
    )
    # A verifier is for the drafters, which are yet to come.
    plain = prepare(target, prompts, **options | {"verifier": None})
    requests, refused = _requests(plain, prompts, auto, options)
    devices = 1 if mesh is None else mesh.size
    machine = cost_model.Machine(device, shape[DATA], devices // shape[DATA])
    found = Question(auto, requests, machine, refused)
    if target.params is not None:  # of a skeleton the dtype is not known
        cost_model.check_dtype(device, str(target.dtype))
        planner.check_fits(found.sizes, *found.allocated)
    return found


def _requests(
    plain: Request, prompts: Any, auto: Auto, options: dict[str, Any]
) -> tuple[dict[str, Request], dict[str, str]]:
    """Returns (the request of each candidate, why others have none), both by name.

    The target is placed on a mesh once.
    """

    def request(drafter: Drafter) -> Request:
        return prepare(plain.target, prompts, drafter=drafter, tree=auto.tree, **options)

    if auto.drafters is not None:
        names = [name_of(drafter) for drafter in auto.drafters]
        if len({*names}) < len(names):
            raise ValueError(
                f"two of the drafters have one name: {', '.join(names)}; a plan could not tell "
                "them apart"
            )
        return dict(zip(names, map(request, auto.drafters), strict=True)), {}
    found, refused = {}, {}
    for drafter in usual(int(np.asarray(plain.lengths).min())):
        try:  # nobody named it, so it need not fit these options
            found[name_of(drafter)] = request(drafter)
        except ValueError as error:
            refused[name_of(drafter)] = str(error)
    if not found:
        name, why = next(iter(refused.items()))
        raise ValueError(f"none of the usual drafters fits; {name}: {why}")
    return found, refused


def usual(shortest: int) -> list[Drafter]:
    """Returns the drafters that are tried if the user names none; `shortest` is of the prompts."""
    found: list[Drafter] = [
        SelfSpeculation(policy=policy, budget=budget)
        for policy in ("streaming", "snapkv")
        for budget in BUDGETS
        if budget < shortest
    ]
    return [LookUp(), *found]


def choose(question: Question) -> tuple[Choice, Behind, dict[str, float]]:
    """Returns (the choice, what came of the prompts, seconds by name in `Stats`)."""
    rounds = question.auto.trial_rounds
    drafters = [question.drafter(name) for name in question.requests]
    behind, prefill_s, compile_s = behind_prompts(question.request, drafters)
    begin = time.perf_counter()
    plain, spent = run_trial(question.request, "", behind, rounds, ROOT_ONLY)
    ways, trials, skipped = Ways(question, plain), [plain], dict(question.refused)
    for name in ways.most_promising_first():
        why = ways.cannot_win(name) if plain.rounds else "all rows ended with prefill's token"
        if why:
            skipped[name] = why
            continue
        found, compiling = run_trial(question.requests[name], name, behind, rounds)
        # Plain steps again behind it, so that a busy moment of the machine meets both.
        beside, _ = run_trial(question.request, "", behind, rounds, ROOT_ONLY)
        logger.info("tried %s: %.2f ms a round", name, 1e3 * found.seconds)
        ways.add(found, beside)
        trials.append(found)
        spent += compiling
    for i, found in enumerate(trials):
        trials[i], compiling = ways.counted_again(found, behind)
        spent += compiling
    spent += ways.run_off(behind)
    choice = ways.choice(tuple(trials), skipped)
    logger.info("%s", choice)
    plan_s = time.perf_counter() - begin - spent
    return choice, behind, {
        "prefill_s": prefill_s, "compile_s": compile_s + spent, "plan_s": plan_s,
    }  # fmt: skip


class Ways:
    """The ways to draft that were tried so far, as the planner takes them."""

    def __init__(self, question: Question, plain: Trial):
        self.question = question
        self.free = planner.check_fits(question.sizes, *question.allocated)
        self.foretold = sum(cost_model.plain_step(question.sizes, *question.where).values())
        self.before = plain.seconds  # a plain step, when it was last timed
        self.best = 1.0
        self.found: list[planner.Candidate] = []  # `scale` is that of rounds, over that of plain
        self.finalists: list[planner.Prediction] = []
        self.plan: planner.Plan | None = None
        self.timed: dict[tuple[str, TokenTree], float] = {}  # a round, over a plain step
        self.tokens: dict[tuple[str, TokenTree], float] = {}  # of a round, in a trial of the tree

    def _candidate(
        self, name: str, acceptance: Sequence[Sequence[float]] = ((1.0,),), **measured: Any
    ) -> planner.Candidate:
        drafter = self.question.drafter(name)
        found = candidate_of(drafter, self.question.sizes, None, acceptance, **measured)
        return dataclasses.replace(found, deepest=min(found.deepest, self.question.auto.tree.depth))

    def _most(self, name: str) -> float:
        return planner.most_speed_up(
            self.question.sizes, self._candidate(name), *self.question.where
        )

    def _need(self, name: str) -> float:
        """Returns the bytes that a drafter takes on each device beside the target."""
        way = self._candidate(name)
        return way.draft.memory(*self.question.allocated, way.shared)

    def most_promising_first(self) -> list[str]:
        """Returns the drafters' names, by the speed-up if all they drafted were right."""
        return sorted(self.question.requests, key=lambda name: -self._most(name))

    def cannot_win(self, name: str) -> str:
        """Returns why a trial would be in vain; "" if it might not."""
        need = self._need(name)
        if need > self.free:
            return (
                f"it needs {need / 1e9:.2f} GB on each device, and the target leaves "
                f"{self.free / 1e9:.2f}"
            )
        most = self._most(name)
        if most * MARGIN >= max(self.best, LEAST_GAIN):
            return ""
        return (
            f"at most {most:.2f} times as fast as plain decoding if all it drafts were right, and "
            f"{max(self.best, LEAST_GAIN) / MARGIN:.2f} is the least that could win"
        )

    def _believed(self, ratio: float, draft: cost_model.Draft) -> float:
        """Returns by how much times are set right by a trial's, which are few and in no turns.

        A profile that has timed the target, and what drafts, is a second measurement, and weighs as
        much.
        """
        timed = [(self.question.sizes, cost_model.PASS)]
        if draft.sizes is not None:
            timed.append((draft.sizes, cost_model.DRAFT))
        steps = [self.question.machine.device.steps(sizes.key, kind) for sizes, kind in timed]
        return ratio if None in steps else math.sqrt(ratio)

    def add(self, found: Trial, beside: Trial) -> None:
        """Adds what a trial measured, and plain steps behind it.

        What counts is how long its rounds take over the plain steps before and behind them (their
        geometric mean): the machine may be busy with others, and by the next trial be so no more.
        """
        around = math.sqrt(self.before * beside.seconds)
        self.before = beside.seconds
        target, tree = self.question.sizes, self.question.auto.tree
        way = self._candidate(found.name, found.acceptance, tokens=found.tokens)
        foretold = planner.cost_of(target, way, *self.question.where, tree).total
        ratio = (found.seconds / around) / (foretold / self.foretold)
        way = dataclasses.replace(way, scale=self._believed(ratio, way.draft))
        self.found.append(way)
        self.tokens[found.name, tree] = found.of_tree
        self.best = max(self.best, *map(_speed_up, self._predictions(way)))

    def counted_again(self, found: Trial, behind: Behind) -> tuple[Trial, float]:
        """Returns what `trial.counted_again` does, of a trial that was added."""
        if not found.name:
            return found, 0.0
        again, compile_s = counted_again(found, self.question.requests[found.name], behind)
        if again is found:
            return found, compile_s
        way = self._candidate(again.name, again.acceptance, tokens=again.tokens)
        self.found = [
            dataclasses.replace(way, scale=old.scale) if old.name == way.name else old
            for old in self.found
        ]
        return again, compile_s

    def run_off(self, behind: Behind) -> float:
        """Times the best of the plan again beside plain decoding, in turns, and plans with that.

        The best of many predictions is likely one that errs upwards, so each of them is also tried
        with its own tree, for the tokens of its rounds. First each of the best drafters has the
        tree that is foretold to serve it best; then the fastest has chains of other depths beside
        it, those among which the depth is planned anew later.

        Returns:
          Seconds of compiling.
        """
        if not self.found:
            return 0.0
        target, question = self.question.sizes, self.question
        plan = planner.plan(target, self.found, *question.where)
        best_of_each = [max(self._predictions(way), key=_speed_up) for way in self.found]
        self.finalists = self._that_fit_together(sorted(best_of_each, key=_speed_up, reverse=True))
        self.plan, compile_s = self._timed(behind, plan, self.finalists)
        chains = self._chains(self.plan.best)
        way = self._way(self.plan.best.drafter)
        beside = [p for p in self._predictions(way) if p.tree in chains]
        if len(beside) > 1:
            runner_up = self.plan.runner_up
            self.plan, compiling = self._timed(behind, self.plan, beside)
            self.plan = dataclasses.replace(self.plan, runner_up=runner_up)
            compile_s += compiling
        return compile_s

    def _that_fit_together(
        self, best_first: Sequence[planner.Prediction]
    ) -> list[planner.Prediction]:
        """Returns the first few whose caches and weights fit beside each other."""
        found: list[planner.Prediction] = []
        left = self.free
        for prediction in best_first:
            if len(found) < FINALISTS and (need := self._need(prediction.drafter)) <= left:
                found.append(prediction)
                left -= need
        return found

    def _chains(self, best: planner.Prediction) -> list[TokenTree]:
        """Returns the chains among which the depth is planned anew; none if a tree is best."""
        if best.tree != chain(best.tree.depth):
            return []
        deepest = self._way(best.drafter).deepest
        depths = {best.tree.depth, *(depth for depth in DEPTHS if depth <= deepest)}
        return [chain(depth) for depth in sorted(depths)]

    def _predictions(self, way: planner.Candidate) -> list[planner.Prediction]:
        target, question = self.question.sizes, self.question
        return list(planner.predictions(target, way, *question.where))

    def _timed(
        self, behind: Behind, plan: planner.Plan, wanted: Sequence[planner.Prediction]
    ) -> tuple[planner.Plan, float]:
        """Returns (the plan with what turns of some ways measured, seconds of compiling)."""
        tried, of_trials = [], 0.0
        for prediction in wanted:
            again, compiling = self._with_own_tokens(behind, prediction)
            tried.append(again)
            of_trials += compiling
        alone = dataclasses.replace(self.question.request, drafter=None)
        ways = [(self.question.requests[p.drafter], p.tree) for p in wanted]
        variants, state, compile_s = variants_of(behind, [(alone, ROOT_ONLY), *ways])
        state = take_turns(variants, state, TURNS, RUN_OFF_S)
        plain, *rest = variants
        of_first = [p.tokens / _ratio(plain, own) for p, own in zip(tried, rest, strict=True)]
        near = [
            own
            for own, speed_up in zip(rest, of_first, strict=True)
            if speed_up >= (1 - NEAR) * max(of_first)
        ]
        if len(near) > 1:
            state = take_turns([plain, *near], state, MORE_TURNS)
        behind.take_back(state, alone)
        return self._measured(plan, tried, plain, rest), of_trials + compile_s

    def _with_own_tokens(
        self, behind: Behind, prediction: planner.Prediction
    ) -> tuple[planner.Prediction, float]:
        """Returns (the prediction with tokens of a trial of its very tree, seconds of compiling).

        A look-up's are counted on more text than a trial's. What is kept is used again.
        """
        name, tree = prediction.drafter, prediction.tree
        request, compiling = self.question.requests[name], 0.0
        if isinstance(request.drafter, LookUp):
            return prediction, compiling
        if (name, tree) not in self.tokens:
            rounds = self.question.auto.trial_rounds
            found, compiling = run_trial(request, name, behind, rounds, tree)
            self.tokens[name, tree] = found.of_tree
        return dataclasses.replace(prediction, tokens=self.tokens[name, tree]), compiling

    @property
    def _foretold(self) -> dict[str, float]:
        return {prediction.drafter: prediction.speed_up for prediction in self.finalists}

    def _measured(
        self,
        plan: planner.Plan,
        wanted: Sequence[planner.Prediction],
        plain: Variant,
        rounds: Sequence[Variant],
    ) -> planner.Plan:
        """Returns the plan with what turns measured of some ways, beside plain decoding."""
        target = statistics.median(plain.seconds)
        timed = []
        for prediction, variant in zip(wanted, rounds, strict=True):
            ratio, cost = _ratio(plain, variant), prediction.cost
            cost = cost.scaled(target / cost.target, ratio * target / cost.total)
            timed.append(dataclasses.replace(prediction, cost=cost))
        self.timed |= {(p.drafter, p.tree): p.cost.total / target for p in timed}
        best, *others = sorted(timed, key=lambda p: -p.speed_up)
        sizes, where, way = self.question.sizes, self.question.where, self._way(best.drafter)
        foretold = planner.cost_of(
            sizes, dataclasses.replace(way, scale=1.0), *where, best.tree
        ).total
        measured = best.cost.total / target
        way = dataclasses.replace(way, scale=measured / (foretold / self.foretold))
        runner_up = plan.runner_up
        if others:
            runner_up = others[0]
        elif runner_up is not None:  # it was not timed
            now = target / runner_up.cost.target
            runner_up = dataclasses.replace(runner_up, cost=runner_up.cost.scaled(now, now))
        return dataclasses.replace(
            plan,
            best=best,
            runner_up=runner_up,
            break_even=planner.break_even(sizes, way, *where),
            target=target,
        )

    def _way(self, name: str) -> planner.Candidate:
        return next(way for way in self.found if way.name == name)

    def choice(self, trials: tuple[Trial, ...], skipped: dict[str, str]) -> Choice:
        """Returns what is best of all that was tried."""
        auto, plan = self.question.auto, self.plan
        if plan is None or plan.best.speed_up < LEAST_GAIN:
            return Choice(None, None, plan, trials, skipped, {}, self._foretold, auto)
        best, seconds = plan.best, {}
        if chains := self._chains(best):
            of_depth = {one.depth: self.timed[best.drafter, one] * plan.target for one in chains}
            seconds = {0: plan.target} | of_depth
        drafter = self.question.drafter(best.drafter)
        return Choice(drafter, best.tree, plan, trials, skipped, seconds, self._foretold, auto)


def _ratio(plain: Variant, other: Variant) -> float:
    """Returns how long a round takes over a plain step: a median over the turns of both."""
    return statistics.median(np.divide(other.seconds, plain.seconds[: len(other.seconds)]))


def _speed_up(prediction: planner.Prediction) -> float:
    return prediction.speed_up
