"""Chooses how the kernel for NVIDIA Hopper divides its work."""

import dataclasses
import functools

from pallas_kernels.device_check import default_device

ROWS = 64  # of a wgmma tile
WIDEST = 128  # value columns that the registers of one warpgroup can accumulate
TILE = 8  # rows of a tile in shared memory; copies have a multiple of it
WARPGROUPS = 3  # per block, including the producer; more would have too few registers each
SHARED_BYTES = 226 * 1024  # per block, without barriers
MULTIPROCESSORS = 132  # of H100 and H200 SXM; used if the device does not report a number
MAX_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel divides its work.

    Attributes:
      splits: parts of the prefix, each a block of the grid; the length of each row is divided.
      row_groups: tiles of 64 rows in a block of the grid, one compute warpgroup each.
      key_groups: compute warpgroups among which the blocks of keys alternate.
      block: keys per copy.
      stages: blocks of keys in shared memory; a multiple of key_groups, because the same
        warpgroups must always wait on a barrier.

    Raises:
      ValueError: stages is not a multiple of key_groups, or block is not a multiple of 64.
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

    def shared_bytes(self, head_dim: int, quantized: bool = False) -> int:
        """Returns the shared memory of a block in 16-bit dtypes, without barriers.

        A `quantized` prefix has 8 bits and a float32 scale for each token, and needs separate
        buffers for new tokens and for the entries that each warpgroup converts.
        """
        queries = self.row_groups * ROWS * head_dim
        weights = self.groups(head_dim) * ROWS * self.block
        halves = queries + weights
        token = 2 * head_dim
        if quantized:
            halves += (self.groups(head_dim) + 2 * self.key_groups) * self.block * head_dim
            token = head_dim + 4
        return 2 * (halves + self.stages * self.block * token)


def column_groups(head_dim: int) -> int:
    """Returns among how many warpgroups the columns of the values are divided."""
    return max(1, head_dim // WIDEST)


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the device, `MULTIPROCESSORS` if unknown."""
    return getattr(default_device(), "core_count", None) or MULTIPROCESSORS


@functools.cache
def choose_config(
    heads: int, rows: int, slots: int, head_dim: int, multiprocessors: int, quantized: bool = False
) -> Config:
    """Returns a configuration that fills the device's multiprocessors evenly.

    Args:
      heads: B * K, KV heads of all rows.
      rows: T * G, query rows of each KV head.
      slots: S, of the prefix.
      head_dim: D, the head size.
      multiprocessors: number of multiprocessors of the device; each runs one block of the grid at a
        time.
      quantized: the kernel reads the prefix in 8 bits.
    """
    groups = (WARPGROUPS - 1) // column_groups(head_dim)
    row_groups = min(groups, -(-rows // ROWS))
    key_groups = groups // row_groups
    deepest = [
        Config(row_groups=row_groups, key_groups=key_groups, stages=stages)
        for stages in range(2, MAX_STAGES + 1, key_groups)
    ]
    config = [c for c in deepest if c.shared_bytes(head_dim, quantized) <= SHARED_BYTES][-1]

    blocks = heads * -(-rows // (ROWS * row_groups))
    return dataclasses.replace(config, splits=choose_splits(blocks, slots, multiprocessors))


def choose_splits(blocks: int, slots: int, concurrent: int) -> int:
    """Returns the number of parts of the prefix that keeps a device's multiprocessors busy.

    Args:
      blocks: blocks of the grid for each part.
      slots: S, of the prefix.
      concurrent: blocks of the grid that run at the same time.
    """

    def cost(splits: int) -> int:
        """Blocks of 64 keys on the busiest multiprocessor; starting a block counts as four."""
        waves = -(-blocks * splits // concurrent)
        return waves * (-(-slots // (splits * ROWS)) + 4)

    most = min(max(1, slots // (4 * ROWS)), concurrent)
    costs = {splits: cost(splits) for splits in range(1, most + 1)}
    # The smallest near-optimal number, because each split writes float32 results.
    return next(n for n, x in costs.items() if x <= 1.05 * min(costs.values()))
