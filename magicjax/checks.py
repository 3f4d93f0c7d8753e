"""Errors of values that users pass, and checks of numbers."""

import numbers
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are 0 on some devices


class OptionError(ValueError):
    """An argument or a setting has a value that it cannot have.

    The text names it as in Python, `top_k=-1: it must be ...`. The command line and the server
    name it in their own way (`naming`).

    Attributes:
      message: has `{}` where the option stands.
      field: the name of the argument or setting.
      value: that it has; `...` if the message does not show it.
    """

    def __init__(self, message: str, field: str, value: Any = ...):
        super().__init__(message, field, value)
        self.message, self.field, self.value = message, field, value

    def __str__(self) -> str:
        return self.naming(self.field if self.value is ... else f"{self.field}={self.value!r}")

    def naming(self, option: str) -> str:
        """Returns the text of the error, in which the option and its value are called `option`."""
        return self.message.replace("{}", option, 1)


class OptionTypeError(OptionError, TypeError):
    """An argument or a setting has a value of another type."""


def check_number(
    name: str,
    value: Any,
    number_type: type = int,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    hint: str = "",
    option: str = "{}",
) -> None:
    """Raises OptionError unless a value is a number of a type and a range.

    Args:
      name: the name of the argument or setting.
      value: the number.
      number_type: int, or float for all real numbers that float32 has.
      ge, gt, le: the smallest value, one that all values are above, and the largest; None for none.
      hint: what a value does, or which to pass instead; ends the message.
      option: the beginning of the message, with `{}` for the option.
    """
    wanted = f"{option}: it must be {describe_number(number_type, ge=ge, gt=gt, le=le)}"
    wanted += hint and f"; {hint}"
    types: Any = (int, np.integer) if number_type is int else numbers.Real
    if not isinstance(value, types) or isinstance(value, bool | np.bool_):
        raise OptionTypeError(wanted, name, value)
    ranges = ge is None or value >= ge, gt is None or value > gt, le is None or value <= le
    if not all(ranges):
        raise OptionError(wanted, name, value)
    if number_type is float and value != 0 and not TINY <= abs(value) <= LARGEST:
        wanted = f"{option}: its magnitude must be from {TINY:.1e} to {LARGEST:.1e}, as in float32"
        raise OptionError(wanted, name, value)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_number(
    number_type: type = int,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> str:
    """Returns the numbers of a type and a range in words, such as "an integer from 0 to 20"."""
    noun = "an integer" if number_type is int else "a number"
    if ge is not None and le is not None:
        return f"{noun} from {ge} to {le}"
    least = f" of at least {ge}" if ge is not None else f" above {gt}" if gt is not None else ""
    most = f"{least and ' and'} at most {le}" if le is not None else ""
    return noun + least + most
