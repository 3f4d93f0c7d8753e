"""Which cases of a test the quick suite runs; the others wait for `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Returns the cases as parameters, with those that were not chosen marked slow.

    Fails where one of the chosen is no case, so that a renamed case does not go missing.
    """
    cases = list(cases)
    assert all(case in cases for case in chosen), [case for case in chosen if case not in cases]

    def parameter(case):
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=() if case in chosen else pytest.mark.slow)

    return [parameter(case) for case in cases]
