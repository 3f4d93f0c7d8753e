"""How the kernel for NVIDIA Hopper divides its work: what fits a block, and what fills a device."""

import dataclasses
import functools

import jax

ROWS = 64  # of a wgmma tile
WIDEST = 128  # value columns that one warpgroup accumulates; more would not fit its registers
TILE = 8  # rows of a tile in shared memory, and so of what is copied there
WARPGROUPS = 3  # of a block, the producer included: more have too few registers each
SHARED_BYTES = 226 * 1024  # of a block, less something for barriers
MULTIPROCESSORS = 132  # of H100 and H200 SXM, where the device does not say
MOST_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel divides its work.

    Attributes:
      splits: parts of the prefix, each a block of the grid; every row's own length is divided.
      row_groups: tiles of 64 rows in a block of the grid, one compute warpgroup each.
      key_groups: compute warpgroups that take turns with the blocks of keys.
      block: keys brought at a time.
      stages: blocks of keys in shared memory; a multiple of key_groups, because a barrier must be
        waited on by the same warpgroups every time.

    Raises:
      ValueError: stages is no multiple of key_groups, or block none of 64.
    """

    splits: int = 1
    row_groups: int = 1
    key_groups: int = 1
    block: int = 64
    stages: int = 4

    def __post_init__(self):
        if self.stages % self.key_groups:
            raise ValueError(
                f"stages={self.stages} must be a multiple of key_groups={self.key_groups}"
            )

        if self.block % ROWS:
            raise ValueError(f"block={self.block} must be a multiple of {ROWS}")

    def groups(self, head_dim: int) -> int:
        """Returns the number of compute warpgroups."""
        return self.row_groups * self.key_groups * column_groups(head_dim)

    def shared_bytes(self, head_dim: int) -> int:
        """Returns the shared memory of a block, in 16-bit dtypes, barriers aside."""
        of_queries = self.row_groups * ROWS * head_dim
        of_weights = self.groups(head_dim) * ROWS * self.block
        return 2 * (of_queries + of_weights + 2 * self.stages * self.block * head_dim)


def column_groups(head_dim: int) -> int:
    """Returns how many warpgroups share the columns of the values."""
    return max(1, head_dim // WIDEST)


def multiprocessors() -> int:
    """Returns how many multiprocessors the device has, or `MULTIPROCESSORS` if it does not say."""
    return getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


@functools.cache
def choose_config(heads: int, rows: int, slots: int, head_dim: int, multiprocessors: int) -> Config:
    """Returns how to divide the work of one call.

    Args:
      heads: B * K, the KV heads of all rows.
      rows: T * G, the query rows of each.
      slots: S, of the prefix.
      head_dim: D.
      multiprocessors: of the device; each runs one block of the grid at a time.
    """
    groups = (WARPGROUPS - 1) // column_groups(head_dim)
    row_groups = min(groups, -(-rows // ROWS))
    turns = groups // row_groups
    fits = [
        Config(row_groups=row_groups, key_groups=turns, stages=stages)
        for stages in range(2, MOST_STAGES + 1, turns)
    ]
    config = [c for c in fits if c.shared_bytes(head_dim) <= SHARED_BYTES][-1]
    blocks = heads * -(-rows // (ROWS * row_groups))

    def cost(splits: int) -> int:
        """Blocks of keys on the busiest multiprocessor; starting a block of the grid costs four."""
        waves = -(-blocks * splits // multiprocessors)
        return waves * (-(-slots // (splits * config.block)) + 4)

    most = min(max(1, slots // (4 * config.block)), multiprocessors)
    least = min(map(cost, range(1, most + 1)))
    # The fewest that are nearly the best: each writes results of its own, in float32.
    splits = next(n for n in range(1, most + 1) if cost(n) <= 1.05 * least)
    return dataclasses.replace(config, splits=splits)
