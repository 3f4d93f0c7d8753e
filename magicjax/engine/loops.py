"""The loops of an engine: one per mode and batch size, their times, and the choice of the next one.

`Loops.time_rounds` measures the seconds at two lengths of the rows before the first request, and
`decoding.controller` chooses the mode of each call.
"""

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from magicjax.decoding import paired_timing
from magicjax.decoding.controller import PLAIN, Controller, Mode, RoundTimes
from magicjax.decoding.decoder import Clock, Decoder
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request
from magicjax.drafters import Cascade, Drafter, Ensemble
from magicjax.drafters.base import with_length
from magicjax.drafters.spec import drafter_name
from magicjax.engine.setup import EngineSetup, empty_state
from magicjax.settings import Settings
from magicjax.trees.token_tree import ROOT_ONLY, DynamicTree, Tree, truncated
from sharding import global_arrays

REPEATS = 3  # of each timing, after one that loads the program


class Loops:
    """The loops of an engine, and the controller that chooses among their modes.

    Attributes:
      settings: of each mode.
      sizes: increasing batch sizes: 1, 4, 16, ... and all slots.
      grammar_sizes: the same under grammars: one row, and all, because each size takes three
        programs for each mode.
      controller: chooses the mode of each call.
    """

    def __init__(self, request: Request, adaptive: bool):
        """Compiles nothing; arguments as for `modes_of`."""
        slots, drafter = len(request.prompts), request.drafter
        self.settings = modes_of(request, adaptive)
        self.sizes = batch_sizes(request, slots)
        self.grammar_sizes = tuple({self.sizes[0]: 0, self.sizes[-1]: 0})
        can_be_disabled = adaptive and drafter is not None and drafter.can_be_disabled
        self.controller = Controller.create(self.settings, slots, can_be_disabled=can_be_disabled)
        self._programs: dict[Any, jax.stages.Compiled] = {}

    @property
    def untimed(self) -> bool:
        """Whether several modes are to be compared whose rounds have not been timed."""
        return len(self.settings) > 1 and self.controller.times is None

    def num_programs(self, grammars: bool) -> int:
        """Returns the number of programs: loops, and with grammars the three of their rounds."""
        sizes = len(self.sizes) + 3 * len(self.grammar_sizes) * grammars
        return len(self.settings) * sizes

    def decoder(self, request: Request, clock: Clock, mode: Mode, rows: int) -> Decoder:
        """Returns the decoder of a mode for the first rows.

        Args:
          request: the request of all slots.
          clock: adds up the seconds.
          mode: one of `settings`.
          rows: one of `sizes`.
        """
        drafter, settings = request.drafter, self.settings[mode]
        is_plain = settings.shape.num_nodes == 1
        without_drafter = is_plain and drafter is not None and drafter.can_be_disabled
        first_rows = None if rows == len(request.prompts) else rows
        settings = dataclasses.replace(settings, rows=first_rows)
        return Decoder(request, settings, without_drafter, clock, self._programs)

    def time_rounds(self, setup: EngineSetup, state: DecodeState) -> DecodeState:
        """Returns an empty state, after the controller has the seconds of rounds of each mode.

        Compiles all loops.

        Args:
          setup: the engine's setup.
          state: without live rows; donated.
        """
        request = setup.slots
        lengths = sorted({1, max(1, 3 * setup.capacity // 4)})
        seconds: list[list[float]] = []
        live = sorted({1, *self.sizes})
        for rows, length in itertools.product(live, lengths):
            size = next(n for n in self.sizes if n >= rows)
            decoders = [self.decoder(request, Clock(), mode, size) for mode in self.settings]
            state = _live(setup, state, length, rows)
            drafters = {id(request.drafter): state.drafter}
            times, state = paired_timing.time_interleaved(
                decoders, state, drafters, REPEATS, until="any"
            )
            seconds.append([statistics.median(samples) for samples in times])
            del state, drafters  # before others are allocated
            state = empty_state(setup)
        by_mode = dict(zip(self.settings, zip(*seconds, strict=True), strict=True))
        times_of_modes = RoundTimes(tuple(lengths), by_mode, tuple(live))
        self.controller = dataclasses.replace(self.controller, times=times_of_modes)
        return state

    def choose(
        self,
        request: Request,
        clock: Clock,
        live: Mapping[int, tuple[int, int]],
        under_grammars: bool,
    ) -> Decoder:
        """Returns the decoder of the next call, whose mode is the controller's from now on.

        Args:
          request, clock: of all slots, and of the engine.
          live: `Text.lengths` by slot.
          under_grammars: whether the host masks the nodes.
        """
        self.controller = self.controller.chosen(live)
        sizes = self.grammar_sizes if under_grammars else self.sizes
        rows = next(n for n in sizes if n > max(live, default=0))
        return self.decoder(request, clock, self.controller.mode, rows)


def modes_of(request: Request, adaptive: bool) -> dict[Mode, Settings]:
    """Returns the settings of the loop by mode.

    Args:
      request: the request of all rows.
      adaptive: False: only its own tree. True: also plain decoding, and each drafter alone with
        trees of depth 1, 2, 4, ... up to that of its own; only its own if that is a dynamic tree,
        because a shallower one would grow elsewhere, or a cascade's with a tree for each drafter.

    Raises:
      ValueError: adaptive for a tree whose rounds differ in length.
    """
    settings, drafter = request.settings, request.drafter
    if drafter is None:
        return {PLAIN: settings}
    names = names_of(drafter)
    full_mode = Mode(" + ".join(names), settings.shape.depth)
    if not adaptive:
        return {full_mode: settings}
    if not isinstance(drafter, Ensemble):
        whole_tree_only = isinstance(drafter, Cascade) and drafter.first_tree is not None
        trees_of_modes = [settings.tree] if whole_tree_only else _depths(settings.tree)
        settings_of_modes = [_with_tree(request, tree) for tree in trees_of_modes]
        modes = {Mode(names[0], each.shape.depth): each for each in settings_of_modes}
        return {PLAIN: _with_tree(request, ROOT_ONLY)} | modes
    member_trees = [tree for _, tree in drafter.with_trees(settings.tree)]
    trees: dict[Mode, list[Tree]] = {PLAIN: [ROOT_ONLY] * len(member_trees)}
    for i, name in enumerate(names):
        for tree in _depths(member_trees[i]):
            mode = Mode(name, drafter.drafters[i].shape(tree).depth)
            trees[mode] = [tree if j == i else ROOT_ONLY for j in range(len(member_trees))]
    trees[full_mode] = member_trees
    return {
        mode: settings.with_member_trees(
            tuple(each), drafter.shape_of(list(zip(drafter.drafters, each, strict=True)))
        )
        for mode, each in trees.items()
    }


def names_of(drafter: Drafter) -> list[str]:
    """Returns a name of each member of an ensemble, or of a drafter, such as prompt-lookup."""
    names, seen = [], Counter[str]()
    for member in _members(drafter):
        name = "cascade" if isinstance(member, Cascade) else drafter_name(type(member))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _members(drafter: Drafter) -> tuple[Drafter, ...]:
    return drafter.drafters if isinstance(drafter, Ensemble) else (drafter,)


def _depths(tree: Any) -> list[Tree]:
    """Returns the trees of a drafter's modes.

    Raises ValueError for a tree whose rounds differ in length.
    """
    if isinstance(tree, DynamicTree):
        if tree.min_prob:
            raise ValueError(
                f"min_prob={tree.min_prob:g}: adaptive=True times rounds before the first request, "
                "and those of such a tree depend on the text: use adaptive=False, or a tree "
                "without min_prob"
            )
        return [tree]
    powers = (2**n for n in range(tree.depth.bit_length()))
    return [truncated(tree, depth) for depth in sorted({*powers, tree.depth})]


def _with_tree(request: Request, tree: Tree) -> Settings:
    assert request.drafter is not None
    shape = request.drafter.shape(tree)
    return dataclasses.replace(request.settings.with_tree(tree), shape=shape)


def simulated_rounds(drafter: Drafter, state: Any) -> dict[str, jax.Array]:
    """Returns the histograms of the simulated rounds, by the names of the drafters that have any.

    Args:
      drafter: the engine's drafter.
      state: the drafter's state.
    """
    states = state if isinstance(drafter, Ensemble) else (state,)
    members = zip(names_of(drafter), _members(drafter), states, strict=True)
    histograms = {name: member.simulated(member_state) for name, member, member_state in members}
    return {name: histogram for name, histogram in histograms.items() if histogram is not None}


def batch_sizes(request: Request, slots: int) -> tuple[int, ...]:
    """Returns the batch sizes of the loops, increasing: 1, 4, 16, ... and all slots.

    A loop decodes the first slots, without padding for the others.
    """
    drafter = request.drafter
    partial = drafter is None or drafter.takes_partial_batch
    if request.settings.mesh is not None or not partial:
        return (slots,)
    return (*itertools.takewhile(lambda n: n < slots, (4**n for n in itertools.count())), slots)


def _live(setup: EngineSetup, state: DecodeState, length: int, live: int) -> DecodeState:
    """Returns a state in which the first rows are live; all have `length` tokens, of no meaning."""
    settings = setup.slots.settings

    def rows(value: Any, like: jax.Array) -> jax.Array:
        return global_arrays.put(np.full(like.shape, value, like.dtype), like.sharding)

    # They end before they fill their slots.
    room = settings.capacity - length - settings.shape.depth - 1
    limits, eos = rows(max(2, room), state.rows.limits), rows(-1, state.rows.eos)
    return dataclasses.replace(
        with_length(state, length),
        rows=dataclasses.replace(state.rows, limits=limits, eos=eos),
        emitted=rows(1, state.emitted),
        ended=global_arrays.put(np.arange(len(state.ended)) >= live, state.ended.sharding),
    )
