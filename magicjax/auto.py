"""`drafter="auto"`: tries drafters on the user's prompts, plans with that, and runs what is best.

First all candidates that could pay run a short trial on the prompts; the planner takes acceptance
and times from it, and from a profile of the device what other depths and trees would cost. The best
few of the plan are timed again beside plain decoding, in turns. Then the fastest runs, or plain
decoding where none pays. Between calls of the loop the depth of a chain is planned anew.
"""

import dataclasses
import logging
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from magicjax import compilation, costs, execution, planner
from magicjax.candidates import candidate_of, deepest_of, name_of, sizes_of_model
from magicjax.decode import DecodeState, Settings
from magicjax.drafters import Drafter, LookUp, SelfSpeculation
from magicjax.execution import Call, Output
from magicjax.model import Model
from magicjax.replanning import Controller
from magicjax.request import Request, prepare
from magicjax.tree import ROOT_ONLY, TokenTree, chain
from magicjax.trial import Behind, Trial, behind_prompts, run_trial
from magicjax.turns import Variant, take_turns
from sharding import DATA, MODEL, AnyMesh

logger = logging.getLogger("magicjax")

BUDGETS = (64, 256, 1024)
DEPTHS = (1, 2, 4, 8)  # among which the depth is planned anew, beside the plan's own
LEAST_ROUNDS = 32
LEAST_GAIN = 1.03  # below, plain decoding is chosen: plans err by more
MARGIN = 1.15  # what a plan without a trial may be off by
FINALISTS, TURNS = 3, 11  # of the run-off


@dataclasses.dataclass(frozen=True)
class Auto:
    """How `drafter="auto"` chooses.

    Attributes:
      drafters: what is tried; None: the target on streaming and SnapKV caches of 64, 256 and 1,024
        slots, where the prompts are longer, and a look-up.
      device: whose costs are planned with: a profile that `magicjax calibrate` wrote, or the name
        of a preset (`magicjax.costs.DEVICES`); None: the profile of this device, where calibrate
        writes it if it is not told otherwise.
      trial_rounds: of each drafter.
      tree: that drafters are tried with. No deeper one is planned. With one that branches, optimal
        trees are planned too, because it tells how often later choices are accepted.
      replan: whether the depth of a chain is planned anew; None: in greedy decoding. Under sampling
        the distribution stays the target's, but as times decide on depths, a text then depends on
        the other rows, and another run may give another one.
      rounds: of a call of the loop, after which it is.

    Raises:
      ValueError: no drafter, too few rounds, or a tree without a child.
    """

    drafters: Sequence[Drafter] | None = None
    device: str | os.PathLike | None = None
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
        if self.trial_rounds < 1:
            raise ValueError(f"trial_rounds={self.trial_rounds} must be at least 1")
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
      plan: the planner's answer; None: nothing was tried, because nothing could have paid.
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
    auto: Auto

    @property
    def name(self) -> str:
        """The drafter as commands write it, or "off"."""
        return "off" if self.drafter is None else name_of(self.drafter)

    def __str__(self) -> str:
        """A few lines that say what was measured and chosen."""
        lines = [
            f"tried {t.name or 'plain decoding'}: {1e3 * t.seconds:.2f} ms a round"
            + (
                f", accepted {'  '.join(f'{sum(row):.2f}' for row in t.acceptance)}"
                if t.name
                else ""
            )
            for t in self.trials
        ]
        lines += [f"not tried {name}: {why}" for name, why in self.skipped.items()]
        if self.plan is None:
            return "\n".join([*lines, "off: no drafter could pay here"])
        best = self.plan.best
        what = "chosen" if self.drafter is not None else "off; the least slow is"
        lines.append(
            f"{what} {best.drafter}, depth {best.tree.depth}, {best.tree.num_nodes} nodes:"
        )
        lines[-1] += f" foretold speed-up {best.speed_up:.2f}"
        if other := self.plan.runner_up:
            lines.append(f"next {other.drafter}, depth {other.tree.depth}: {other.speed_up:.2f}")
        return "\n".join(lines)


