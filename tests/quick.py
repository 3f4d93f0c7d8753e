"""Selects the cases of a test for the quick suite; `make test-slow` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Returns the cases as parameters; those that are not chosen are marked slow.

    Fails if a chosen case does not exist, for example after a rename.
    """
    cases = list(cases)
    assert all(case in cases for case in chosen), [case for case in chosen if case not in cases]

    def parameter(case):
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=() if case in chosen else pytest.mark.slow)

    return [parameter(case) for case in cases]
