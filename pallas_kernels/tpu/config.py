"""Chooses how the TPU kernel divides its work, from the sizes of a call and a model of VMEM."""

import dataclasses
import functools

from pallas_kernels.packing import round_up

LANES = 128  # the last axis of a tile; smaller ones are padded to it
VMEM_LIMIT = 56 << 20  # of 128 MiB on v5e, v5p and v6e, and 64 on v7x
VMEM_BUDGET = 40 << 20  # what the estimate below may reach
# A step of the grid has an overhead of about 0.35 us, in which a v5e reads 0.3 MB.
STEP_BYTES = 3 << 19
BLOCKS = (128, 256, 512, 1024, 2048)
NEW_BLOCKS, NEW_BYTES = (128, 256, 512), 8 << 20  # of new tokens: the most that have so many bytes


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel divides its work.

    Attributes:
      rows: query rows of a KV head in a step.
      block: slots of the prefix in a step.
      new_block: new tokens in a step.
    """

    rows: int
    block: int
    new_block: int

    def vmem_bytes(self, heads: int, head_dim: int, itemsize: int) -> int:
        """Returns the estimated VMEM of a step; what is copied has two buffers.

        Args:
          heads: K, on a device.
          head_dim: D.
          itemsize: bytes per element of queries and of the prefix.
        """
        size, keys = round_up(head_dim, LANES), max(self.block, self.new_block)
        queries_and_results = 2 * 2 * size * itemsize + 2 * 4 * LANES
        running = 4 * (size + 2 * LANES)
        copied = 2 * 2 * heads * (self.block + self.new_block) * size * itemsize
        scores = 3 * 4 * self.rows * keys + 2 * 4 * self.rows * self.new_block
        return heads * self.rows * (queries_and_results + running) + copied + scores


@functools.cache
def choose_config(
    heads: int, rows: int, new: int, slots: int, head_dim: int, itemsize: int
) -> Config:
    """Returns a configuration that reads the prefix as rarely as VMEM allows.

    Args:
      heads: K, on a device.
      rows: T * G, query rows of each KV head.
      new: N, new tokens.
      slots: S, of the prefix.
      head_dim: D, the head size.
      itemsize: bytes per element of queries and of the prefix; the larger one.
    """
    slot_bytes = 2 * heads * round_up(head_dim, LANES) * itemsize
    fitting = [b for b in NEW_BLOCKS if b * slot_bytes <= NEW_BYTES]
    new_block = min(max(fitting, default=NEW_BLOCKS[0]), round_up(new, 16))
    wanted = next((b for b in BLOCKS if b * slot_bytes >= STEP_BYTES), BLOCKS[-1])
    tiles = 1
    while True:
        tile = round_up(-(-rows // tiles), 16)
        for block in (b for b in reversed(BLOCKS) if b <= wanted):
            config = Config(tile, min(block, slots), new_block)
            if config.vmem_bytes(heads, head_dim, itemsize) <= VMEM_BUDGET:
                return config
        if tile == 16:
            return config  # the compiler says if this is too much
        tiles *= 2
