"""Stored keys and values of texts, so that later prompts prefill only what differs.

A new prompt starts from a copy of the entry that shares the most tokens with its beginning. The
most recently used entries are on the device and the others in host memory. All entries on the
device have the shapes of one row, so copying compiles nothing. Entries with states are used whole.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from magicjax.decoding.memory import OutOfMemoryError
from magicjax.engine.memory_check import num_prefixes
from magicjax.engine.scheduler import common_prefix
from magicjax.engine.setup import EngineSetup
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import RING_SPARE
from magicjax.parallel import offloading
from sharding import global_arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The keys and values of a text.

    Attributes:
      tokens: int32 [T], of the text.
      cache: the target's, of one row.
      drafter_state: the drafter's, of one row, after the text.
      on_host: whether the arrays are NumPy arrays, and the caches have T slots.
    """

    tokens: Int[np.ndarray, "T"]
    cache: KVCache
    drafter_state: Any
    on_host: bool = False

    @property
    def row(self) -> tuple[KVCache, Any]:
        """The arrays, which can be donated to a program once the prefix is not stored."""
        return self.cache, self.drafter_state

    def holds(self, count: int) -> bool:
        """Whether the caches still have all that a token after the first `count` ones sees.

        Later tokens of a text that is longer than a ring have overwritten earlier ones, all but
        `RING_SPARE` of which it needed no more. Tokens after a stop string are in the caches too.
        """
        leaves = jax.tree.leaves(self.row, is_leaf=lambda x: isinstance(x, KVCache))
        caches = [x for x in leaves if isinstance(x, KVCache) and any(x.windows)]
        for cache in caches:
            length = int(global_arrays.fetch(cache.lengths).max())
            layers = zip(cache.k, cache.windows, strict=True)
            slots = min(layer.shape[2] for layer, window in layers if window is not None)
            if length > slots and length - count > RING_SPARE:
                return False
        return True

    @property
    def state_length(self) -> int | None:
        """The tokens in the target's states; None without states."""
        if not self.cache.states:
            return None
        return int(global_arrays.fetch(self.cache.lengths).max())

    def begins(self, text: Int[np.ndarray, "T"], common: int) -> bool:
        """Whether the target can go on after the first `common` tokens, which a text shares.

        A state cannot be shortened: it must be that of a text with which the other one begins.
        """
        return self.state_length in (None, min(common, len(text) - 1))

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.row))


