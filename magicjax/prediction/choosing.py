"""`drafter="auto"` and `tree="auto"`: trials on the prompts, and the run of the fastest drafter.

Every candidate runs a few rounds from one prefill, which measures its acceptance and the ratio of
its round to a plain step. The two best are timed with several trees, interleaved with plain
decoding. The fastest tree is the choice; in greedy decoding, the controller
(`magicjax.decoding.controller`) then adapts the depth of a chain.
"""

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from magicjax.decoding import memory, program_cache
from magicjax.decoding.controller import PLAIN, Controller, Mode, RoundTimes
from magicjax.decoding.decoder import Clock, Decoder
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.memory import OutOfMemoryError
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.decoding.preparation import drafter_and_tree, place, prepare, validated_request
from magicjax.decoding.request import Request, RequestOptions
from magicjax.decoding.rounds import Call, Started, run_adaptive, run_to_end
from magicjax.decoding.text import Text
from magicjax.drafters import (
    Cascade,
    Drafter,
    Eagle,
    Ensemble,
    PromptLookup,
    SelfSpeculation,
    SmallModel,
    SuffixLookup,
)
from magicjax.drafters.spec import text_of
from magicjax.drafters.text_lookup import TextLookup
from magicjax.model import Model
from magicjax.prediction import cost_model, planner
from magicjax.prediction.planner.candidates import TARGET_DRAFTERS, make_candidate, model_sizes
from magicjax.prediction.trials import Trial, run_trial, time_trees, trial_of, with_tree
from magicjax.sampling_params import SamplingParams
from magicjax.trees.token_tree import ROOT_ONLY, TokenTree, Tree, TreeShape, chain, expansion
from sharding import STAGE, AnyMesh, factored, global_arrays

logger = logging.getLogger("magicjax")

BUDGETS = (64, 256, 1024)  # of the default candidates
RANKS = expansion((2, 2, 1, 1, 1, 1))  # of the trial of tree="auto": measures ranks
LATER_DEPTH = 4  # of the chains of a lookup that may gain later
LEAST_GAIN = 1.03  # smaller speedups are within the error of the measurements
FINALISTS = 2
RUN_ROUNDS = 32  # between two changes of the depth
PRIOR_ROUNDS = 16  # weight of a trial's acceptance rates


