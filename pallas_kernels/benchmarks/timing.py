"""Times compiled functions so that they can be compared on a busy machine."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def queued_calls() -> int:
    """Returns how many calls one timing covers: several on devices that queue work."""
    return 1 if jax.default_backend() == "cpu" else 10


def fastest_seconds(
    functions: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 7,
    calls: int = 1,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> dict[str, float]:
    """Returns the shortest time of one call of each function, in seconds.

    Timings of the functions are interleaved, so that changes of the machine's load affect all of
    them. The first call of each is not counted, because it may compile.

    Args:
      functions: called without arguments; each returns JAX arrays.
      repeats: timings of each function.
      calls: consecutive calls per timing, which hide launch overhead on a device that queues work.
      wait: blocks until the result of a function is computed.
    """
    for function in functions.values():
        wait(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                result = function()
            wait(result)
            times[name].append((time.perf_counter() - start) / calls)
    return {name: min(measured) for name, measured in times.items()}
