"""How the kernel for NVIDIA Hopper divides its work: what fits a block, and what fills a device.

`choose_config` takes what `python -m pallas_kernels.benchmarks.tune` found to be fastest on this
device (`tuned.py`), and where nothing near has been timed, what a rule of waves says.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax

from pallas_kernels.mosaic_gpu import tuned

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

    def shared_bytes(self, head_dim: int, quantized: bool = False) -> int:
        """Returns the shared memory of a block, in 16-bit dtypes, barriers aside.

        A `quantized` prefix comes in 8 bits with a float32 scale for each token. Then there are
        also places for new tokens, and for what each warpgroup converts.
        """
        of_queries = self.row_groups * ROWS * head_dim
        of_weights = self.groups(head_dim) * ROWS * self.block
        halves = of_queries + of_weights
        token = 2 * head_dim
        if quantized:
            halves += (self.groups(head_dim) + 2 * self.key_groups) * self.block * head_dim
            token = head_dim + 4
        return 2 * (halves + self.stages * self.block * token)


def column_groups(head_dim: int) -> int:
    """Returns how many warpgroups share the columns of the values."""
    return max(1, head_dim // WIDEST)


def multiprocessors() -> int:
    """Returns how many multiprocessors the device has, or `MULTIPROCESSORS` if it does not say."""
    return getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


_forced: Config | None = None


@contextlib.contextmanager
def using(config: Config) -> Iterator[None]:
    """Makes `choose_config` return this config for what is traced inside, to time or to test it."""
    global _forced
    before, _forced = _forced, config
    try:
        yield
    finally:
        _forced = before


def choose_config(
    heads: int, rows: int, slots: int, head_dim: int, multiprocessors: int, quantized: bool = False
) -> Config:
    """Returns how to divide the work of one call: as was timed on this device, or by the rule.

    The arguments are those of `config_by_rule`. Nothing is timed on a prefix of 8 bits.

    Raises:
      ValueError: the device's table of timed configurations is malformed.
    """
    if _forced is not None:
        return _forced
    if quantized:
        return config_by_rule(heads, rows, slots, head_dim, multiprocessors, quantized)
    entries = table(jax.devices()[0].device_kind)
    found = tuned.nearest(entries, tuned.Key(heads, rows, slots, head_dim))
    return found or config_by_rule(heads, rows, slots, head_dim, multiprocessors)


@functools.cache
def table(device: str) -> dict[tuned.Key, Config]:
    """Returns the fastest configurations that were timed on a kind of device; {} if none were.

    Raises:
      ValueError: the file is malformed, or a configuration in it cannot run.
    """
    path = tuned.path_of(device)
    found = {}
    for key, entry in tuned.read(path).items():
        try:
            config = Config(**entry["config"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {key}: {error}; {tuned.REMEDY}") from error
        if not fits(config, key.rows, key.slots, key.head_dim):
            raise ValueError(f"{path}: {key}: {config} does not fit the device; {tuned.REMEDY}")
        found[key] = config
    return found


def fits(config: Config, rows: int, slots: int, head_dim: int) -> bool:
    """Returns whether the device can run a configuration, and no part of it would lie idle."""
    return (
        1 <= config.splits <= max(1, slots // config.block)
        and config.groups(head_dim) == WARPGROUPS - 1
        and config.row_groups <= -(-rows // ROWS)
        and config.stages >= 2
        and config.shared_bytes(head_dim) <= SHARED_BYTES
    )


def candidates(heads: int, rows: int, slots: int, head_dim: int, sms: int) -> list[Config]:
    """Returns every configuration worth timing, the rule's own first, then the likeliest.

    Splits are powers of two and three times such; the rest is all that fits.

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
        for stages in range(max(2, key_groups), MOST_STAGES + 1)
        if stages % key_groups == 0
    ]

    def likely(config: Config) -> tuple:
        return (config != rule, cost(config, heads, rows, slots, sms), -config.stages)

    return sorted((c for c in configs if fits(c, rows, slots, head_dim)), key=likely)


def cost(config: Config, heads: int, rows: int, slots: int, sms: int) -> int:
    """Returns blocks of 64 keys on the busiest multiprocessor; each start of a block counts four.

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
      heads: B * K, the KV heads of all rows.
      rows: T * G, the query rows of each.
      slots: S, of the prefix.
      head_dim: D.
      multiprocessors: of the device; each runs one block of the grid at a time.
      quantized: the prefix is in 8 bits, and read so.
    """
    groups = (WARPGROUPS - 1) // column_groups(head_dim)
    row_groups = min(groups, -(-rows // ROWS))
    turns = groups // row_groups
    deepest = [
        Config(row_groups=row_groups, key_groups=turns, stages=stages)
        for stages in range(2, MOST_STAGES + 1, turns)
    ]
    config = [c for c in deepest if c.shared_bytes(head_dim, quantized) <= SHARED_BYTES][-1]

    def split(splits: int) -> Config:
        return dataclasses.replace(config, splits=splits)

    most = min(max(1, slots // (4 * config.block)), multiprocessors)
    costs = {n: cost(split(n), heads, rows, slots, multiprocessors) for n in range(1, most + 1)}
    # The fewest that are nearly the best: each writes results of its own, in float32.
    return split(next(n for n, x in costs.items() if x <= 1.05 * min(costs.values())))