@dataclasses.dataclass(frozen=True)
class Auto:
    """Settings of `drafter="auto"`.

    The choice depends on timings and can differ between runs. Sampled text follows the target's
    distribution in any case, but with a given seed it depends on the choice. For reproducible text,
    pass the returned `Choice` as `drafter`, or use verifier="naive".

    Trials see only the first rounds. They do not see gains that appear later in the text; prompt
    lookup, for example, improves with its length. Meshes with pipeline stages are not supported.

    Attributes:
      drafters: the candidates, of any kind, or their texts; None: prompt lookup, suffix lookup, and
        self-speculation with streaming and SnapKV caches of 64, 256 and 1,024 slots, as far as the
        prompts are longer.
      tree: the static tree of the trials; no deeper one is timed. A tree with branches also
        measures acceptance by rank, and optimal trees are then timed as well as chains. An ensemble
        uses it for all members.
      profile: the device's profile; candidates are skipped that could not be faster if all drafts
        were accepted. A file from `magicjax calibrate`, or the name of a preset (one of
        `cost_model.DEVICES`). None: the file that calibrate writes by default, if there is one.

    Raises:
      ValueError, TypeError: an empty list, an element that is not a drafter, drafters of equal
        names, or a tree that is not static or has no child.
    """

    drafters: Sequence[Drafter | str] | None = None
    tree: TokenTree = chain(8)
    profile: str | os.PathLike | None = None

    def __post_init__(self):
        if self.drafters is not None:
            if isinstance(self.drafters, Drafter | str):
                raise TypeError(
                    f"drafters={self.drafters!r} is one drafter: pass a list, drafters=[...]"
                )
            object.__setattr__(self, "drafters", tuple(self.drafters))
            if not self.drafters:
                raise ValueError("drafters=() is empty: give at least one, or omit drafters")
            for each in self.drafters:
                if not isinstance(each, Drafter | str):
                    raise TypeError(
                        f"drafters has {each!r}: pass drafters, or texts such as 'prompt-lookup:4'"
                    )
            names = [each if isinstance(each, str) else text_of(each) for each in self.drafters]
            if len({*names}) < len(names):
                raise ValueError(f"drafters={', '.join(names)} have equal names: remove duplicates")
        if not isinstance(self.tree, TokenTree) or self.tree.num_nodes < 2:
            raise ValueError(f"tree={self.tree!r} must be a static tree with at least one child")


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of `drafter="auto"`. Pass it as `drafter` to reuse it without trials.

    Attributes:
      drafter, tree: the fastest; None: plain decoding is faster. A tree of only a root with
        `times`: plain decoding, until a lookup in the text gains.
      trials: measurements, the best first.
      timed: measured speedup by name and tree, the highest first.
      skipped: the reason for each candidate without a trial.
      times: seconds of a round of each depth of a chain, 0 for a plain step; {} for other trees.
    """

    drafter: Drafter | None
    tree: Tree | None
    trials: tuple[Trial, ...]
    timed: Mapping[tuple[str, Tree], float]
    skipped: Mapping[str, str]
    times: Mapping[int, float]

    @property
    def name(self) -> str:
        """The drafter as commands write it, or "off"."""
        return "off" if self.drafter is None else text_of(self.drafter)

    def adapts(self, sampled: bool, mesh: AnyMesh | None) -> bool:
        """Returns whether the depth changes during a run: of a greedy one, in one process.

        Sampled text would depend on times, and the times of several processes differ.
        """
        is_multi_process = isinstance(mesh, Mesh) and mesh.is_multi_process
        return bool(self.times) and not sampled and not is_multi_process

    def run(
        self, decoder: Decoder, state: DecodeState, texts: Sequence[Text]
    ) -> tuple[DecodeState, list[Call]]:
        """Returns (the state when all texts have ended, calls) of a run that starts after prefill.

        The depth of a chain changes if it `adapts`.
        """
        request = decoder.request
        if not self.adapts(request.rows.sampling is not None, request.settings.mesh):
            state = run_to_end(decoder, state, texts)
            histogram = global_arrays.fetch(state.histogram)
            return state, [(decoder.loop_settings.shape.depth, histogram)]
        assert self.tree is not None
        trial = next(trial for trial in self.trials if trial.name == self.name)
        modes = {depth: Mode(self.name, depth) if depth else PLAIN for depth in self.times}
        controller = Controller.create(
            modes.values(),
            len(texts),
            first=modes[self.tree.depth],
            rates=[by_rank[0] for by_rank in trial.acceptance],
            rounds=PRIOR_ROUNDS,
            times=RoundTimes((1,), {modes[d]: (s,) for d, s in self.times.items()}),
            until_last_row_ends=True,
        )
        decoders = {
            mode: with_tree(decoder, chain(depth) if depth else ROOT_ONLY)
            for depth, mode in modes.items()
        }
        return run_adaptive(decoders, controller, state, texts, RUN_ROUNDS)

    def __str__(self) -> str:
        """Returns the measurements and the choice as lines of text."""
        lines = [*map(str, self.trials)]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        if not self.timed:
            return "\n".join([*lines, "chosen: plain decoding; no drafter was timed"])
        best, *others = (
            f"{name}, depth {tree.depth}, {tree.shape.num_nodes} nodes: {speedup:.2f} x plain"
            for (name, tree), speedup in self.timed.items()
        )
        note = ""
        if self.drafter is None:
            note = "plain decoding; the fastest drafter is "
        elif self.tree == ROOT_ONLY and self.times:
            note = f"plain decoding until {self.name} gains; the fastest drafter is "
        return "\n".join([*lines, f"chosen: {note}{best}", *(f"slower: {x}" for x in others)])


def choose_drafter(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    drafter: Auto | str = "auto",
    verifier: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    backend: str | None = None,
    mesh: Mesh | None = None,
) -> Choice:
    """Returns the choice of `generate(..., drafter="auto")`, after trials on the prompts.

    Args:
      target, prompts, params, verifier, eos_token_id, backend, mesh: see `magicjax.generate`.
      drafter: the settings.

    Raises:
      ValueError, TypeError: bad input, also a drafter that does not support these options.
      FileNotFoundError: the profile does not exist.
    """
    options = RequestOptions(
        drafter=drafter,
        verifier=verifier,
        eos_token_id=eos_token_id,
        backend=backend,
        mesh=mesh,
    )
    return choose(validated_candidates(target, prompts, params, options))[0]


def is_choice(drafter: Any) -> bool:
    """Returns whether an argument `drafter` leaves the choice to this module, or is its choice."""
    return isinstance(drafter, Auto | Choice) or (isinstance(drafter, str) and drafter == "auto")


def for_tree(drafter: Drafter, profile: str | os.PathLike | None = None) -> Auto:
    """Returns the settings that choose the tree of one drafter, `tree="auto"`."""
    branches = isinstance(drafter, TARGET_DRAFTERS | SmallModel | Eagle)
    return Auto((drafter,), RANKS if branches else Auto.tree, profile)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Validated requests to choose from.

    Attributes:
      plain: without a drafter.
      requests: the request of each candidate, by name.
      skipped: the reason for each candidate that the options or the cost model exclude.
    """

    plain: Request
    requests: dict[str, Request]
    skipped: dict[str, str]


