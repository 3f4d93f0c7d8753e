"""The memory of an engine, compared with what is free before its caches are allocated."""

import bisect
import dataclasses

from magicjax.decoding import memory
from magicjax.decoding.request import Request
from magicjax.kv_cache.full_cache import CAPACITY_MULTIPLE

MAX_PREFILLS = 2  # at once, each in a row of its own: a short prompt overtakes a long one
DEFAULT_PREFIXES = 4


def num_prefixes(row: Request, max_bytes: int | None) -> int:
    """Returns how many prefixes are kept on the device.

    Args:
      row: the request of one row; a prefix has its bytes.
      max_bytes: of all prefixes; None: of the default number, if prompts can be reused.
    """
    if max_bytes is not None:
        return max_bytes // sum(row.kv_bytes)
    return 0 if row.prefill_settings.stats_spec.total else DEFAULT_PREFIXES


def check(
    row: Request,
    slots: int,
    capacity: int,
    prefix_bytes: int | None,
    available: float | None = None,
) -> None:
    """Raises OutOfMemoryError if weights, slots, prefill and prefixes do not fit the free memory.

    The message has the most slots, the largest capacity and the most bytes of prefixes that fit,
    each with the others unchanged.

    Args:
      row: the request of one row.
      slots: rows that are decoded, divided over the groups of devices; each has all other rows.
      capacity: the most tokens of a row.
      prefix_bytes: of the prefixes on the device; None: the default number of prefixes.
      available: bytes of each device; None: as `magicjax.decoding.memory.check`.
    """
    prefixes, groups = num_prefixes(row, prefix_bytes), row.settings.groups
    rows = slots // groups + MAX_PREFILLS + prefixes

    def needed(row_slots: int) -> float:
        settings = dataclasses.replace(row.settings, capacity=row_slots)
        sized = dataclasses.replace(row, settings=settings)
        other_rows = MAX_PREFILLS + num_prefixes(sized, prefix_bytes)
        return memory.new_bytes(sized, slots // groups + other_rows)

    def remedy(limit: float) -> list[str]:
        fitting = []
        most_rows = bisect.bisect_right(
            range(1, rows + 1), limit, key=lambda n: memory.new_bytes(row, n)
        )
        if (most_slots := most_rows - MAX_PREFILLS - prefixes) > 0:
            fitting.append(f"slots={most_slots * groups}")
        row_slots = row.settings.capacity
        smaller = range(row_slots - CAPACITY_MULTIPLE, 0, -CAPACITY_MULTIPLE)
        largest = next((n for n in smaller if needed(n) <= limit), 0)
        if (tokens := largest - (row_slots - capacity)) > 1:
            fitting.append(f"capacity={tokens}")
        if (most_prefixes := most_rows - MAX_PREFILLS - slots // groups) >= 0:
            fitting.append(f"prefix_bytes={most_prefixes * sum(row.kv_bytes)}")
        return fitting

    workload = (
        f"an engine with slots={slots} of capacity={capacity}, {MAX_PREFILLS} rows for prefill and "
        f"{prefixes} for prefixes"
    )
    everything = dataclasses.replace(row, prompts=row.prompts * rows)
    memory.check_workload(everything, workload, remedy, available)
