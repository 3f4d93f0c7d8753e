"""The memory of an engine, compared with what is free before its caches are allocated."""

import dataclasses

from magicjax.decoding import footprint, memory
from magicjax.decoding.request import Request
from magicjax.engine.config import EngineConfig
from magicjax.engine.scheduler import SNAPSHOTS
from magicjax.model import CAPACITY_MULTIPLE
from sharding import AnyMesh

MAX_DEFAULT_PREFIXES = 4
SMALL_BYTES = 1e9  # of caches that need not be smaller than the weights


def snapshot_bytes(row: Request) -> int:
    """Returns the bytes of the states that are kept of a text beside those at its end."""
    return SNAPSHOTS * row.target.state_bytes


def entry_bytes(row: Request) -> int:
    """Returns the bytes of a prefix on the device: those of the row, and of states."""
    return sum(row.kv_bytes) + snapshot_bytes(row)


def num_prefixes(row: Request, config: EngineConfig) -> int:
    """Returns how many prefixes are stored on the device."""
    if config.prefix_bytes is not None:
        return config.prefix_bytes // entry_bytes(row)
    if row.prefill_settings.stats_spec.total:  # they cannot be reused
        return 0
    return min(MAX_DEFAULT_PREFIXES, config.slots)


def all_rows(row: Request, config: EngineConfig) -> Request:
    """Returns a request with as many rows as a group of devices has: slots, prefill, prefixes."""
    slots = config.slots // row.settings.groups
    rows = slots + config.prefill_rows + num_prefixes(row, config)
    return dataclasses.replace(row, prompts=row.prompts * rows)


def proportionate_slots(row: Request, config: EngineConfig) -> int:
    """Returns the slots of which all rows take no more than the weights or 1 GB.

    The configuration's slots are halved until they do, or 1 is left.
    """
    counted = memory.count(row)
    limit = max(counted.weights + counted.streamed, SMALL_BYTES)
    slots = config.slots
    while slots > 1:
        rows = all_rows(row, dataclasses.replace(config, slots=slots))
        if sum(rows.kv_bytes) + _all_snapshot_bytes(row, config) <= limit:
            break
        slots //= 2
    return slots


def _all_snapshot_bytes(row: Request, config: EngineConfig, mesh: AnyMesh | None = None) -> int:
    """Returns the bytes of the states that are kept of all prefixes and prompts in prefill.

    On a mesh they are those of each device.
    """
    if not (prefixes := num_prefixes(row, config)):
        return 0
    size = (prefixes + config.prefill_rows) * snapshot_bytes(row)
    return footprint.state_bytes(row.target, row.target, size, mesh)


def check_prefixes(row: Request, config: EngineConfig) -> None:
    """Raises ValueError for bytes of prefixes that can store none."""
    max_bytes, size = config.prefix_bytes, entry_bytes(row)
    if max_bytes and row.prefill_settings.stats_spec.total:
        raise ValueError(
            f"prefix_bytes={max_bytes}: the drafter's policy reads the attention of all prompt "
            "tokens, so each prompt is prefilled whole: omit prefix_bytes, or use another policy, "
            "such as streaming or snapkv"
        )
    if max_bytes is not None and 0 < max_bytes < size:
        states = f" and {SNAPSHOTS} states" if snapshot_bytes(row) else ""
        raise ValueError(
            f"prefix_bytes={max_bytes}: one prefix has {size} bytes, those of a slot{states}; use "
            "at least as many, or 0 to store none"
        )
    if config.host_prefix_bytes and not num_prefixes(row, config):
        raise ValueError(
            f"host_prefix_bytes={config.host_prefix_bytes} has no effect without prefixes on the "
            "device: omit it, or give prefix_bytes, with a drafter for which prefixes can be stored"
        )


def check(row: Request, config: EngineConfig, available: float | None = None) -> None:
    """Raises OutOfMemoryError if weights, slots, prefill and prefixes do not fit the free memory.

    The message has the most slots, the largest capacity and the most bytes of prefixes that fit,
    each with the others unchanged.

    Args:
      row: the request of one row.
      config: the result of `EngineConfig.for_target`; each group of devices has its part of the
        slots, and all rows for prefill and prefixes.
      available: bytes of each device; None: as `magicjax.decoding.memory.check`.
    """
    slots, capacity, prefills = config.slots, config.capacity, config.prefill_rows
    assert capacity is not None
    prefixes, groups = num_prefixes(row, config), row.settings.groups
    rows, mesh = slots // groups + prefills + prefixes, row.settings.mesh
    states = _all_snapshot_bytes(row, config, mesh)

    def needed(row_slots: int) -> float:
        settings = dataclasses.replace(row.settings, capacity=row_slots)
        resized = dataclasses.replace(row, settings=settings)
        other_rows = prefills + num_prefixes(resized, config)
        states = _all_snapshot_bytes(resized, config, mesh)
        return memory.count(resized, slots // groups + other_rows).new + states

    def remedy(limit: float) -> list[str]:
        remedies = []
        counts = range(1, rows + 1)
        most_rows = footprint.largest(counts, limit - states, lambda n: memory.count(row, n).new)
        if (most_slots := most_rows - prefills - prefixes) > 0:
            remedies.append(f"slots={most_slots * groups}")
        row_slots = row.settings.capacity
        capacities = range(row_slots - CAPACITY_MULTIPLE, 0, -CAPACITY_MULTIPLE)
        largest_row = next((n for n in capacities if needed(n) <= limit), 0)
        if (tokens := largest_row - (row_slots - capacity)) > 1:
            remedies.append(f"capacity={tokens}")
        if (most_prefixes := most_rows - prefills - slots // groups) >= 0:
            remedies.append(f"prefix_bytes={most_prefixes * entry_bytes(row)}")
        return remedies

    workload = (
        f"an engine with slots={slots} of capacity={capacity}, {prefills} rows for prefill and "
        f"{prefixes} for prefixes"
    )
    memory.check_workload(all_rows(row, config), workload, remedy, available, states)
