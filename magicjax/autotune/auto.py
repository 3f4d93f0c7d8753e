"""`drafter="auto"`: tries drafters on the user's prompts, plans with that, and runs what is best.

First all candidates that could pay run a short trial on the prompts; the planner takes acceptance
and times from it, and from a profile of the device what other depths and trees would cost. The best
few of the plan are timed again beside plain decoding, in turns. Then the fastest runs, or plain
decoding where none pays. Between calls of the loop the depth of a chain is planned anew.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from magicjax.autotune.choice import Auto, Choice
from magicjax.autotune.depth_controller import Controller
from magicjax.autotune.search import Question, choose, question
from magicjax.decoding import program_cache, runner
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request, prepare
from magicjax.decoding.runner import Call, Output
from magicjax.model import Model
from magicjax.trees.token_tree import ROOT_ONLY, chain


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
    choice, *_ = choose(question(target, prompts, _how(drafter), options))
    return choice


def check(target: Model, prompts: Any, drafter: Auto, **options: Any) -> None:
    """Raises what `choose_drafter` would before anything runs; a skeleton of a target will do."""
    question(target, prompts, drafter, options)


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


def generate(
    target: Model, prompts: Any, auto: Auto | Choice | str, options: dict[str, Any]
) -> Output:
    """Returns what `magicjax.generate` does, for a drafter that is to be chosen, or was."""
    programs = program_cache.count()
    if isinstance(auto, Choice):
        request = _request(target, prompts, auto, options)
        runner.tell(request)
        state, prefill_s, compile_s = runner.start(request)
        choice, times = auto, {"prefill_s": prefill_s, "compile_s": compile_s, "plan_s": 0.0}
    else:
        asked = question(target, prompts, _how(auto), options)
        choice, behind, times = choose(asked)
        request = _of_choice(asked, choice)
        runner.tell(request)
        state, compiling = behind.state(request)
        del behind  # and what was watched for drafters that do not run
        times["compile_s"] += compiling
    state, calls, decode_s, compiling = run_choice(request, choice, state, choice is not auto)
    times["compile_s"] += compiling
    output = runner.output_of(
        request,
        state,
        calls,
        **times,
        decode_s=decode_s,
        depths=tuple(depth for depth, _ in calls),
        compilations=program_cache.count() - programs,
    )
    return dataclasses.replace(output, choice=choice)


def fixed(
    target: Model, prompts: Any, drafter: Auto | Choice | str, **options: Any
) -> tuple[Choice, Request]:
    """Returns (what is chosen, or was, its request with the planned tree).

    Raises ValueError if depths are to be planned anew, beside what `choose_drafter` raises.
    """
    how = drafter.auto if isinstance(drafter, Choice) else _how(drafter)
    if how.replan:
        raise ValueError("replan=True: a stream has one tree; leave it out, or use generate")
    if not isinstance(drafter, Choice):
        drafter = choose_drafter(target, prompts, how, **options)
    once = dataclasses.replace(drafter, seconds={})  # of no other depths
    return drafter, _request(target, prompts, once, options)


def _request(target: Model, prompts: Any, choice: Choice, options: dict[str, Any]) -> Request:
    """Returns the request of a choice that was made before."""
    if options.get("tree") is not None:
        raise ValueError("a choice has its own tree: leave tree out")
    options = {name: value for name, value in options.items() if name != "tree"}
    if choice.drafter is None:  # a verifier is for drafters
        return prepare(target, prompts, **options | {"verifier": None})
    tree = choice.auto.tree if _replans(choice, bool(options.get("do_sample"))) else choice.tree
    return prepare(target, prompts, drafter=choice.drafter, tree=tree, **options)


def _of_choice(question: Question, choice: Choice) -> Request:
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
    request: Request, choice: Choice, state: DecodeState, tried: bool
) -> tuple[DecodeState, list[Call], float, float]:
    """Returns (the state when all rows have ended, calls, seconds, seconds of compiling).

    Args:
      request: with the choice's drafter.
      choice: what to run.
      state: of the request, behind the prompts.
      tried: whether the choice comes from trials on these very prompts.
    """
    if choice.drafter is None or not _replans(choice, request.sampling is not None):
        depth = request.settings.shape.depth
        state, seconds, compiling = runner.run(request, request.settings, state)
        return state, [(depth, np.asarray(state.histogram))], seconds, compiling
    assert choice.tree is not None
    trial = next(trial for trial in choice.trials if trial.name == choice.name)
    rates = [row[0] for row in trial.acceptance]  # of a chain
    rounds, known = choice.auto.rounds, 0
    if tried and request.sampling is None:  # else the trials' texts were others
        known = max(choice.auto.trial_rounds, rounds)  # whole calls
    controller = Controller(choice.seconds, rates, choice.tree.depth, known)
    return run_replanned(request, list(choice.seconds), controller, state, rounds)


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
    compile_s = sum(runner.compile_loop(request, settings, state) for settings in variants.values())
    calls: list[Call] = []
    counted, decode_s = np.zeros(state.histogram.shape, np.int32), 0.0
    limits, ended = np.asarray(request.limits), np.array(state.ended)
    while not ended.all():
        depth = controller.depth
        state, seconds, _ = runner.run(request, variants[depth], state, rounds)
        histogram, emitted, ended = map(np.array, (state.histogram, state.emitted, state.ended))
        of_call = histogram - counted
        counted, decode_s = histogram, decode_s + seconds
        calls.append((depth, of_call))
        left = np.where(ended, 0, limits - emitted)
        controller.learn(of_call, left, seconds, int(of_call.sum(1).max()))
    return state, calls, decode_s, compile_s
