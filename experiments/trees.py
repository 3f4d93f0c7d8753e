"""Token trees as experiment files and tables write them: `chain(4)`, `expansion(2,2,1)`."""

import dataclasses
import re

import magicjax


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """A tree by its name.

    Attributes:
      kind: "chain" or "expansion".
      widths: (length,) of a chain, (children of each node by level) of an expansion.
    """

    kind: str
    widths: tuple[int, ...]

    def build(self) -> magicjax.TokenTree:
        """Returns the tree itself."""
        if self.kind == "chain":
            return magicjax.chain(self.widths[0])
        return magicjax.expansion(self.widths)

    def __str__(self) -> str:
        return f"{self.kind}({','.join(map(str, self.widths))})"


def parse(text: str) -> TreeSpec:
    """Returns the tree that a text names.

    Raises:
      ValueError: it is neither chain(n) nor expansion(k1,...,km) with positive numbers.
    """
    match = re.fullmatch(r"\s*(chain|expansion)\s*\(([\d\s,]+)\)\s*", text)
    widths = tuple(int(w) for w in match[2].split(",") if w.strip()) if match else ()
    if not match or not widths or min(widths) < 1 or (match[1] == "chain" and len(widths) > 1):
        raise ValueError(
            f"tree={text!r} is not a tree: write chain(4), or expansion(2,2,1) with positive "
            "numbers of children by level"
        )
    return TreeSpec(match[1], widths)
