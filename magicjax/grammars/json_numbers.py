r"""Regular expressions of the JSON numbers between two bounds.

integers from 7 to 120      (?:[7-9]|[1-9][0-9]{1}|1(?:20|[0-1][0-9]{1}))
numbers from 2 on           (?:[2-9](?:\.[0-9]{1,14})?|[1-9][0-9]{1}[0-9]*(?:\.[0-9]{1,14})?)
"""

import decimal
import math
from decimal import Decimal
from typing import NamedTuple

INTEGER = r"-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
DIGITS = 15  # decimal numbers of so many digits are different as float64


class Bound(NamedTuple):
    """A bound of numbers.

    Attributes:
      value: a decimal number.
      strict: whether the number itself is excluded.
    """

    value: Decimal
    strict: bool = False

    def negated(self) -> "Bound":
        return Bound(-self.value, self.strict)


def either(parts: list[str]) -> str:
    """Returns the expression of any of at least one part."""
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def integers(low: Bound | None, high: Bound | None) -> str | None:
    """Returns the expression of the integers between two bounds; None if there are none.

    Args:
      low, high: None: no bound.
    """
    if low is None and high is None:
        return INTEGER
    least = (
        None if low is None else math.floor(low.value) + 1 if low.strict else math.ceil(low.value)
    )
    if high is None:
        most = None
    else:
        most = math.ceil(high.value) - 1 if high.strict else math.floor(high.value)
    parts = []
    if least is None or least < 0:
        negative = _naturals(max(1, -most) if most is not None else 1, least and -least)
        parts += [f"-{each}" for each in negative]
    if most is None or most >= 0:
        parts += _naturals(max(0, least or 0), most)
    return either(parts) if parts else None


def numbers(low: Bound | None, high: Bound | None) -> str | None:
    """Returns the expression of the numbers between two bounds; None if there are none.

    With a bound, numbers have no exponent and, together with the bound's integer part, DIGITS
    digits at most, so that a parser's rounding does not move them across it.

    Args:
      low, high: None: no bound.
    """
    if low is None and high is None:
        return NUMBER
    zero, below_zero = Bound(Decimal(0)), Bound(Decimal(0), strict=True)
    parts = []
    if low is None or low.value < 0:
        nearest = below_zero if high is None or high.value >= 0 else high.negated()
        parts += [f"-{each}" for each in _decimals(nearest, low and low.negated())]
    if high is None or high.value >= 0:
        parts += _decimals(low if low is not None and low.value >= 0 else zero, high)
    return either(parts) if parts else None


def _naturals(least: int, most: int | None) -> list[str]:
    """Returns expressions of the integers from `least`, 0 or more, to `most`; None: no bound."""
    if most is not None and most < least:
        return []
    size = len(str(least))
    if most is None:
        same = _digits(str(least), None, size, exact=True)
        # outlines-core takes exponential time for {n,}.
        return [each for each in (same, f"[1-9][0-9]{{{size}}}[0-9]*") if each]
    parts = []
    for digits in range(size, len(str(most)) + 1):
        first = max(least, 10 ** (digits - 1) if digits > 1 else 0)
        last = min(most, 10**digits - 1)
        parts.append(_digits(str(first), str(last), digits, exact=True) or "")
    return parts


def _decimals(low: Bound, high: Bound | None) -> list[str]:
    """Returns expressions of the numbers between two bounds that are 0 or more."""
    if high is not None and high.value < low.value:
        return []
    whole, fraction = _split(low.value)
    if high is None:
        between = _naturals(whole + 1, None)
        first = _fraction(fraction, None, low.strict, False, whole)
        last = None
    else:
        end, end_fraction = _split(high.value)
        if whole == end:
            found = _fraction(fraction, end_fraction, low.strict, high.strict, whole)
            return [] if found is None else [f"{whole}{found}"]
        between = _naturals(whole + 1, end - 1)
        first = _fraction(fraction, None, low.strict, False, whole)
        last = _fraction(None, end_fraction, False, high.strict, end)
        last = None if last is None else f"{end}{last}"
    anything = _fraction(None, None, False, False, whole if high is None else end)
    parts = [] if first is None else [f"{whole}{first}"]
    parts += [f"{each}{anything}" for each in between]
    return parts if last is None else [*parts, last]


def _split(value: Decimal) -> tuple[int, str]:
    """Returns the integer part and the digits of the fraction of a number that is 0 or more."""
    with decimal.localcontext(prec=2000):
        whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction


def _fraction(
    low: str | None, high: str | None, low_strict: bool, high_strict: bool, whole: int
) -> str | None:
    """Returns the expression of a fraction, or of none, between two; None if there is none."""
    size, without = DIGITS - len(str(whole)), _may_end(low, high, low_strict, high_strict)
    if size <= 0:
        return "" if without else None
    digits = _digits(low, high, size, low_strict, high_strict, nonempty=True)
    if digits is None:
        return "" if without else None
    return rf"(?:\.{digits})?" if without else rf"\.{digits}"


def _may_end(low: str | None, high: str | None, low_strict: bool, high_strict: bool) -> bool:
    """Returns whether 0 is between two fractions."""
    above = low is None or not (low_strict or low.strip("0"))
    return above and (high is None or not high_strict or bool(high.strip("0")))


def _digits(
    low: str | None,
    high: str | None,
    size: int,
    low_strict: bool = False,
    high_strict: bool = False,
    *,
    exact: bool = False,
    nonempty: bool = False,
) -> str | None:
    """Returns the expression of digits after a point that are between two; None if there are none.

    Args:
      low, high: digits of the bounds; None: no bound.
      size: the most digits.
      low_strict, high_strict: whether the bounds themselves are excluded.
      exact: there are `size` digits, as in integers of the same length.
      nonempty: there is at least one digit.
    """

    def needed(low: str | None, high: str | None) -> tuple[str | None, str | None]:
        """Returns the bounds, None for those that all digits satisfy."""
        if low is not None and not low_strict and not low.strip("0"):
            low = None
        if exact and high is not None and not high.strip("9"):
            high = None
        return low, high

    low, high = needed(low, high)
    if low is None and high is None:
        least = size if exact else int(nonempty)
        count = f"{least}" if least == size else f"{least},{size}"
        return f"[0-9]{{{count}}}" if size else ""
    parts = []
    if not nonempty and (size == 0 or not exact) and _may_end(low, high, low_strict, high_strict):
        parts.append("")
    if size:
        first = 0 if low is None else int(low[:1] or 0)
        last = 9 if high is None else int(high[:1] or 0)
        free = []  # first digits after which any others may follow
        for digit in range(first, last + 1):
            below, above = needed(
                low[1:] if low is not None and digit == first else None,
                high[1:] if high is not None and digit == last else None,
            )
            if below is None and above is None:
                free.append(digit)
                continue
            rest = _digits(below, above, size - 1, low_strict, high_strict, exact=exact)
            if rest is not None:
                parts.append(f"{digit}{rest}")
        if free:
            rest = _digits(None, None, size - 1, exact=exact)
            digits = f"[{free[0]}-{free[-1]}]" if len(free) > 1 else f"{free[0]}"
            parts.append(f"{digits}{rest}")
    return either(parts) if parts else None
