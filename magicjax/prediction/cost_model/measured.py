"""Timed steps of a model, which correct the roofline's predictions for it.

A roofline with a few constants is off by 10 to 20 % on a CPU, where each shape takes a different
path through the libraries. A profile therefore stores timed steps. Between the timed batches, slots
and nodes, measured / predicted is interpolated linearly in all three logarithms; outside them it
is that of the nearest point.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.interpolate import RegularGridInterpolator

PASS, DRAFT = "pass", "draft"
MIN_RATIO = 0.05  # lower ratios are noise: differences of two nearly equal times


@dataclasses.dataclass(frozen=True)
class Steps:
    """Timed steps of a model on a grid of batches, slots and nodes.

    Attributes:
      model: the model's `Sizes.key`.
      kind: "pass" for passes of the target, including the overhead of a round, or "draft" for
        levels of a draft.
      batches, slots, nodes: increasing; slots are the context of a pass or the slots of the draft
        cache, nodes those of a pass or 1.
      seconds: in row-major order over batches, slots, nodes.

    Raises:
      ValueError: an axis that does not increase, or times that are not positive or do not match
        the grid.
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
                raise ValueError(f"{name}={axis} must be increasing whole numbers from 1")
        if self.kind not in (PASS, DRAFT):
            raise ValueError(f"kind={self.kind!r} must be {PASS!r} or {DRAFT!r}")
        count = len(self.batches) * len(self.slots) * len(self.nodes)
        if len(self.seconds) != count:
            raise ValueError(f"{len(self.seconds)} seconds for {count} steps")
        if not all(0 < s < math.inf for s in self.seconds):
            raise ValueError(f"seconds={min(self.seconds)} must be positive")

    @property
    def grid(self) -> list[tuple[int, int, int]]:
        """(batch, slots, nodes) of each element of `seconds`."""
        return list(itertools.product(self.batches, self.slots, self.nodes))

    def ratio(
        self, predicted: Callable[[int, int, int], float], batch: int, slots: float, nodes: int
    ) -> float:
        """Returns measured / predicted seconds; 1 where a time is so short that it must be noise.

        Args:
          predicted: (batch, slots, nodes) -> seconds by the roofline.
          batch, slots, nodes: B, S and N of the step.
        """
        ratios = np.array(
            [s / predicted(*point) for s, point in zip(self.seconds, self.grid, strict=True)]
        )
        ratios[ratios < MIN_RATIO] = 1.0
        # An axis of one value has no direction to interpolate in.
        axes = [(x, axis) for x, axis in zip((batch, slots, nodes), self._axes) if len(axis) > 1]
        if not axes:
            return float(ratios[0])
        table = np.log(ratios).reshape([len(axis) for _, axis in axes])
        point = np.log([np.clip(x, axis[0], axis[-1]) for x, axis in axes])
        interpolator = RegularGridInterpolator([np.log(axis) for _, axis in axes], table)
        return float(np.exp(interpolator(point)[0]))

    def coverage(self, batch: int, slots: float, nodes: int) -> str:
        """Returns "measured", "interpolated" or "extrapolated"."""
        point = list(zip((batch, slots, nodes), self._axes))
        if all(x in axis for x, axis in point):
            return "measured"
        inside = all(axis[0] <= x <= axis[-1] for x, axis in point)
        return "interpolated" if inside else "extrapolated"

    @property
    def _axes(self) -> tuple[tuple[int, ...], ...]:
        return self.batches, self.slots, self.nodes
