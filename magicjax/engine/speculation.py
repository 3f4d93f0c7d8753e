"""The loops of an engine with an adaptive depth, and the seconds of their rounds.

`time_rounds` measures these seconds at two lengths of the rows before the first request, and
`decoding.adaptive_depth` chooses the depth of each call.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from magicjax.decoding import paired_timing, runner
from magicjax.decoding.adaptive_depth import RoundTimes
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request
from magicjax.engine.templates import Templates, empty_state
from magicjax.settings import Settings
from magicjax.trees.token_tree import ROOT_ONLY, DynamicTree, Tree, truncated
from sharding import global_arrays

REPEATS = 3  # of each timing, after one that loads the program


def loops(request: Request, adaptive_depth: bool) -> dict[int, Settings]:
    """Returns the settings of the loop by the depth of its tree.

    Args:
      request: of all rows.
      adaptive_depth: False: only its own tree. True: also 0, 1, 2, 4, ... up to its depth; of a
        dynamic tree only 0, because a shallower one would grow elsewhere.

    Raises:
      ValueError: adaptive_depth for a drafter that cannot be timed.
    """
    settings = request.settings
    if not adaptive_depth:
        return {settings.shape.depth: settings}
    _check_timed(request)
    tree, deepest = settings.tree, settings.shape.depth
    trees: dict[int, Tree] = {0: ROOT_ONLY, deepest: tree}
    if not isinstance(tree, DynamicTree):
        powers = (2**n for n in range(deepest.bit_length()))
        trees |= {depth: truncated(tree, depth) for depth in powers}
    return {depth: _with_tree(request, trees[depth]) for depth in sorted(trees)}


def _with_tree(request: Request, tree: Tree) -> Settings:
    assert request.drafter is not None
    shape = request.drafter.shape(tree)
    return dataclasses.replace(request.settings.with_tree(tree), shape=shape)


def _check_timed(request: Request) -> None:
    """Raises ValueError if the rounds of a drafter cannot be timed before the first request."""
    drafter = request.drafter
    assert drafter is not None  # `EngineConfig.check_drafter`
    state = runner.state_shapes(request)
    try:
        jax.eval_shape(drafter.synthetic_state, state.drafter, state.cache.lengths)
    except NotImplementedError as error:
        raise ValueError(
            f"adaptive_depth=True times rounds before the first request, and {error}: define it, "
            "or omit adaptive_depth"
        ) from error


def time_rounds(
    templates: Templates, settings: Mapping[int, Settings], state: DecodeState
) -> tuple[RoundTimes, DecodeState]:
    """Returns (the seconds of rounds at each depth, an empty state); compiles all loops.

    Args:
      templates: of the engine.
      settings: of the loop, by depth.
      state: without live rows; donated.
    """
    request = templates.slots
    lengths = sorted({1, max(1, 3 * templates.capacity // 4)})
    variants = [
        paired_timing.Variant(request, one, "decode_until_row_ends") for one in settings.values()
    ]
    seconds: list[list[float]] = []
    for length in lengths:
        state = _live(templates, state, length)
        drafters = {id(request.drafter): state.drafter}
        times, state = paired_timing.time_interleaved(variants, state, drafters, REPEATS)
        seconds.append([statistics.median(each) for each in times])
        del state, drafters  # before others are allocated
        state = empty_state(templates)
    by_depth = dict(zip(settings, zip(*seconds, strict=True), strict=True))
    return RoundTimes(tuple(lengths), by_depth), state


def _live(templates: Templates, state: DecodeState, length: int) -> DecodeState:
    """Returns a state in which all rows are live and have `length` tokens, of no meaning."""
    request = templates.slots
    assert request.drafter is not None

    def rows(value: Any, like: jax.Array) -> jax.Array:
        return global_arrays.put(np.full(like.shape, value, like.dtype), like.sharding)

    lengths = rows(length, state.cache.lengths)
    # They end before they fill their slots.
    room = request.settings.capacity - length - request.settings.shape.depth - 1
    drafter = request.drafter.synthetic_state(state.drafter, rows(length, lengths))
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, lengths=lengths),
        drafter=jax.tree.map(
            lambda x, old: jax.device_put(x, old.sharding), drafter, state.drafter
        ),
        emitted=rows(1, state.emitted),
        limits=rows(max(2, room), state.limits),
        ended=rows(False, state.ended),
        eos=rows(-1, state.eos),
    )
