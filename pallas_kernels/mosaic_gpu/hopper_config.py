"""Chooses how the kernel for NVIDIA Hopper divides its work.

`choose_config` uses the fastest configuration that `python -m pallas_kernels.benchmarks.tune` timed
on this kind of device (`tuned.py`), or a rule where no similar shape was timed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax

from pallas_kernels.mosaic_gpu import tuned

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
    return getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


_forced: Config | None = None


@contextlib.contextmanager
def using(config: Config) -> Iterator[None]:
    """Forces `choose_config` to return this config for programs traced in the context."""
    global _forced
    before, _forced = _forced, config
    try:
        yield
    finally:
        _forced = before


def choose_config(
    heads: int, rows: int, slots: int, head_dim: int, multiprocessors: int, quantized: bool = False
) -> Config:
    """Returns how to divide the work of one call: from the device's table, or by the rule.

    The arguments are those of `config_by_rule`. Tables do not cover 8-bit prefixes.

    Raises:
      ValueError: the device's table is malformed.
    """
    if _forced is not None:
        return _forced
    if quantized:
        return config_by_rule(heads, rows, slots, head_dim, multiprocessors, quantized)
    entries = table(jax.devices()[0].device_kind)
    config = tuned.nearest(entries, tuned.Key(heads, rows, slots, head_dim))
    return config or config_by_rule(heads, rows, slots, head_dim, multiprocessors)


@functools.cache
def table(device: str) -> dict[tuned.Key, Config]:
    """Returns the fastest timed configurations of a kind of device; {} without a table.

    Raises:
      ValueError: the table is malformed, or a configuration in it cannot run.
    """
    path = tuned.path_of(device)
    configs = {}
    for key, entry in tuned.read(path).items():
        try:
            config = Config(**entry["config"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {key}: {error}; {tuned.REMEDY}") from error
        if not fits(config, key.rows, key.slots, key.head_dim):
            raise ValueError(f"{path}: {key}: {config} does not fit the device; {tuned.REMEDY}")
        configs[key] = config
    return configs


def fits(config: Config, rows: int, slots: int, head_dim: int) -> bool:
    """Returns whether the device can run a configuration without idle parts."""
    return (
        1 <= config.splits <= max(1, slots // config.block)
        and config.groups(head_dim) == WARPGROUPS - 1
        and config.row_groups <= -(-rows // ROWS)
        and config.stages >= 2
        and config.shared_bytes(head_dim) <= SHARED_BYTES
    )


def candidates(heads: int, rows: int, slots: int, head_dim: int, sms: int) -> list[Config]:
    """Returns the configurations to time: the rule's first, then by increasing estimated cost.

    Splits are 2**n and 3 * 2**n. All other fields take every value that fits.

    Args:
      heads, rows, slots, head_dim: as for `config_by_rule`.
      sms: multiprocessors of the device.
    """
    powers = {m * 2**n for m in (1, 3) for n in range(sms.bit_length()) if m * 2**n <= sms}
    rule = config_by_rule(heads, rows, slots, head_dim, sms)
    configs = [
        Config(splits, row_groups, key_groups, block, stages)
        for splits in sorted(powers | {rule.splits})
        for row_groups in range(1, WARPGROUPS)
        for key_groups in range(1, WARPGROUPS)
        for block in (ROWS, 2 * ROWS)
        for stages in range(max(2, key_groups), MAX_STAGES + 1)
        if stages % key_groups == 0
    ]

    def likely(config: Config) -> tuple:
        return (config != rule, cost(config, heads, rows, slots, sms), -config.stages)

    return sorted((c for c in configs if fits(c, rows, slots, head_dim)), key=likely)


def cost(config: Config, heads: int, rows: int, slots: int, sms: int) -> int:
    """Returns blocks of 64 keys on the busiest multiprocessor; starting a block counts as four.

    The arguments are those of `candidates`.
    """
    blocks = heads * -(-rows // (ROWS * config.row_groups))
    waves = -(-blocks * config.splits // sms)
    return waves * (-(-slots // (config.splits * ROWS)) + 4)


@functools.cache
def config_by_rule(
    heads: int, rows: int, slots: int, head_dim: int, multiprocessors: int, quantized: bool = False
) -> Config:
    """Returns a configuration that fills the device's multiprocessors evenly.

    Args:
      heads: B * K, KV heads of all rows.
      rows: T * G, query rows of each KV head.
      slots: S, of the prefix.
      head_dim: D, the head size.
      multiprocessors: of the device; each runs one block of the grid at a time.
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

    def split(splits: int) -> Config:
        return dataclasses.replace(config, splits=splits)

    most = min(max(1, slots // (4 * config.block)), multiprocessors)
    costs = {n: cost(split(n), heads, rows, slots, multiprocessors) for n in range(1, most + 1)}
    # The smallest near-optimal number, because each split writes float32 results.
    return split(next(n for n, x in costs.items() if x <= 1.05 * min(costs.values())))
