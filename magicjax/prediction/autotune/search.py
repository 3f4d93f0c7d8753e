"""The search of `drafter="auto"`: trials, a plan, and a timed comparison of the best candidates.

The search state is frozen; every step returns the next state.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from magicjax.decoding import memory, program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.paired_timing import PrefilledPrompts, median_ratio, time_decoders
from magicjax.decoding.preparation import place, validate
from magicjax.decoding.request import Request, RequestOptions
from magicjax.drafters import Drafter, PromptLookup, SelfSpeculation
from magicjax.model import Model
from magicjax.prediction import cost_model, planner
from magicjax.prediction.autotune.choice import Auto, Choice, settings_of
from magicjax.prediction.autotune.trial import Trial, run_trial
from magicjax.prediction.planner.candidates import make_candidate, model_sizes, name_of
from magicjax.sampling_params import SamplingParams
from magicjax.trees.token_tree import ROOT_ONLY, TokenTree, chain
from sharding import DATA, STAGE, factored

logger = logging.getLogger("magicjax")

BUDGETS = (64, 256, 1024)  # of the default candidates
DEPTHS = (1, 2, 4, 6, 8)  # of the adaptive depth, besides the chosen one
LEAST_GAIN = 1.03  # smaller speedups are within the error of the measurements
MARGIN = 1.15  # error of a prediction without a trial
FINALISTS = 3
REPEATS, MIN_SECONDS = 15, 5.0  # of the comparison


@dataclasses.dataclass(frozen=True)
class SearchProblem:
    """A validated call.

    Attributes:
      auto: the settings.
      requests: of each candidate by name, with the tree of the trials.
      unsupported: default candidates that the options exclude, each with the reason.
      sizes: of the target.
      workload: machine, batch, and the mean context when half of the new tokens are decoded.
      allocation: machine, batch, and the slots of each row's cache.
    """

    auto: Auto
    requests: dict[str, Request]
    unsupported: dict[str, str]
    sizes: cost_model.Sizes
    workload: tuple[cost_model.Machine, int, int]
    allocation: tuple[cost_model.Machine, int, int]

    @property
    def request(self) -> Request:
        """The first request; all are equal except for the drafter."""
        return next(iter(self.requests.values()))

    def drafter(self, name: str) -> Drafter:
        """Returns a candidate's drafter."""
        drafter = self.requests[name].drafter
        assert drafter is not None
        return drafter

    def candidate(
        self, name: str, acceptance: Any = ((1.0,),), **measured: Any
    ) -> planner.Candidate:
        """Returns a candidate of the planner; costs and memory do not depend on acceptance."""
        drafter, dtype = self.drafter(name), self.workload[0].device.dtype
        candidate = make_candidate(drafter, self.sizes, dtype, acceptance, **measured)
        deepest = min(candidate.deepest, self.auto.tree.depth)
        return dataclasses.replace(candidate, deepest=deepest)

    def predictions(self, candidate: planner.Candidate) -> list[planner.Prediction]:
        """Returns the prediction for each tree of a candidate, the fastest first."""
        return planner.predictions(self.sizes, candidate, *self.workload)

    def upper_bound(self, name: str) -> float:
        """Returns the predicted speedup if every drafted token is accepted."""
        return self.predictions(self.candidate(name))[0].speedup

    def memory(self, name: str) -> float:
        """Returns the bytes that a candidate needs on each device besides the target."""
        candidate = self.candidate(name)
        return candidate.draft.memory(*self.allocation, candidate.shared)

    def free_memory(self) -> float:
        """Returns the bytes that the target leaves free; raises ValueError if it does not fit."""
        return planner.checked_free_memory(self.sizes, *self.allocation)


