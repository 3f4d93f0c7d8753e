"""The memory of an engine, compared with what is free before its caches are allocated."""

import dataclasses

from magicjax.decoding import memory
from magicjax.decoding.request import CAPACITY_MULTIPLE
from magicjax.engine.prefix_store import num_entries
from magicjax.engine.templates import MAX_PREFILLS, Templates


def check(templates: Templates, prefix_bytes: int | None, available: float | None = None) -> None:
    """Raises OutOfMemoryError if weights, slots, prefill and prefixes do not fit the free memory.

    The message has the most slots, the largest capacity and the most bytes of prefixes that fit,
    each with the others unchanged.

    Args:
      templates: of the engine.
      prefix_bytes: of the prefixes on the device; None: the default number of prefixes.
      available: bytes of each device; None: as `magicjax.decoding.memory.check`.
    """
    row, slots = templates.row, templates.num_slots
    entries = num_entries(row, prefix_bytes)
    rows = slots + MAX_PREFILLS + entries

    def needed(capacity: int) -> float:
        settings = dataclasses.replace(row.settings, capacity=capacity)
        sized = dataclasses.replace(row, settings=settings)
        return memory.new_bytes(sized, slots + MAX_PREFILLS + num_entries(sized, prefix_bytes))

    def remedy(limit: float) -> list[str]:
        fitting = []
        most_rows = next((n for n in range(rows, 0, -1) if memory.new_bytes(row, n) <= limit), 0)
        if (most_slots := most_rows - MAX_PREFILLS - entries) > 0:
            fitting.append(f"slots={most_slots}")
        capacity = row.settings.capacity
        smaller = range(capacity - CAPACITY_MULTIPLE, 0, -CAPACITY_MULTIPLE)
        largest = next((n for n in smaller if needed(n) <= limit), 0)
        if (tokens := largest - (capacity - templates.capacity)) > 1:
            fitting.append(f"capacity={tokens}")
        if (most_entries := most_rows - MAX_PREFILLS - slots) >= 0:
            fitting.append(f"prefix_bytes={most_entries * sum(row.kv_bytes)}")
        return fitting

    workload = (
        f"an engine with slots={slots} of capacity={templates.capacity}, {MAX_PREFILLS} rows for "
        f"prefill and {entries} for prefixes"
    )
    everything = dataclasses.replace(row, prompts=row.prompts * rows)
    memory.check_workload(everything, workload, remedy, available)
