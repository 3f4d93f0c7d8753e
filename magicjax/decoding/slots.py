"""The slots of an engine: `insert` writes the row of a request into one, `extract` copies one.

On a mesh with several groups of devices along `data`, each group has its own slots. Slots are
numbered over all groups: with 2 groups of 4 slots, the second group has slots 4 to 7. A single row
is replicated, so that any group can take it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from magicjax.decoding.loop import DecodeState
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

    The rows share `rounds` and `max_rounds`, which do not change. Groups of devices without
    the slot write nothing.

    Args:
      settings, target, drafter: of both states.
      state: of all rows.
      row: of one row.
      slot: int32 [], the number of the row.
    """
    index, is_here = _in_group(settings, state, slot)

    def write(state: DecodeState) -> DecodeState:
        drafter_state = None
        if drafter is not None:
            drafter_state = drafter.insert(state.drafter, row.drafter, index)
        rows = insert_row(_per_row(state), _per_row(row), index)
        shared = dict(rounds=state.rounds, max_rounds=state.max_rounds)
        return dataclasses.replace(rows, drafter=drafter_state, **shared)

    if not settings.data_axes:
        return write(state)
    return jax.lax.cond(is_here, write, lambda state: state, state)


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


def _per_row(state: DecodeState) -> Any:
    shared: Any = dict(drafter=None, rounds=None, max_rounds=None)
    return dataclasses.replace(state, **shared)