def make_problem(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> SearchProblem:
    """Returns the validated problem; nothing runs, and no weights are loaded.

    Raises:
      ValueError, TypeError, FileNotFoundError: as for `magicjax.choose_drafter`.
    """
    if options.tree is not None:
        raise ValueError("drafter='auto' chooses the tree: omit tree")
    auto, mesh = settings_of(options.drafter), options.mesh
    shape = {DATA: 1, STAGE: 1} if mesh is None else factored(mesh).shape
    if shape[STAGE] > 1:
        raise ValueError(
            f"drafter='auto' on stage={shape[STAGE]}: the cost model does not support pipeline "
            "stages; name a drafter, or use a mesh without stages"
        )
    profile = auto.profile or cost_model.default_profile()
    device = cost_model.device_of(profile)
    without_drafter = dataclasses.replace(options, drafter=None, verifier=None)
    plain = validate(target, prompts, params, without_drafter)

    def request_of(drafter: Drafter) -> Request:
        with_drafter = dataclasses.replace(options, drafter=drafter, tree=auto.tree)
        return validate(plain.target, plain.prompts, params, with_drafter)

    requests, unsupported = _requests(plain, auto, request_of)
    request, devices = next(iter(requests.values())), 1 if mesh is None else mesh.size
    machine = cost_model.Machine(device, shape[DATA], devices // shape[DATA])
    context = np.asarray(request.rows.lengths) + np.asarray(request.rows.limits) / 2
    cost_model.check_dtype(device, str(target.dtype), profile)
    return SearchProblem(
        auto,
        requests,
        unsupported,
        model_sizes(request.target, device.dtype),
        workload=(machine, len(context), int(context.mean())),
        allocation=(machine, len(context), request.settings.capacity),
    )


def placed(problem: SearchProblem) -> SearchProblem:
    """Returns the problem with its models and arrays on the devices.

    Raises:
      ValueError: the target and the caches do not fit the memory.
    """
    request = problem.request
    if request.target.params is None:
        memory.check(dataclasses.replace(request, drafter=None))
    requests, target = {}, request.target
    for name, each in problem.requests.items():
        each = dataclasses.replace(each, target=target)
        with memory.explained(each):  # the drafter may make a copy of the target
            requests[name] = place(each)
        target = requests[name].target  # loaded once
    problem = dataclasses.replace(problem, requests=requests)
    problem.free_memory()
    return problem


def _requests(
    plain: Request, auto: Auto, request_of: Callable[[Drafter], Request]
) -> tuple[dict[str, Request], dict[str, str]]:
    """Returns (the request of each candidate, the reason for each default without one), by name."""
    if auto.drafters is not None:
        names = [name_of(drafter) for drafter in auto.drafters]
        if len({*names}) < len(names):
            raise ValueError(f"drafters={', '.join(names)} have equal names: remove duplicates")
        return dict(zip(names, map(request_of, auto.drafters), strict=True)), {}
    requests, unsupported = {}, {}
    for drafter in default_drafters(int(np.asarray(plain.rows.lengths).min())):
        try:
            requests[name_of(drafter)] = request_of(drafter)
        except ValueError as error:
            unsupported[name_of(drafter)] = str(error)
    if not requests:
        name, reason = next(iter(unsupported.items()))
        raise ValueError(f"no default drafter supports these options; {name}: {reason}")
    return requests, unsupported


def default_drafters(shortest: int) -> list[Drafter]:
    """Returns the default candidates for prompts of at least `shortest` tokens."""
    return [PromptLookup()] + [
        SelfSpeculation(policy=policy, budget=budget)
        for policy in ("streaming", "snapkv")
        for budget in BUDGETS
        if budget < shortest
    ]


def fastest_first(predictions: Iterable[planner.Prediction]) -> list[planner.Prediction]:
    """Returns predictions by speedup."""
    return sorted(predictions, key=lambda prediction: prediction.speedup, reverse=True)


@dataclasses.dataclass(frozen=True)
class DrafterSearch:
    """What a search has measured so far.

    Attributes:
      problem: the input.
      prefilled: the prompts; the next step donates their cache.
      plain_seconds: of a plain step, when it was last timed.
      trials: plain decoding first.
      tokens: per round of each drafter and tree that has run a trial.
      candidates: with the acceptance of their trials; `scale` corrects the predicted times.
      skipped: the reason for each candidate without a trial.
      timed: predictions with the tokens of a trial and the costs of the comparison in their place.
    """

    problem: SearchProblem
    prefilled: PrefilledPrompts
    plain_seconds: float = 0.0
    trials: tuple[Trial, ...] = ()
    tokens: Mapping[tuple[str, TokenTree], float] = dataclasses.field(default_factory=dict)
    candidates: tuple[planner.Candidate, ...] = ()
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timed: Mapping[tuple[str, TokenTree], planner.Prediction] = dataclasses.field(
        default_factory=dict
    )


def choose(problem: SearchProblem) -> tuple[Choice, PrefilledPrompts, float]:
    """Returns (the choice, the prompts for its run, seconds of the search without compilation)."""
    drafters = [problem.drafter(name) for name in problem.requests]
    prefilled = PrefilledPrompts.create(problem.request, drafters)
    begin = time.perf_counter() - program_cache.totals()[1]
    search = DrafterSearch(problem, prefilled, skipped=problem.unsupported)
    search, plain = _run_trial(search, "", ROOT_ONLY)
    search = dataclasses.replace(search, trials=(plain,), plain_seconds=plain.seconds)
    for name in sorted(problem.requests, key=problem.upper_bound, reverse=True):
        reason = skip_reason(search, name) if plain.rounds else "prefill's token ended all rows"
        if reason:
            search = dataclasses.replace(search, skipped={**search.skipped, name: reason})
            continue
        search, trial = _run_trial(search, name)
        search, plain_after = _run_trial(search, "", ROOT_ONLY)
        search = add_trial(search, trial, plain_after)
    search = benchmark_finalists(search)
    choice = choice_of(search)
    logger.info("%s", choice)
    end = time.perf_counter() - program_cache.totals()[1]
    return choice, search.prefilled, end - begin


def _run_trial(
    search: DrafterSearch, name: str, tree: TokenTree | None = None
) -> tuple[DrafterSearch, Trial]:
    problem = search.problem
    request = problem.requests[name] if name else problem.request
    rounds = problem.auto.trial_rounds
    trial, prefilled = run_trial(request, name, search.prefilled, rounds, tree)
    tokens = {**search.tokens, (name, tree or problem.auto.tree): trial.tree_tokens}
    return dataclasses.replace(search, prefilled=prefilled, tokens=tokens), trial


def skip_reason(search: DrafterSearch, name: str) -> str:
    """Returns why a candidate needs no trial; "" if it needs one."""
    problem = search.problem
    if (memory := problem.memory(name)) > (free := problem.free_memory()):
        return f"it needs {memory / 1e9:.2f} GB per device; the target leaves {free / 1e9:.2f} GB"
    fastest = [problem.predictions(candidate)[0].speedup for candidate in search.candidates]
    bound, required = problem.upper_bound(name), max(LEAST_GAIN, *fastest, 1.0) / MARGIN
    if bound >= required:
        return ""
    return f"speedup at most {bound:.2f} if all drafts are accepted; {required:.2f} is required"


def add_trial(search: DrafterSearch, trial: Trial, plain_after: Trial) -> DrafterSearch:
    """Returns the search with a trial and the plain steps after it.

    The time of a round counts relative to the geometric mean of the plain steps before and after
    the trial, because other processes may slow the machine down at any time. The times of a profile
    that covers this target and draft count as much as the trial's.
    """
    problem = search.problem
    candidate = problem.candidate(trial.name, trial.acceptance, tokens=trial.chain_tokens)
    cost = planner.cost_of(problem.sizes, candidate, *problem.workload, problem.auto.tree)
    plain = math.sqrt(search.plain_seconds * plain_after.seconds)
    scale = (trial.seconds / plain) / (cost.total / cost.target)
    models = [(problem.sizes, cost_model.PASS), (candidate.draft.sizes, cost_model.DRAFT)]
    device = problem.workload[0].device
    if all(device.steps(sizes.key, kind) is not None for sizes, kind in models if sizes):
        scale = math.sqrt(scale)
    return dataclasses.replace(
        search,
        plain_seconds=plain_after.seconds,
        trials=(*search.trials, trial),
        candidates=(*search.candidates, dataclasses.replace(candidate, scale=scale)),
    )


def benchmark_finalists(search: DrafterSearch) -> DrafterSearch:
    """Returns the search with the best candidates timed against plain decoding, interleaved.

    Each finalist runs the tree with the best prediction. Then the fastest one runs chains of other
    depths, for the adaptive depth.
    """
    if not search.candidates:
        return search
    predictions = {one.name: search.problem.predictions(one) for one in search.candidates}
    best_trees = fastest_first(each[0] for each in predictions.values())
    finalists = that_fit(search.problem, best_trees)[:FINALISTS]
    search = _time(search, finalists)
    best = fastest_first(search.timed.values())[0]
    if best.tree != chain(best.tree.depth):
        return search
    chains = {chain(depth) for depth in (*DEPTHS, best.tree.depth)}
    depths = [one for one in predictions[best.drafter] if one.tree in chains]
    return _time(search, depths) if len(depths) > 1 else search


def that_fit(
    problem: SearchProblem, predictions: Sequence[planner.Prediction]
) -> list[planner.Prediction]:
    """Returns the first predictions whose caches and weights fit into memory at once."""
    selected, free = [], problem.free_memory()
    for prediction in predictions:
        if (memory := problem.memory(prediction.drafter)) <= free:
            selected.append(prediction)
            free -= memory
    return selected


def _time(search: DrafterSearch, predictions: Sequence[planner.Prediction]) -> DrafterSearch:
    """Returns the search with measured tokens and times of some predictions.

    The best of many predictions is probably too high, so each tree runs a trial of its own, unless
    it has run one already.
    """
    for prediction in predictions:
        if (prediction.drafter, prediction.tree) not in search.tokens:
            search, _ = _run_trial(search, prediction.drafter, prediction.tree)
    plain = dataclasses.replace(search.problem.request, drafter=None)
    decoders = [Decoder(plain, plain.settings.with_tree(ROOT_ONLY))]
    for prediction in predictions:
        request = search.problem.requests[prediction.drafter]
        decoders.append(Decoder(request, request.settings.with_tree(prediction.tree)))
    measured = time_decoders(search.prefilled, decoders, REPEATS, MIN_SECONDS)
    (plain_times, *times), prefilled = measured
    timed, plain_s = dict(search.timed), float(np.median(plain_times))
    for prediction, seconds in zip(predictions, times, strict=True):
        cost, round_s = prediction.cost, plain_s * median_ratio(seconds, plain_times)
        cost = cost.scaled(plain_s / cost.target, round_s / cost.total)
        key = prediction.drafter, prediction.tree
        timed[key] = dataclasses.replace(prediction, tokens=search.tokens[key], cost=cost)
    return dataclasses.replace(search, prefilled=prefilled, timed=timed)


def choice_of(search: DrafterSearch) -> Choice:
    """Returns the fastest of what was timed, or plain decoding."""
    timed, drafter, tree, seconds = fastest_first(search.timed.values()), None, None, {}
    if timed and timed[0].speedup >= LEAST_GAIN:
        best = timed[0]
        drafter, tree = search.problem.drafter(best.drafter), best.tree
        ratios = {  # to a plain step
            one.tree.depth: one.cost.total / one.cost.target
            for one in timed
            if one.drafter == best.drafter and one.tree == chain(one.tree.depth)
        }
        if tree == chain(tree.depth):
            seconds = {d: r * best.cost.target for d, r in sorted({0: 1.0, **ratios}.items())}
    return Choice(
        drafter=drafter,
        tree=tree,
        timed=tuple(timed),
        trials=search.trials,
        skipped=dict(search.skipped),
        round_seconds=seconds,
        predicted_speedup={
            one.name: search.problem.predictions(one)[0].speedup
            for one in search.candidates
            if one.name in {prediction.drafter for prediction in timed}
        },
        auto=search.problem.auto,
    )
