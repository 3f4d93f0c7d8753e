"""`drafter="auto"`: searches for the fastest drafter on the user's prompts, and runs it.

The module `search` chooses by trials, a plan and a timed comparison. This module runs the choice
from the same prefill, and adapts the depth of a chain between calls of the loop.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from magicjax.decoding import program_cache
from magicjax.decoding.controller import PLAIN, Arm, Controller, RoundTimes
from magicjax.decoding.decoder import Clock, Decoder
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.output import (
    Call,
    Output,
    log_request,
    output_of,
    run_adaptive,
    run_to_end,
    texts_of,
)
from magicjax.decoding.preparation import drafter_and_tree, prepare
from magicjax.decoding.prompts import prompts_of
from magicjax.decoding.request import Request, RequestOptions
from magicjax.decoding.text import Text
from magicjax.decoding.validation import params_of_rows
from magicjax.model import Model
from magicjax.prediction.autotune.choice import Auto, Choice, for_tree, settings_of
from magicjax.prediction.autotune.search import choose, make_problem, placed
from magicjax.sampling_params import SamplingParams
from magicjax.trees.token_tree import ROOT_ONLY, chain

PRIOR_ROUNDS = 16  # weight of a trial's acceptance rates


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
      target, prompts, params, verifier, eos_token_id, backend, mesh: as for `magicjax.generate`.
      drafter: the settings.

    Raises:
      ValueError, TypeError: bad input, also a drafter that does not support these options.
      FileNotFoundError: the device has no profile.
    """
    options = RequestOptions(
        drafter=drafter,
        verifier=verifier,
        eos_token_id=eos_token_id,
        backend=backend,
        mesh=mesh,
    )
    choice, *_ = choose(placed(make_problem(target, prompts, params, options)))
    return choice


def is_choice(drafter: Any) -> bool:
    """Returns whether an argument `drafter` leaves the choice to this module, or is its choice."""
    return isinstance(drafter, Auto | Choice) or (isinstance(drafter, str) and drafter == "auto")


def generate(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> Output:
    """Returns the output of `magicjax.generate` with a drafter to choose, or with a choice."""
    compiled, options = program_cache.totals(), with_drafters(target, options)
    choice, decoder, state, plan_s = _resolve(target, prompts, params, options, adaptive=True)
    log_request(decoder.request)
    texts, state = texts_of(decoder.request), decoder.start() if state is None else state
    state, calls = _run_choice(decoder, choice, state, texts)
    depths = tuple(depth for depth, _ in calls)
    output = output_of(decoder, state, texts, compiled, calls, plan_s=plan_s, depths=depths)
    return dataclasses.replace(output, choice=choice)


def prepare_stream(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> tuple[Decoder, Choice, DecodeState | None]:
    """Returns (the decoder, the choice, the state after the search's prefill).

    The tree is fixed. The state is None for a reused choice: nothing has run.

    Raises:
      ValueError: `adaptive_depth` is set; also the errors of `choose_drafter`.
    """
    options = with_drafters(target, options)
    drafter = options.drafter
    auto = drafter.auto if isinstance(drafter, Choice) else settings_of(drafter)
    if auto.adaptive_depth:
        raise ValueError("adaptive_depth=True: a stream has a fixed tree; omit it, or use generate")
    choice, decoder, state, _ = _resolve(target, prompts, params, options, adaptive=False)
    return decoder, choice, state


def with_drafters(target: Model, options: RequestOptions) -> RequestOptions:
    """Returns the options, with the settings that choose the tree of one drafter for tree="auto".

    Raises:
      ValueError: no drafter, or one that the planner does not support.
    """
    if not (isinstance(options.tree, str) and options.tree == "auto"):
        return options
    if options.drafter is None or is_choice(options.drafter):
        raise ValueError(
            "tree='auto' chooses the tree of one drafter: name it, or omit tree with drafter='auto'"
        )
    drafter, _ = drafter_and_tree(target, options.drafter, None)
    assert drafter is not None  # as it was
    return dataclasses.replace(options, drafter=for_tree(drafter), tree=None)


def _resolve(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
    adaptive: bool,
) -> tuple[Choice, Decoder, DecodeState | None, float]:
    """Returns (the choice, its decoder, the state after a search, seconds of planning)."""
    if isinstance(options.drafter, Choice):
        request = _reused_request(target, prompts, params, options, adaptive)
        return options.drafter, Decoder(request), None, 0.0
    problem = placed(make_problem(target, prompts, params, options))
    choice, prefilled, plan_s = choose(problem)
    if choice.drafter is None:
        request = dataclasses.replace(problem.request, drafter=None)
    else:
        request = problem.requests[choice.name]
    if not (adaptive and _is_adaptive(choice, request.rows.sampling is not None)):
        settings = request.settings.with_tree(choice.tree or ROOT_ONLY)
        request = dataclasses.replace(request, settings=settings)
    decoder = Decoder(request, clock=Clock(prefill_s=prefilled.seconds))
    return choice, decoder, prefilled.start(decoder), plan_s


def _reused_request(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
    adaptive: bool,
) -> Request:
    choice = options.drafter
    if options.tree is not None:
        raise ValueError("a Choice has its own tree: omit tree")
    if choice.drafter is None:  # a verifier is for drafters
        return prepare(
            target, prompts, params, dataclasses.replace(options, drafter=None, verifier=None)
        )
    of_rows = params_of_rows(params, len(prompts_of(prompts)))
    deepest = adaptive and _is_adaptive(choice, any(not each.greedy for each in of_rows))
    tree = choice.auto.tree if deepest else choice.tree
    options = dataclasses.replace(options, drafter=choice.drafter, tree=tree)
    return prepare(target, prompts, params, options)


def _is_adaptive(choice: Choice, sampled: bool) -> bool:
    adaptive = choice.auto.adaptive_depth
    return bool(choice.round_seconds) and (not sampled if adaptive is None else adaptive)


def _run_choice(
    decoder: Decoder, choice: Choice, state: DecodeState, texts: Sequence[Text]
) -> tuple[DecodeState, list[Call]]:
    """Returns (the state when all rows have ended, calls) of a run from after prefill."""
    request = decoder.request
    if not _is_adaptive(choice, request.rows.sampling is not None):
        depth = request.settings.shape.depth
        state = run_to_end(decoder, state, texts)
        return state, [(depth, np.asarray(state.histogram))]
    assert choice.tree is not None
    trial = next(trial for trial in choice.trials if trial.name == choice.name)
    arms = {depth: Arm(choice.name, depth) if depth else PLAIN for depth in choice.round_seconds}
    controller = Controller.create(
        arms.values(),
        len(request.prompts),
        first=arms[choice.tree.depth],
        rates=[by_rank[0] for by_rank in trial.acceptance],
        rounds=PRIOR_ROUNDS,
        times=RoundTimes((1,), {arms[d]: (s,) for d, s in choice.round_seconds.items()}),
        until_last_row_ends=True,
    )
    decoders = {
        arm: dataclasses.replace(
            decoder,
            settings=request.settings.with_tree(chain(depth) if depth else ROOT_ONLY),
            programs={},
        )
        for depth, arm in arms.items()
    }
    return run_adaptive(decoders, controller, state, texts, choice.auto.rounds_per_call)
