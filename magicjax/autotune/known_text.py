"""What a look-up would have accepted on text that is known: counted on it, so no model runs.

In greedy decoding every drafter gives the same text. So the longest one that any trial came to says
more of a look-up than a trial of its own: it finds more, the more text there is to find it in.

Under sampling each trial draws its own text, and a look-up's token is accepted as often as it is
drawn: its acceptance on any of them is an estimate. Of several the longest is taken, on which more
was accepted than on the others, so this one leans a little in its favour.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from magicjax.autotune.to_come import slowest_rounds
from magicjax.decoding import program_cache
from magicjax.drafters import LookUp
from magicjax.drafters.prompt_lookup import Search

STEP = 64  # of the shapes, so that there are few


@dataclasses.dataclass
class KnownText:
    """The longest text of each row that is known so far, behind its prompt.

    Attributes:
      prompts: of each row.
      limits: of new tokens.
      new: those that are known.
      wanted: how many there will be, as far as is known: fewer than the limit where a row ends.
    """

    prompts: Sequence[Int[np.ndarray, "T"]]
    limits: Int[np.ndarray, "B"]
    new: list[Int[np.ndarray, "n"]]
    wanted: list[int]

    def learn(
        self,
        output: Int[np.ndarray, "B M"],
        emitted: Int[np.ndarray, "B"],
        ended: Bool[np.ndarray, "B"],
    ) -> None:
        """Learns the text of a `decode.DecodeState`, unless more of a row is known."""
        for row, count in enumerate(map(int, emitted)):
            if count >= len(self.new[row]):
                self.new[row] = output[row, :count].copy()
                self.wanted[row] = count if ended[row] else int(self.limits[row])


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of a row with chains of one depth, on the text that is known.

    Attributes:
      accepted: of each round; of one that the row's end cuts, what it still could be.
      whole: how many of them, the first, are not cut.
      left: tokens that are wanted behind the last of them.
    """

    accepted: tuple[int, ...]
    whole: int
    left: int


def look_up_counts(
    look_up: LookUp, text: KnownText, depth: int
) -> tuple[Int[np.ndarray, "depth+1"], tuple[float, ...], float]:
    """Returns (rounds by what they accepted, tokens of a round by depth, seconds of compiling).

    Tokens are those of the row that needs most rounds to its end: plain decoding takes as many as
    the longest row has tokens. Behind what is known rounds are like the later half of those that
    are (`to_come`). Where no row's text is long enough for a round there is neither.

    Args:
      look_up: what drafts.
      text: what is known.
      depth: the deepest chain.
    """
    ahead, compile_s = accepted_ahead(look_up, text, depth)
    longest, tokens = max(text.wanted) - 1, []
    for shallow in range(1, depth + 1):
        rows = _of_rows(ahead, shallow, text.wanted)
        halves = (row.accepted[len(row.accepted) // 2 :] for row in rows)
        recent = np.stack([_counted(half, shallow) for half in halves])
        if recent.any():
            before, left = np.array([(len(row.accepted), row.left) for row in rows]).T
            tokens.append(longest / slowest_rounds(before, left, recent))
    whole = (row.accepted[: row.whole] for row in _of_rows(ahead, depth, text.wanted))
    return np.sum([_counted(rounds, depth) for rounds in whole], axis=0), tuple(tokens), compile_s


def _of_rows(
    ahead: Sequence[Int[np.ndarray, "n"]], depth: int, wanted: Sequence[int]
) -> list[Rounds]:
    return [rounds_of(row, depth, count) for row, count in zip(ahead, wanted, strict=True)]


def _counted(accepted: Sequence[int], depth: int) -> Int[np.ndarray, "depth+1"]:
    return np.bincount(np.array(accepted, int), minlength=depth + 1)


def rounds_of(ahead: Int[np.ndarray, "n"], depth: int, wanted: int) -> Rounds:
    """Returns the rounds of a row whose outcome is known.

    Args:
      ahead: how many tokens of the deepest chain would be accepted behind each known one.
      depth: of the chains.
      wanted: tokens of the row, the first (prefill's) included.
    """
    accepted, whole, at = [], 0, 0
    # A chain that goes on beyond what is known may be accepted further, unless the row ends there.
    uncut = len(ahead) - depth
    end = wanted - 1 if wanted == len(ahead) else uncut
    while at < end:
        accepted.append(min(int(ahead[at]), depth))
        whole += at < uncut
        at += 1 + accepted[-1]
    return Rounds(tuple(accepted), whole, max(0, wanted - 1 - at))


def accepted_ahead(
    look_up: LookUp, text: KnownText, depth: int
) -> tuple[list[Int[np.ndarray, "n"]], float]:
    """Returns (how many tokens of a chain behind each known token follow it, of each row; seconds
    of compiling).
    """
    lengths = np.array([len(prompt) for prompt in text.prompts], np.int32)
    known = np.array([len(new) for new in text.new], np.int32)
    whole = np.zeros((len(known), _rounded(int((lengths + known).max()) + depth)), np.int32)
    for row, parts in enumerate(zip(text.prompts, text.new, strict=True)):
        both = np.concatenate(parts)
        whole[row, : len(both)] = both
    search = Search(look_up, depth, _rounded(int(known.max())))
    arguments = jnp.asarray(whole), jnp.asarray(lengths), jnp.asarray(lengths + known)
    program, compile_s = program_cache.program("look-up", search, *arguments)
    counts = np.asarray(program(*arguments))
    return [counts[:n, row] for row, n in enumerate(known)], compile_s


def _rounded(count: int) -> int:
    return -(-count // STEP) * STEP