def validated_candidates(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> Candidates:
    """Returns the candidates; nothing runs, and no weights are loaded.

    Raises:
      ValueError, TypeError, FileNotFoundError: see `choose_drafter`.
    """
    if options.tree is not None:
        raise ValueError("drafter='auto' chooses the tree: omit tree")
    if not (isinstance(options.drafter, Auto) or options.drafter == "auto"):
        raise ValueError(
            f"drafter={options.drafter!r} is not a choice of drafters: pass 'auto', or "
            "magicjax.Auto(...)"
        )
    auto = options.drafter if isinstance(options.drafter, Auto) else Auto()
    if options.mesh is not None and factored(options.mesh).shape[STAGE] > 1:
        raise ValueError(
            f"drafter='auto' on stage={factored(options.mesh).shape[STAGE]}: trials share one "
            "prefilled cache, which pipeline stages do not support; name a drafter, or use a mesh "
            "without stages"
        )
    if isinstance(options.mesh, Mesh) and options.mesh.is_multi_process:
        raise ValueError(
            f"drafter='auto' on a mesh of {jax.process_count()} processes, whose times differ: "
            "name a drafter"
        )
    upper_bound = upper_bounds(auto.profile)
    without_drafter = dataclasses.replace(options, drafter=None, verifier=None)
    plain = validated_request(target, prompts, params, without_drafter)
    requests, skipped = dict[str, Request](), dict[str, str]()
    candidates = auto.drafters or default_drafters(min(map(len, plain.prompts)))
    for drafter in (drafter_and_tree(target, each, None)[0] for each in candidates):
        assert drafter is not None  # as the candidates are
        has_trees = isinstance(drafter, Ensemble) and drafter.trees is not None
        tree = None if has_trees else auto.tree
        with_drafter = dataclasses.replace(options, drafter=drafter, tree=tree)
        try:
            request = validated_request(plain.target, plain.prompts, params, with_drafter)
        except ValueError as error:
            if auto.drafters is not None:
                raise
            skipped[text_of(drafter)] = str(error)
            continue
        speedup = upper_bound(request, auto.tree.depth)
        if speedup is not None and speedup < 1:
            reason = f"speedup at most {speedup:.2f} if all drafts are accepted"
            skipped[text_of(drafter)] = reason
        else:
            requests[text_of(drafter)] = request
    return Candidates(plain, requests, skipped)


def default_drafters(shortest: int) -> list[Drafter]:
    """Returns the default candidates for prompts of at least `shortest` tokens."""
    return [PromptLookup(), SuffixLookup()] + [
        SelfSpeculation(policy=policy, budget=budget)
        for policy in ("streaming", "snapkv")
        for budget in BUDGETS
        if budget < shortest
    ]


def upper_bounds(
    profile: str | os.PathLike | None,
) -> Callable[[Request, int], float | None]:
    """Returns the function from (a request, the deepest tree) to its highest possible speedup.

    It is None where the cost model does not know: without a profile, for models in another dtype
    than that of the default profile, and for some drafters.

    Raises:
      ValueError, FileNotFoundError: a profile that is named and cannot be read. The function raises
        ValueError if it is of another dtype than the models.
    """
    if profile is None and not os.path.exists(cost_model.default_profile()):
        return lambda request, depth: None
    source = profile or cost_model.default_profile()
    device = cost_model.device_of(source)

    def bound(request: Request, depth: int) -> float | None:
        settings, target = request.settings, request.target
        assert request.drafter is not None
        devices = 1 if settings.mesh is None else settings.mesh.size
        limits = global_arrays.fetch(request.rows.limits)
        context = int(np.mean([len(prompt) for prompt in request.prompts]) + limits.mean() / 2)
        sizes = model_sizes(target, device.dtype)
        if profile is not None:
            cost_model.check_dtype(device, str(target.dtype), profile)
        try:
            cost_model.check_dtype(device, str(target.dtype), source)
            candidate = make_candidate(request.drafter, sizes, device.dtype, ((1.0,),))
            candidate = dataclasses.replace(candidate, deepest=min(candidate.deepest, depth))
            machine = cost_model.Machine(device, settings.groups, devices // settings.groups)
            workload = machine, len(request.prompts), context
            return planner.predictions(sizes, candidate, *workload)[0].speedup
        except ValueError:
            return None

    return bound


def choose(candidates: Candidates) -> tuple[Choice, Decoder, PrefilledPrompts, float]:
    """Returns (the choice, its decoder, the prompts for its run, seconds of the search).

    The seconds exclude compilation.
    """
    plain, decoders = _place_candidates(candidates)
    trials, skipped = [], dict(candidates.skipped)
    for name, decoder in [*decoders.items()]:  # before the target's cache is allocated
        try:
            memory.check(decoder.request)
        except OutOfMemoryError as error:
            skipped[name] = str(error)
            del decoders[name]
    drafters = [d.drafter for d in decoders.values() if d.drafter is not None]
    prefilled = PrefilledPrompts.create(plain.request, drafters)
    begin = time.perf_counter() - program_cache.totals()[1]
    (_, plain_s), prefilled = run_trial(plain, prefilled)
    for name, decoder in decoders.items():
        if not plain_s:
            skipped[name] = "prefill's token ended all rows"
            continue
        (counted, seconds), prefilled = run_trial(decoder, prefilled)
        (_, plain_after_s), prefilled = run_trial(plain, prefilled)
        # Other processes may slow the machine down at any time.
        ratio = seconds / math.sqrt(plain_s * plain_after_s)
        trials.append(trial_of(name, decoder.loop_settings.tree, counted, ratio))
        plain_s = plain_after_s
    trials.sort(key=lambda trial: -trial.best)
    finalists = _finalists(decoders, trials)
    timed, seconds_of, prefilled = time_trees(plain, decoders, finalists, prefilled)
    choice = Choice(None, None, tuple(trials), timed, skipped, {})
    best, is_lookup = next(iter(timed), None), False
    if best is not None and timed[best] < LEAST_GAIN:
        # Lookups often begin to gain later in the text, and count what they would have gained.
        lookups = (name for name, _ in timed if isinstance(decoders[name].drafter, TextLookup))
        is_greedy, lookup = plain.request.rows.sampling is None, next(lookups, None)
        best = (lookup, ROOT_ONLY) if is_greedy and lookup is not None else None
        is_lookup = best is not None
    if best is not None:
        name, tree = best
        drafter, times = decoders[name].request.drafter, {}
        if is_lookup or (_is_chain(tree) and not isinstance(drafter, Ensemble | Cascade)):
            # A state for deeper trees would make every round slower.
            deepest = tree.depth or LATER_DEPTH
            chains = [
                (t.depth, s) for (n, t), s in seconds_of.items() if n == name and _is_chain(t)
            ]
            times = {depth: s for depth, s in sorted(chains) if depth <= deepest}
            times = {0: seconds_of["", ROOT_ONLY], **times}
        choice = dataclasses.replace(choice, drafter=drafter, tree=tree, times=times)
    logger.info("%s", choice)
    seconds = time.perf_counter() - program_cache.totals()[1] - begin
    decoder = plain if choice.tree is None else decoders[choice.name]
    return choice, _run_decoder(decoder, choice), prefilled, seconds


def _finalists(decoders: Mapping[str, Decoder], trials: Sequence[Trial]) -> Sequence[Trial]:
    """Returns the best trials, as many as have drafters whose caches fit the memory together."""
    request = decoders[trials[0].name].request if trials else None
    limit = memory.free_memory(request.target, request.settings.mesh) if request else None
    finalists = trials[:FINALISTS]
    needed = sum(memory.count(decoders[trial.name].request).draft_kv for trial in finalists)
    return finalists if limit is None or needed <= limit else trials[:1]


def _run_decoder(decoder: Decoder, choice: Choice) -> Decoder:
    """Returns the decoder of a choice, whose states are as deep as the trees that may run."""
    settings, request = decoder.loop_settings, decoder.request
    if choice.tree is None or (choice.tree == settings.tree and not choice.times):
        return Decoder(dataclasses.replace(request, settings=settings))
    adapts = choice.adapts(request.rows.sampling is not None, settings.mesh)
    deepest = chain(max(choice.times)) if adapts else choice.tree
    request = dataclasses.replace(request, settings=settings.with_tree(deepest))
    return Decoder(request, settings.with_tree(choice.tree))


def _place_candidates(candidates: Candidates) -> tuple[Decoder, dict[str, Decoder]]:
    """Returns (the decoder without a drafter, those with one) on the devices.

    The target is loaded once. Their states have the same shapes, those of the largest.
    """
    plain = candidates.plain
    if plain.target.params is None:
        memory.check(plain)
    plain, requests = place(plain), {}
    for name, request in candidates.requests.items():
        request = dataclasses.replace(request, target=plain.target)
        with memory.explained(request):  # the drafter may make a copy of the target
            requests[name] = place(request)
    all_settings = [request.settings for request in (plain, *requests.values())]
    capacity = max(settings.capacity for settings in all_settings)
    shape = TreeShape(*map(max, zip(*(settings.shape for settings in all_settings), strict=True)))

    def decoder(request: Request) -> Decoder:
        settings = dataclasses.replace(request.settings, capacity=capacity)
        largest = dataclasses.replace(settings, shape=shape)
        return Decoder(dataclasses.replace(request, settings=largest), settings)

    return decoder(plain), {name: decoder(request) for name, request in requests.items()}


def _is_chain(tree: Tree) -> bool:
    return isinstance(tree, TokenTree) and tree.depth > 0 and tree == chain(tree.depth)


def start(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> Started:
    """Returns the request of a choice; the state is None for one that is reused."""
    if isinstance(options.tree, str) and options.tree == "auto":
        options = _with_one_drafter(target, options)
    if isinstance(options.drafter, Choice):
        return Started(_reused_decoder(target, prompts, params, options), choice=options.drafter)
    candidates = validated_candidates(target, prompts, params, options)
    choice, decoder, prefilled, search_s = choose(candidates)
    decoder = dataclasses.replace(decoder, clock=Clock(prefill_s=prefilled.seconds))
    return Started(decoder, prefilled.start(decoder), choice, search_s)


def _with_one_drafter(target: Model, options: RequestOptions) -> RequestOptions:
    """Returns the options with the settings that choose the tree of one drafter.

    Raises:
      ValueError: no drafter.
    """
    if options.drafter is None or is_choice(options.drafter):
        raise ValueError(
            "tree='auto' chooses the tree of one drafter: name it, or omit tree with drafter='auto'"
        )
    drafter, _ = drafter_and_tree(target, options.drafter, None)
    assert drafter is not None  # as it was
    return dataclasses.replace(options, drafter=for_tree(drafter), tree=None)


def _reused_decoder(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> Decoder:
    """Returns the decoder of a choice that is reused."""
    choice: Choice = options.drafter
    if options.tree is not None:
        raise ValueError("a Choice has its own tree: omit tree")
    all_params = [params] if isinstance(params, SamplingParams) else params
    adapts = choice.adapts(not all(each.greedy for each in all_params), options.mesh)
    waits_for_lookup = choice.tree == ROOT_ONLY and bool(choice.times)
    if choice.drafter is None or (waits_for_lookup and not adapts):  # a verifier is for drafters
        options = dataclasses.replace(options, drafter=None, verifier=None)
        return Decoder(prepare(target, prompts, params, options))
    tree = chain(max(choice.times)) if adapts else choice.tree
    tree = None if tree == ROOT_ONLY else tree  # an ensemble has its own
    options = dataclasses.replace(options, drafter=choice.drafter, tree=tree)
    decoder = Decoder(prepare(target, prompts, params, options))
    # The state is as deep as the deepest chain.
    return with_tree(decoder, choice.tree) if adapts and choice.tree is not None else decoder
