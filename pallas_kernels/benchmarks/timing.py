"""Times of compiled functions that can be compared with each other on a busy machine."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def calls_in_a_row() -> int:
    """Returns how many calls one timing should cover here: where work is queued, several."""
    return 1 if jax.default_backend() == "cpu" else 10


def fastest_seconds(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    calls: int = 1,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> dict[str, float]:
    """Returns the shortest time of one call of each function, in seconds.

    The functions take turns, so that a change of the machine's load meets all of them, and the
    first call of each is not counted: it may compile.

    Args:
      functions: called without arguments; each returns JAX arrays.
      rounds: how often each is timed.
      calls: calls in a row that one timing covers, which hides the cost of starting a short one on
        a device that queues work.
      wait: returns when what a function returned is computed.
    """
    for function in functions.values():
        wait(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                result = function()
            wait(result)
            times[name].append((time.perf_counter() - start) / calls)
    return {name: min(measured) for name, measured in times.items()}
