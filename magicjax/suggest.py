"""One hint for every misspelt name."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'NEAREST'?" if a known name is close to `name`, else ""."""
    nearest = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
