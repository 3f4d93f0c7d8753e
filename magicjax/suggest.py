"""One hint for every misspelt name."""

import difflib
from collections.abc import Iterable

# A transposition or one other letter in a name of four letters has 0.75, `budgt` for `budget` 0.91.
SIMILARITY = 0.75


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'NEAREST'?" for a misspelling of a known name, else "".

    Leading dashes and slashes, case, and the difference of `-` and `_` do not count.
    """
    plain = {_plain(each): each for each in known}
    nearest = difflib.get_close_matches(_plain(name), plain, 1, SIMILARITY)
    return f"; did you mean {plain[nearest[0]]!r}?" if nearest else ""


def _plain(name: str) -> str:
    return name.lstrip("-/").lower().replace("-", "_")
