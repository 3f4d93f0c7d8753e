"""Checks of numbers that users pass."""

import numbers
from typing import Any

import numpy as np


def check_real(name: str, value: Any, hint: str = "") -> None:
    """Raises TypeError, with the hint, unless the value is a number, and not a boolean."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={value!r}: it must be a number{hint and '; ' + hint}")


def check_whole(name: str, value: Any, least: int, most: int | None = None, hint: str = "") -> None:
    """Raises TypeError unless the value is a whole number, ValueError outside [least, most].

    Args:
      name: of the argument.
      value: the argument.
      least, most: the bounds; None for no upper bound.
      hint: which value to pass instead of one of another type or below `least`.
    """
    hint = hint and "; " + hint
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: it must be a whole number{hint}")
    if value < least:
        raise ValueError(f"{name}={value}: it must be at least {least}{hint}")
    if most is not None and value > most:
        raise ValueError(f"{name}={value}: it must be at most {most}")
