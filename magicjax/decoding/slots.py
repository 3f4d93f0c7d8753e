"""The slots of an engine: `insert` writes the row of a request into one, `extract` copies one.

`decode_until_row_ends` decodes all of them, or the first ones.

On a mesh with several groups of devices along `data`, each group has its own slots. Slots are
numbered over all groups: with 2 groups of 4 slots, the second group has slots 4 to 7. A single row
is replicated, so that any group can take it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from magicjax.decoding.loop import DecodeState, run_while
from magicjax.drafters.base import Drafter, extract_row, insert_row
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.settings import Settings
from sharding import collectives


def insert(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    row: DecodeState,
    slot: Int[Array, ""],
) -> DecodeState:
    """Returns the state with row `slot` replaced by the row of another request.

    The rows share `rounds`, which does not change. Groups of devices without
    the slot write nothing.

    Args:
      settings, target, drafter: shared by both states.
      state: the state of all rows.
      row: the state of one row.
      slot: int32 [], the number of the row.
    """
    index, is_here = _in_group(settings, state, slot)

    def write(state: DecodeState) -> DecodeState:
        drafter_state = None
        if drafter is not None:
            drafter_state = drafter.insert(state.drafter, row.drafter, index)
        rows = insert_row(_per_row(state), _per_row(row), index)
        return dataclasses.replace(rows, drafter=drafter_state, rounds=state.rounds)

    if not settings.data_axes:
        return write(state)
    return jax.lax.cond(is_here, write, lambda state: state, state)


def decode_until_row_ends(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    max_rounds: Int[Array, ""],
) -> DecodeState:
    """Returns the state after a row has ended, or after `max_rounds`; another can take its slot.

    On a mesh, each group of devices stops when one of its own rows has ended. With `settings.rows`
    only the first slots are decoded, and their caches are read and written in place.
    """
    selected = first_rows(state, settings.rows)
    ended_before = selected.ended

    def cond(state):
        return (state.ended == ended_before).all() & ~state.ended.all()

    selected = run_while(cond, settings, target, drafter, selected, max_rounds)
    return with_first_rows(state, selected)


def first_rows(state: DecodeState, rows: int | None) -> DecodeState:
    """Returns the first rows of a state, with the arrays of all rows in caches; None: all rows."""
    if rows is None:
        return state

    def first(x):
        if isinstance(x, KVCache):
            return dataclasses.replace(x, lengths=x.lengths[:rows])
        return x[:rows]

    selected = jax.tree.map(first, _without_rounds(state), is_leaf=_is_cache)
    return dataclasses.replace(selected, rounds=state.rounds)


def with_first_rows(state: DecodeState, selected: DecodeState) -> DecodeState:
    """Returns the state with the rows of `first_rows` after some rounds."""
    if len(selected.ended) == len(state.ended):
        return selected

    def put(old, new):
        if isinstance(old, KVCache):
            return dataclasses.replace(new, lengths=put(old.lengths, new.lengths))
        return jax.lax.dynamic_update_slice_in_dim(old, new, 0, 0)

    old, new = _without_rounds(state), _without_rounds(selected)
    merged = jax.tree.map(put, old, new, is_leaf=_is_cache)
    return dataclasses.replace(merged, rounds=selected.rounds)


def _is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def extract(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    slot: Int[Array, ""],
) -> tuple[KVCache, Any]:
    """Returns row `slot` of the target's cache and of the drafter's state, to continue its text.

    The group of devices that has the slot sends the row to the others.
    """
    index, is_here = _in_group(settings, state, slot)
    drafter_state = None if drafter is None else drafter.extract(state.drafter, index)
    row = extract_row(state.cache, index), drafter_state
    return jax.tree.map(lambda x: collectives.broadcast_from(x, is_here, settings.data_axes), row)


def _in_group(
    settings: Settings, state: DecodeState, slot: Int[Array, ""]
) -> tuple[Int[Array, ""], Bool[Array, ""] | bool]:
    """Returns (the index of a slot in this device's group, whether the group has it).

    Without the slot, the index is that of another one.
    """
    if not settings.data_axes:
        return slot, True
    slots = len(state.pending)
    index = slot - collectives.axis_index(settings.data_axes) * slots
    return jnp.clip(index, 0, slots - 1), (index >= 0) & (index < slots)


def _without_rounds(state: Any) -> Any:
    """Returns the state without the count that its rows share."""
    return dataclasses.replace(state, rounds=None)


def _per_row(state: DecodeState) -> Any:
    return dataclasses.replace(_without_rounds(state), drafter=None)