class PrefixStore:
    """Prefixes on the device and in host memory, each bounded; least recently used ones leave.

    A prefix that leaves the device goes to host memory, and one that leaves host memory is dropped.
    A hit in host memory returns the prefix to the device.

    Attributes:
      entry_bytes: bytes of one entry on the device.
      max_entries: on the device; 0: nothing is stored.
      max_host_bytes: 0: nothing is stored in host memory.
      min_shared: common tokens; prefixes that share fewer are not reused.
      recomputed: number of common tokens that are computed again. A model with sliding windows goes
        on from the last `RING_SPARE` tokens of a text that is longer than its rings.
      lookups, hits: prompts that were looked up, and those that shared enough tokens.
      host_hits: the hits of prefixes that were in host memory.
      reused_tokens: prompt tokens of all hits whose keys and values were stored.
    """

    def __init__(
        self,
        max_bytes: int,
        entry_bytes: int,
        min_shared: int,
        max_host_bytes: int = 0,
        row_shapes: Any = None,
        recomputed: int = 1,
    ):
        """Starts an empty store.

        Args:
          max_bytes, entry_bytes: bytes of all entries on the device, and of one.
          min_shared: common tokens; prefixes that share fewer are not reused, and shorter ones not
            stored.
          max_host_bytes: bytes of all entries in host memory.
          row_shapes: shapes and shardings of the arrays on the device, if max_host_bytes is not 0.
          recomputed: the most common tokens that are computed again.
        """
        self.recomputed = recomputed
        self.entry_bytes, self.max_entries = entry_bytes, max_bytes // entry_bytes
        self.max_host_bytes, self._row_shapes = max_host_bytes, row_shapes
        self.min_shared = min_shared
        self.clear()

    def clear(self) -> None:
        """Drops all entries and counts."""
        self._entries: list[Prefix] = []  # least recently used first; so those on the host are
        self.lookups = self.hits = self.host_hits = self.reused_tokens = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the entries on the device."""
        return len(self._on_device()) * self.entry_bytes

    @property
    def num_host_bytes(self) -> int:
        """The bytes of the entries in host memory."""
        return sum(entry.num_bytes for entry in self._entries if entry.on_host)

    def copy_longest(self, tokens: Int[np.ndarray, "T"]) -> tuple[tuple[KVCache, Any] | None, int]:
        """Returns a copy of the arrays that share the most first tokens, and their number.

        It is below that of a prompt, because the hidden state of the last token gives the first
        new one. (None, 0) if none shares enough.
        """
        if not self.max_entries:
            return None, 0
        self.lookups += 1
        best, common = self._longest(tokens)
        if best is None:
            return None, 0
        common = min(common, len(tokens) - 1)
        self.hits += 1
        self.host_hits += best.on_host
        self.reused_tokens += common
        return jax.tree.map(jnp.copy, self._use(best).row), common

    def match(self, tokens: Int[np.ndarray, "T"]) -> int:
        """Returns how many first tokens a text shares with an entry; 0 if too few."""
        return self._longest(tokens)[1]

    def _longest(self, tokens: Int[np.ndarray, "T"]) -> tuple[Prefix | None, int]:
        """Returns the entry that shares the most tokens, of several the most recently used."""
        best, common = None, self.min_shared - 1
        for entry in reversed(self._entries):
            count = common_prefix(entry.tokens, tokens)
            if count <= common or not entry.begins(tokens, count):
                continue
            if entry.holds(count - self.recomputed):
                best, common = entry, count
        return (None, 0) if best is None else (best, common)

    def add(self, prefix: Prefix) -> tuple[KVCache, Any] | None:
        """Stores a prefix; returns arrays on the device that it has no more use for, or None.

        A prefix of another entry is not stored, and replaces those that are its own prefixes. Nor
        are states after a stop string, which have tokens after it that no text begins with.
        """
        if not self.max_entries or len(prefix.tokens) < self.min_shared:
            return prefix.row
        if prefix.state_length not in (None, len(prefix.tokens)):
            return prefix.row
        for entry in self._entries:
            if common_prefix(entry.tokens, prefix.tokens) == len(prefix.tokens):
                self._use(entry)
                return prefix.row
        covered = [
            e for e in self._entries if common_prefix(e.tokens, prefix.tokens) == len(e.tokens)
        ]
        for entry in covered:
            self._entries.remove(entry)
        unused = next((entry.row for entry in covered if not entry.on_host), None)
        unused = unused or self._make_room()
        self._entries.append(prefix)
        return unused

    def _use(self, prefix: Prefix) -> Prefix:
        """Makes an entry the most recently used one; returns it on the device."""
        self._entries.remove(prefix)
        if prefix.on_host:
            self._make_room()
            prefix = to_device(prefix, self._row_shapes)
        self._entries.append(prefix)
        return prefix

    def _on_device(self) -> list[Prefix]:
        return [entry for entry in self._entries if not entry.on_host]

    def _make_room(self) -> tuple[KVCache, Any] | None:
        """Makes room for one entry on the device; returns the arrays of the one that left."""
        on_device = self._on_device()
        if len(on_device) < self.max_entries:
            return None
        oldest = on_device[0]
        index = self._entries.index(oldest)
        self._entries[index : index + 1] = [to_host(oldest)] if self.max_host_bytes else []
        while self.num_host_bytes > self.max_host_bytes:
            del self._entries[0]
        return oldest.row


def to_host(prefix: Prefix) -> Prefix:
    """Returns a copy of a prefix in host memory, whose caches have the slots of its text only."""
    length = len(prefix.tokens)

    def cut(x):
        if not isinstance(x, KVCache):
            return x
        k, v = jax.tree.map(lambda slots: slots[:, :, :length], (x.k, x.v))
        return dataclasses.replace(x, k=k, v=v)

    fetched = global_arrays.fetch(prefix.row)
    cut_row = jax.tree.map(cut, fetched, is_leaf=lambda x: isinstance(x, KVCache))
    # Copies: what is fetched from a CPU device are views of buffers that programs will overwrite.
    cache, drafter_state = jax.tree.map(np.array, cut_row)
    return Prefix(prefix.tokens, cache, drafter_state, on_host=True)


def to_device(prefix: Prefix, row_shapes: Any) -> Prefix:
    """Returns a copy of a prefix of `to_host` on the device; zeros follow the text.

    Args:
      prefix: in host memory.
      row_shapes: shapes and shardings of the arrays on the device.
    """

    def put(x, shape):
        whole = np.zeros(shape.shape, shape.dtype)
        whole[tuple(map(slice, x.shape))] = x
        return global_arrays.put(whole, shape.sharding)

    return Prefix(prefix.tokens, *jax.tree.map(put, prefix.row, row_shapes))


def make_store(setup: EngineSetup) -> PrefixStore:
    """Returns the empty store of an engine.

    Raises:
      ValueError: fewer bytes of host memory than the longest prefix has.
      OutOfMemoryError: more bytes than host memory has.
    """
    config, entry_bytes = setup.config, sum(setup.row.kv_bytes)
    entries, rule = num_prefixes(setup.row, config), setup.prefill_rule
    recomputed = max(1, rule.window, rule.overlap)
    # A shorter prefix saves no step of prefill.
    min_shared = setup.row.settings.chunk
    if not config.host_prefix_bytes:
        return PrefixStore(entries * entry_bytes, entry_bytes, min_shared, recomputed=recomputed)
    shapes = _with_shardings(setup)
    _check_host_bytes(config.host_prefix_bytes, shapes)
    return PrefixStore(
        entries * entry_bytes, entry_bytes, min_shared, config.host_prefix_bytes, shapes, recomputed
    )


def _with_shardings(setup: EngineSetup) -> Any:
    """Returns the shapes of a row's arrays with their shardings, on one device as well."""
    one_device = setup.row.rows.limits.sharding
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one_device),
        setup.row_shapes,
    )


def _check_host_bytes(max_bytes: int, shapes: Any) -> None:
    """Raises ValueError or OutOfMemoryError; see `make_store`."""
    longest = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    if max_bytes < longest:
        raise ValueError(
            f"host_prefix_bytes={max_bytes}: the longest prefix has {longest} bytes; use at least "
            "as many, or 0 to store none in host memory"
        )
    free = offloading.free_host_memory()
    if free is not None and max_bytes > free:
        raise OutOfMemoryError(
            f"host_prefix_bytes={max_bytes}: {free} bytes of host memory are free: use fewer"
        )
