"""Means and ratios of paired values, with standard errors."""

import pathlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

CLEAR = 2.0  # standard errors beyond which a difference is clear


class Estimate(NamedTuple):
    """A mean and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"

    def side_of(self, value: float) -> int:
        """Returns 1 if clearly above `value`, -1 if clearly below, 0 if neither."""
        distance = self.value - value
        return int(np.sign(distance)) if abs(distance) > CLEAR * self.error else 0


def mean_and_error(values: Float[np.ndarray, "R"]) -> Estimate:
    """Returns the mean of independent values and its standard error."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return Estimate(float(values.mean()), float(error))


def ratio(a: Float[np.ndarray, "R"], b: Float[np.ndarray, "R"]) -> Estimate:
    """Returns mean(a) / mean(b) where a[i] and b[i] belong to the same request.

    The error is that of a - ratio * b (the delta method). Variation that both share cancels:
    [2, 4] over [1, 2] is 2 ± 0.
    """
    value = a.mean() / b.mean()
    error = (a - value * b).std(ddof=1) / (b.mean() * np.sqrt(len(a)))
    return Estimate(float(value), float(error))


def name_of(directory: str) -> str:
    """Returns a model's name in the tables."""
    return pathlib.PurePath(directory).name
