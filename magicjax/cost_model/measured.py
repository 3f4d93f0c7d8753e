"""Steps of one model that were timed, and how they set right what a roofline foretells of it.

A roofline with a few constants is some 10 to 20 % off on a CPU, where every shape takes another
path through the libraries. So a profile keeps what was timed: between the batches, slots and nodes
that were, the ratio of measured to foretold time is linear in all three logarithms; beyond them it
is that of the nearest.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.interpolate import RegularGridInterpolator

PASS, DRAFT = "pass", "draft"
LEAST = 0.05  # a ratio below is no measurement: the difference of two times that noise ate


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of a model, timed at every batch with every number of slots and of nodes.

    Attributes:
      model: a name for its sizes (`Sizes.key`).
      kind: "pass" of the target, all that a round adds included, or "draft", one level.
      batches, slots, nodes: increasing; slots are the context of a pass, those of the draft's cache
        of a draft, and nodes those of a pass, 1 of a draft.
      seconds: in the order of the loops over batches, slots, nodes.

    Raises:
      ValueError: no steps, an axis that does not increase, another number of seconds, or one that
        is not positive.
    """

    model: str
    kind: str
    batches: tuple[int, ...]
    slots: tuple[int, ...]
    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self):
        for name in ("batches", "slots", "nodes", "seconds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("batches", "slots", "nodes"):
            axis = getattr(self, name)
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 1:
                raise ValueError(f"{name}={axis} must be whole numbers from 1 on that increase")
        if self.kind not in (PASS, DRAFT):
            raise ValueError(f"kind={self.kind!r} must be {PASS!r} or {DRAFT!r}")
        count = len(self.batches) * len(self.slots) * len(self.nodes)
        if len(self.seconds) != count:
            raise ValueError(f"{len(self.seconds)} seconds for {count} steps")
        if not all(0 < s < math.inf for s in self.seconds):
            raise ValueError(f"seconds={min(self.seconds)} must be positive")

    @property
    def grid(self) -> list[tuple[int, int, int]]:
        """(batch, slots, nodes) of each of `seconds`."""
        return list(itertools.product(self.batches, self.slots, self.nodes))

    def ratio(
        self, foretold: Callable[[int, int, int], float], batch: int, slots: float, nodes: int
    ) -> float:
        """Returns measured / foretold seconds at a place.

        Where a time is so much shorter than foretold that it must be noise, it says nothing, and
        the ratio there is 1.

        Args:
          foretold: seconds of (batch, slots, nodes) by the roofline.
          batch, slots, nodes: the place.
        """
        ratios = np.array(
            [s / foretold(*place) for s, place in zip(self.seconds, self.grid, strict=True)]
        )
        ratios[ratios < LEAST] = 1.0
        place = [
            np.log(np.clip(at, axis[0], axis[-1]))
            for at, axis in zip((batch, slots, nodes), self._axes, strict=True)
        ]
        kept = [i for i, axis in enumerate(self._axes) if len(axis) > 1]
        if not kept:
            return float(ratios[0])
        table = np.log(ratios).reshape([len(self._axes[i]) for i in kept])
        logs = [np.log(self._axes[i]) for i in kept]
        at = np.array([place[i] for i in kept])
        return float(np.exp(RegularGridInterpolator(logs, table)(at)[0]))

    def knows(self, batch: int, slots: float, nodes: int) -> str:
        """Returns "timed", "between" or "beyond": where a place lies among those that were."""
        place = list(zip((batch, slots, nodes), self._axes, strict=True))
        if all(at in axis for at, axis in place):
            return "timed"
        return "between" if all(axis[0] <= at <= axis[-1] for at, axis in place) else "beyond"

    @functools.cached_property
    def _axes(self) -> tuple[tuple[int, ...], ...]:
        return self.batches, self.slots, self.nodes
