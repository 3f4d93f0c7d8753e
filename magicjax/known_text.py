"""What a look-up would have accepted on text that is known: counted on it, so no model runs.

Whatever decoded the text, every drafter gives the same one in greedy decoding, and under sampling
another from the same distribution, of which a look-up's token is accepted as often as it is drawn.
So the longest text that any trial came to says more of a look-up than a trial of its own: it finds
more, the more text there is to find it in.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from magicjax.drafters import LookUp
from magicjax.tree import chain

FEW = 8  # rounds of all rows together that stand beside each row's own
AT_ONCE = 64  # places that are searched for together


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
        """Learns the text of a `decode.DecodeState`, where it is longer than what is known."""
        for row, count in enumerate(map(int, emitted)):
            if count > len(self.new[row]):
                self.new[row] = output[row, :count].copy()
                self.wanted[row] = count if ended[row] else int(self.limits[row])


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of a row with chains of one depth, on the text that is known.

    Attributes:
      accepted: of each round.
      left: tokens that are wanted behind the last of them.
    """

    accepted: tuple[int, ...]
    left: int

    @property
    def recent(self) -> tuple[int, ...]:
        """The later half."""
        return self.accepted[len(self.accepted) // 2 :]


def look_up_counts(
    look_up: LookUp, text: KnownText, depth: int
) -> tuple[Int[np.ndarray, "A"], tuple[float, ...]]:
    """Returns (rounds that accepted 0, 1, ... `depth` tokens, tokens of a round by depth from 1 on).

    Tokens are those of the row that needs most rounds to its end: plain decoding takes as many as
    the longest row has tokens. Behind what is known, rounds are taken to be like the later half of
    the row's known ones, and a few of all rows together.

    Args:
      look_up: what drafts.
      text: more than a token of some row.
      depth: the deepest chain.
    """
    ahead = accepted_ahead(look_up, text, depth)
    longest = max(text.wanted) - 1
    tokens, rounds = [], []
    for shallow in range(1, depth + 1):
        rounds = [
            rounds_of(of_row, shallow, wanted)
            for of_row, wanted in zip(ahead, text.wanted, strict=True)
        ]
        tokens.append(longest / max(_to_the_end(rounds)))
    accepted = [count for row in rounds for count in row.accepted]
    return np.bincount(accepted, minlength=depth + 1), tuple(tokens)


def rounds_of(ahead: Int[np.ndarray, "n"], depth: int, wanted: int) -> Rounds:
    """Returns the rounds of a row whose outcome is known.

    Args:
      ahead: how many tokens of the deepest chain would be accepted behind each known one.
      depth: of the chains.
      wanted: tokens of the row, the first (prefill's) included.
    """
    accepted, at = [], 0
    # A chain that goes on beyond what is known may be accepted further.
    last = wanted - 1 if wanted == len(ahead) else len(ahead) - depth
    while at < last:
        accepted.append(min(int(ahead[at]), depth))
        at += 1 + accepted[-1]
    return Rounds(tuple(accepted), max(0, wanted - 1 - at))


def _to_the_end(rows: Sequence[Rounds]) -> list[float]:
    """Returns how many rounds each row takes to its end."""
    recent = [1 + count for row in rows for count in row.recent]
    pooled = sum(recent) / len(recent) if recent else 1.0
    found = []
    for row in rows:
        tokens = sum(row.recent) + len(row.recent)
        of_round = (tokens + FEW * pooled) / (len(row.recent) + FEW)
        found.append(len(row.accepted) + row.left / of_round)
    return found


def accepted_ahead(look_up: LookUp, text: KnownText, depth: int) -> list[Int[np.ndarray, "n"]]:
    """Returns for each known token how many tokens of a chain behind it are those that follow."""
    lengths = np.array([len(prompt) for prompt in text.prompts])
    known = np.array([len(new) for new in text.new])
    places = [(row, p) for row, count in enumerate(known) for p in range(count)]
    slots = -(-int((lengths + known).max() + depth) // AT_ONCE) * AT_ONCE  # of few shapes
    whole = np.zeros((len(known), slots), np.int32)
    for row, parts in enumerate(zip(text.prompts, text.new, strict=True)):
        both = np.concatenate(parts)
        whole[row, : len(both)] = both
    padded = places + [(0, 0)] * (-len(places) % AT_ONCE)
    rows, at = np.array(padded, np.int32).T
    counts = _ahead(look_up, depth, whole, lengths[rows] + at, rows, (lengths + known)[rows])
    return np.split(np.asarray(counts)[: len(places)], np.cumsum(known)[:-1])


@functools.partial(jax.jit, static_argnums=1)
def _ahead(
    look_up: LookUp,
    depth: int,
    text: Int[Array, "B S"],
    newest: Int[Array, "P"],
    rows: Int[Array, "P"],
    ends: Int[Array, "P"],
) -> Int[Array, "P"]:
    """Returns how many tokens of a chain behind the newest one are those that follow it."""

    def count(place: tuple[Array, Array, Array]) -> Array:
        at, row, end = place
        tokens, found = look_up.chains(text[row][None], at[None], chain(depth))
        behind = at + 1 + jnp.arange(depth)
        right = (tokens[0] == text[row, behind]) & found[0] & (behind < end)
        return jnp.cumprod(right).sum()

    return jax.lax.map(count, (newest, rows, ends), batch_size=AT_ONCE)
