"""Simulated rounds: what a drafter would have accepted while it does not draft.

A simulated round begins at a root, with the tokens that the drafter would have drafted. The tokens
that are emitted later, by whatever drafts, decide how many of them are accepted. Then the next one
begins.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

NOT_OPEN = -1


@struct.dataclass
class SimulatedRounds:
    """The open simulated round of each row, and the counts of those before.

    Attributes:
      drafted: int32 [B, D], the tokens that would have been drafted; -1: none.
      root: int32 [B], the position of the root; `NOT_OPEN` without an open round.
      histogram: int32 [B, D + 1], rounds that would have accepted 0, 1, … D tokens.
    """

    drafted: Int[Array, "B D"]
    root: Int[Array, "B"]
    histogram: Int[Array, "B A"]

    @classmethod
    def create(cls, rows: int, depth: int) -> Self:
        """Returns no rounds."""
        return cls(
            jnp.full((rows, depth), -1, jnp.int32),
            jnp.full(rows, NOT_OPEN, jnp.int32),
            jnp.zeros((rows, depth + 1), jnp.int32),
        )

    def closed(self) -> Self:
        """Returns the same without open rounds, whose tokens do not count."""
        return dataclasses.replace(self, root=jnp.full_like(self.root, NOT_OPEN))

    def continued(
        self,
        text: Int[Array, "B S"],
        newest: Int[Array, "B"],
        draft: Callable[[], Int[Array, "B D"]],
    ) -> Self:
        """Returns the rounds after new tokens.

        A round that drafted 4 7 2 ends when the text continues 4 8 (1 accepted) or 4 7 2 (3).

        Args:
          text: the tokens of each row; undefined after its newest token.
          newest: the index of that token, the root of the next round.
          draft: returns the tokens that would be drafted after it; -1: none.
        """
        if not self.drafted.size:
            return self
        steps = jnp.arange(self.drafted.shape[1])
        index = self.root[:, None] + 1 + steps
        emitted = index <= newest[:, None]
        actual = jnp.take_along_axis(text, jnp.minimum(index, text.shape[1] - 1), 1)
        correct = emitted & (actual == self.drafted)
        accepted = jnp.cumprod(correct, 1).sum(1)
        is_open = self.root != NOT_OPEN
        ends = is_open & ((emitted & ~correct).any(1) | emitted.all(1))
        count = ends[:, None] & (jnp.arange(self.histogram.shape[1]) == accepted[:, None])
        begins = ends | ~is_open
        return dataclasses.replace(
            self,
            drafted=jnp.where(begins[:, None], draft(), self.drafted),
            root=jnp.where(begins, newest, self.root),
            histogram=self.histogram + count,
        )