def choose_drafter(
    target: Model, prompts: Any, drafter: Auto | str = "auto", **options: Any
) -> Choice:
    """Returns what `generate(..., drafter="auto")` would run, after trials on the prompts.

    Args:
      target, prompts, options: as for `magicjax.generate`.
      drafter: how to choose.

    Raises:
      ValueError, TypeError: bad input, also a drafter that cannot draft for these prompts.
      FileNotFoundError: the device has no profile.
    """
    choice, *_ = _choose(_question(target, prompts, _how(drafter), options))
    return choice


def check(target: Model, prompts: Any, drafter: Auto, **options: Any) -> None:
    """Raises what `choose_drafter` would before anything runs; a skeleton of a target will do."""
    _question(target, prompts, drafter, options)


def _how(auto: Auto | str) -> Auto:
    """Returns how to choose; "auto" is `Auto()`.

    Raises ValueError for another text.
    """
    if isinstance(auto, Auto):
        return auto
    if auto != "auto":
        raise ValueError(
            f"drafter={auto!r}: of texts only 'auto' is one; pass magicjax.SelfSpeculation(...), "
            "or wrap a model, magicjax.SmallModel(model)"
        )
    return Auto()


@dataclasses.dataclass(frozen=True)
class _Question:
    """A checked call.

    Attributes:
      auto: how to choose.
      drafters: the candidates by name.
      requests: of each of them, with the tree of the trial.
      machine: what they run on.
    """

    auto: Auto
    drafters: dict[str, Drafter]
    requests: dict[str, Request]
    machine: costs.Machine

    @property
    def request(self) -> Request:
        """The first; what is no matter of drafters is the same in all."""
        return next(iter(self.requests.values()))

    @property
    def target(self) -> Model:
        return self.request.target

    @property
    def sizes(self) -> costs.Sizes:
        return sizes_of_model(self.target, None)

    @property
    def context(self) -> int:
        """Tokens of a row half-way through the output."""
        lengths, limits = (np.asarray(getattr(self.request, n)) for n in ("lengths", "limits"))
        return int((lengths + limits / 2).mean())


def _question(target: Model, prompts: Any, auto: Auto, options: dict[str, Any]) -> _Question:
    """Returns the checked call; nothing has run."""
    if options.get("tree") is not None:
        raise ValueError("drafter='auto' chooses the tree itself: leave tree out")
    options = {name: value for name, value in options.items() if name != "tree"}
    device = device_of(auto.device)
    mesh: AnyMesh | None = options.get("mesh")
    shape = {DATA: 1, MODEL: 1} if mesh is None else dict(mesh.shape)
    machine = costs.Machine(device, shape[DATA], shape[MODEL])
    drafters = auto.drafters
    if drafters is None:
        plain = prepare(target, prompts, **options)
        drafters = _usual(int(np.asarray(plain.lengths).min()), auto.tree)
    named = {name_of(drafter): drafter for drafter in drafters}
    if len(named) < len(drafters):
        raise ValueError(
            f"two of the drafters have one name: {', '.join(map(name_of, drafters))}; a plan could "
            "not tell them apart"
        )
    requests = {
        name: prepare(target, prompts, drafter=drafter, tree=auto.tree, **options)
        for name, drafter in named.items()
    }
    question = _Question(auto, named, requests, machine)
    if target.params is not None:  # of a skeleton it is not known
        _check_dtype(question)
    return question


def device_of(device: str | os.PathLike | None) -> costs.Device:
    """Returns the device of a profile, of a preset's name, or the one at hand (None)."""
    if device is None:
        return costs.load_profile(costs.default_profile())
    if str(device).endswith(".json"):
        return costs.load_profile(device)
    return costs.find_device(str(device))


def _usual(shortest: int, tree: TokenTree) -> list[Drafter]:
    """Returns the drafters that are tried if the user names none."""
    found: list[Drafter] = [
        SelfSpeculation(policy=policy, budget=budget)
        for policy in ("streaming", "snapkv")
        for budget in BUDGETS
        if budget < shortest
    ]
    found = [drafter for drafter in found if deepest_of(drafter) >= tree.depth]
    return [LookUp(), *found]


