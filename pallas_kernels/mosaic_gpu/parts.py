"""Which keys a block of the grid reads, in the kernels for NVIDIA GPUs."""

import dataclasses
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Part:
    """The keys of one block of the grid: blocks of the prefix, then of new tokens.

    Attributes:
      row, head: indices of the row and of the KV head.
      prefix_row: index of the row in the prefix.
      begin, end: slots of the prefix.
      prefix_blocks: number of blocks of the prefix, 0 or more.
      blocks: the same including new tokens, which the first split processes.
    """

    row: Any
    prefix_row: Any
    head: Any
    begin: Any
    end: Any
    prefix_blocks: Any
    blocks: Any


def make_part(splits: int, block: int, lengths: Any, new_tokens: int) -> Part:
    """Returns the keys of this block of the grid.

    Args:
      splits: number of parts of the prefix.
      block: keys that are processed at once.
      lengths: live slots of each row; then the row of the prefix of the first row of queries.
      new_tokens: N.
    """
    split, row = lax.axis_index("split"), lax.axis_index("row")
    length = lengths[row]
    split_slots = pl.cdiv(pl.cdiv(length, splits), block) * block
    begin = split * split_slots
    end = jnp.minimum(begin + split_slots, length)
    prefix_blocks = pl.cdiv(jnp.maximum(end - begin, 0), block)
    blocks = prefix_blocks + jnp.where(split == 0, pl.cdiv(new_tokens, block), 0)
    prefix_row = lengths[lengths.shape[0] - 1] + row
    head = lax.axis_index("head")
    return Part(row, prefix_row, head, begin, end, prefix_blocks, blocks)