def _check_dtype(question: _Question) -> None:
    device, sizes = question.machine.device, question.sizes
    itemsize = np.dtype(device.dtype).itemsize
    if sizes.itemsize != itemsize:
        raise ValueError(
            f"the rates of {device.name} are those of {device.dtype}, and the target is in "
            f"{question.target.dtype}: measure it with `magicjax calibrate --dtype "
            f"{question.target.dtype}`"
        )


def _choose(question: _Question) -> tuple[Choice, Behind, dict[str, float]]:
    """Returns (the choice, what came of the prompts, seconds by name in `Stats`)."""
    rounds = question.auto.trial_rounds
    execution.tell(question.request)
    drafters = list(question.drafters.values())
    behind, prefill_s, compile_s = behind_prompts(question.request, drafters)
    begin = time.perf_counter()
    plain, spent = run_trial(question.request, "", behind, rounds, plain=True)
    ways, trials, skipped = _Ways(question, plain), [plain], {}
    for name in ways.most_promising_first():
        if not plain.rounds:
            skipped[name] = "all rows ended with prefill's token"
            continue
        if why := ways.cannot_win(name):
            skipped[name] = why
            continue
        found, compiling = run_trial(question.requests[name], name, behind, rounds)
        # Plain steps again beside it, so that a busy moment of the machine meets both.
        beside, _ = run_trial(question.request, "", behind, rounds // 2, plain=True)
        logger.info("tried %s: %.2f ms a round", name, 1e3 * found.seconds)
        ways.add(found, beside)
        trials.append(found)
        spent += compiling
    spent += ways.run_off(behind)
    choice = ways.choice(tuple(trials), skipped)
    logger.info("%s", choice)
    plan_s = time.perf_counter() - begin - spent
    times = {"prefill_s": prefill_s, "compile_s": compile_s + spent, "plan_s": plan_s}
    return choice, behind, times


class _Ways:
    """The ways to draft that were tried so far, as the planner takes them."""

    def __init__(self, question: _Question, plain: Trial):
        self.question = question
        target, where = question.sizes, self._where
        foretold = sum(costs.plain_step(target, *where).values())
        self.foretold = foretold
        self.plain = [plain.seconds]
        self.best = 1.0
        self.found: list[planner.Candidate] = []
        self.finalists: list[planner.Prediction] = []
        self.plan: planner.Plan | None = None

    @property
    def _where(self) -> tuple[costs.Machine, int, int]:
        question = self.question
        return question.machine, len(question.request.prompts), question.context

    def _candidate(
        self, name: str, acceptance: Sequence[Sequence[float]] = ((1.0,),), **measured: Any
    ) -> planner.Candidate:
        drafter = self.question.drafters[name]
        found = candidate_of(drafter, self.question.sizes, None, acceptance, **measured)
        return dataclasses.replace(found, deepest=min(found.deepest, self.question.auto.tree.depth))

    def _most(self, name: str) -> float:
        return planner.most_speed_up(self.question.sizes, self._candidate(name), *self._where)

    def most_promising_first(self) -> list[str]:
        """Returns the drafters' names, by the speed-up if all they drafted were right."""
        return sorted(self.question.drafters, key=lambda name: -self._most(name))

    def cannot_win(self, name: str) -> str:
        """Returns why a trial would be in vain; "" if it might not."""
        most = self._most(name)
        if most * MARGIN >= max(self.best, LEAST_GAIN):
            return ""
        return f"at most {most:.2f} times as fast as plain decoding if all it drafts were right"

    @property
    def scale(self) -> float:
        """Measured T_target, over what is foretold."""
        return self._believed(statistics.median(self.plain) / self.foretold)

    def _believed(self, ratio: float) -> float:
        """Returns by how much times are set right by a trial's, which are few and in no turns.

        A profile that has timed the model is a second measurement, and weighs as much.
        """
        device, key = self.question.machine.device, self.question.sizes.key
        return ratio if device.steps(key, costs.PASS) is None else math.sqrt(ratio)

    def add(self, found: Trial, beside: Trial) -> None:
        """Adds what a trial measured, and plain steps beside it."""
        self.plain.append(beside.seconds)
        target, tree = self.question.sizes, self.question.auto.tree
        way = self._candidate(found.name, found.acceptance, tokens=found.tokens)
        foretold = planner.cost_of(target, way, *self._where, tree).total
        way = dataclasses.replace(way, scale=self._believed(found.seconds / foretold))
        self.found.append(way)
        predictions = planner.predictions(target, way, *self._where, self.scale)
        self.best = max(self.best, *(p.speed_up for p in predictions))

    def run_off(self, behind: Behind) -> float:
        """Times the best of the plan again beside plain decoding, in turns, and plans with that.

        The best of many predictions is likely one that errs upwards.

        Returns:
          Seconds of compiling.
        """
        if not self.found:
            return 0.0
        target, question = self.question.sizes, self.question
        plan = planner.plan(target, self.found, *self._where, self.scale)
        best_of_each = [
            max(
                planner.predictions(target, way, *self._where, self.scale),
                key=lambda prediction: prediction.speed_up,
            )
            for way in self.found
        ]
        self.finalists = sorted(best_of_each, key=lambda p: -p.speed_up)[:FINALISTS]
        variants, compile_s, state = [], 0.0, None
        for prediction in (None, *self.finalists):
            request = (
                question.request if prediction is None else question.requests[prediction.drafter]
            )
            drafter = None if prediction is None else request.drafter
            tree = ROOT_ONLY if prediction is None else prediction.tree
            own = dataclasses.replace(request, drafter=drafter)
            state, compiling = behind.state(own)
            settings = request.settings.with_tree(tree)
            compile_s += compiling + _compile(own, settings, state)
            variants.append(Variant(own, settings, state.drafter))
            behind.take_back(state, request)
        assert state is not None
        state = dataclasses.replace(state, cache=behind.cache)
        state = take_turns(variants, state, TURNS)
        behind.take_back(state, question.request)
        plain, *rest = ([*variant.seconds] for variant in variants)
        self.plan = self._measured(plan, plain, rest)
        return compile_s

    def _measured(
        self, plan: planner.Plan, plain: list[float], rounds: list[list[float]]
    ) -> planner.Plan:
        """Returns the plan with what the run-off measured of its best."""
        target = statistics.median(plain)
        timed = []
        for prediction, seconds in zip(self.finalists, rounds, strict=True):
            ratio = statistics.median(np.divide(seconds, plain))  # of each turn
            cost = prediction.cost
            cost = cost.scaled(target / cost.target, ratio * target / cost.total)
            timed.append(dataclasses.replace(prediction, cost=cost))
        best, *others = sorted(timed, key=lambda p: -p.speed_up)
        runner_up = others[0] if others else plan.runner_up
        return dataclasses.replace(plan, best=best, runner_up=runner_up, target=target)

    def choice(self, trials: tuple[Trial, ...], skipped: dict[str, str]) -> Choice:
        """Returns what is best of all that was tried."""
        auto, target, plan = self.question.auto, self.question.sizes, self.plan
        if plan is None or plan.best.speed_up < LEAST_GAIN:
            return Choice(None, None, plan, trials, skipped, {}, auto)
        best = plan.best
        way = next(way for way in self.found if way.name == best.drafter)
        seconds = {}
        if best.tree == chain(best.tree.depth):
            depths = {best.tree.depth, *(d for d in DEPTHS if d <= way.deepest)}
            scale = best.cost.total / planner.cost_of(target, way, *self._where, best.tree).total
            seconds = {0: plan.target} | {
                d: scale * planner.cost_of(target, way, *self._where, chain(d)).total
                for d in depths
            }
        drafter = self.question.drafters[best.drafter]
        return Choice(drafter, best.tree, plan, trials, skipped, seconds, auto)


def generate(
    target: Model, prompts: Any, auto: Auto | Choice | str, options: dict[str, Any]
) -> Output:
    """Returns what `magicjax.generate` does, for a drafter that is to be chosen, or was."""
    programs = compilation.count()
    if isinstance(auto, Choice):
        request = _request(target, prompts, auto, options)
        execution.tell(request)
        state, prefill_s, compile_s = execution.start(request)
        choice, times = auto, {"prefill_s": prefill_s, "compile_s": compile_s, "plan_s": 0.0}
    else:
        question = _question(target, prompts, _how(auto), options)
        choice, behind, times = _choose(question)
        request = _of_choice(question, choice)
        state, compiling = behind.state(request)
        times["compile_s"] += compiling
    state, calls, decode_s, compiling = run_choice(request, choice, state)
    times["compile_s"] += compiling
    output = execution.output_of(
        request,
        state,
        calls,
        **times,
        decode_s=decode_s,
        depths=tuple(depth for depth, _ in calls),
        compilations=compilation.count() - programs,
    )
    return dataclasses.replace(output, choice=choice)


def _request(target: Model, prompts: Any, choice: Choice, options: dict[str, Any]) -> Request:
    """Returns the request of a choice that was made before."""
    if options.get("tree") is not None:
        raise ValueError("a choice has its own tree: leave tree out")
    options = {name: value for name, value in options.items() if name != "tree"}
    if choice.drafter is None:
        return prepare(target, prompts, **options)
    tree = choice.auto.tree if _replans(choice, bool(options.get("do_sample"))) else choice.tree
    return prepare(target, prompts, drafter=choice.drafter, tree=tree, **options)


def _of_choice(question: _Question, choice: Choice) -> Request:
    """Returns the request of the chosen drafter, of a state as deep as it will need."""
    if choice.drafter is None or choice.tree is None:
        plain = question.request.settings.with_tree(ROOT_ONLY)
        return dataclasses.replace(question.request, drafter=None, settings=plain)
    request = question.requests[choice.name]
    if _replans(choice, request.sampling is not None):
        return request
    return dataclasses.replace(request, settings=request.settings.with_tree(choice.tree))


def _replans(choice: Choice, sampling: bool) -> bool:
    wanted = choice.auto.replan
    return bool(choice.seconds) and (not sampling if wanted is None else wanted)


def run_choice(
    request: Request, choice: Choice, state: DecodeState
) -> tuple[DecodeState, list[Call], float, float]:
    """Returns (the state when all rows have ended, calls, seconds, seconds of compiling).

    Args:
      request: with the choice's drafter.
      choice: what to run.
      state: of the request, behind the prompts.
    """
    if choice.drafter is None or not _replans(choice, request.sampling is not None):
        depth = request.settings.shape.depth
        state, seconds, compiling = execution.run(request, request.settings, state)
        return state, [(depth, np.asarray(state.histogram))], seconds, compiling
    assert choice.tree is not None
    trial = next(trial for trial in choice.trials if trial.name == choice.name)
    rates = [sum(row) for row in trial.acceptance]
    controller = Controller(choice.seconds, rates, choice.tree.depth)
    return run_replanned(request, list(choice.seconds), controller, state, choice.auto.rounds)


def run_replanned(
    request: Request, depths: Sequence[int], controller: Any, state: DecodeState, rounds: int
) -> tuple[DecodeState, list[Call], float, float]:
    """Returns (the state when all rows have ended, calls, seconds, seconds of compiling).

    Args:
      request: with a drafter, of the state.
      depths: among which the controller chooses; all are compiled before the first call. At 0
        nothing is drafted.
      controller: its `depth` is that of the next call, from which it is made to `learn`.
      state: as deep as the deepest.
      rounds: of a call.
    """
    variants = {d: request.settings.with_tree(chain(d) if d else ROOT_ONLY) for d in depths}
    compile_s = sum(_compile(request, settings, state) for settings in variants.values())
    calls: list[Call] = []
    counted, decode_s = np.zeros(state.histogram.shape, np.int32), 0.0
    while not np.asarray(state.ended).all():
        depth = controller.depth
        state, seconds, _ = execution.run(request, variants[depth], state, rounds)
        histogram = np.array(state.histogram)
        of_call = histogram - counted
        counted, decode_s = histogram, decode_s + seconds
        calls.append((depth, of_call))
        controller.learn(of_call.sum(0), seconds, int(of_call.sum(1).max()))
    return state, calls, decode_s, compile_s


def _compile(request: Request, settings: Settings, state: DecodeState) -> float:
    arguments = request.target, request.drafter, state
    return compilation.program("decode", settings, *arguments)[1]
