"""Stored keys and values of texts, so that later prompts prefill only what differs.

A new prompt starts from a copy of the entry that shares the most tokens with its beginning. The
most recently used entries are on the device and the others in host memory. All entries on the
device have the shapes of one row, so copying compiles nothing. States cannot be shortened: an entry
keeps a few from within its text, and a prompt starts from the longest one that it begins with.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from magicjax.decoding.memory import OutOfMemoryError
from magicjax.engine.memory_check import entry_bytes, num_prefixes, snapshot_bytes
from magicjax.engine.scheduler import SNAPSHOTS, PrefillRule, common_prefix
from magicjax.engine.setup import EngineSetup
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.state_layers import LayerState
from magicjax.model import RING_SPARE
from magicjax.parallel import offloading
from sharding import global_arrays

States = tuple[LayerState | None, ...]  # of the layers, as in `KVCache`
_BY_TOKEN = PrefillRule(chunk=1, largest=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The keys and values of a text.

    Attributes:
      tokens: int32 [T], of the text.
      cache: the target's, of one row.
      drafter_state: the drafter's, of one row, after the text.
      snapshots: the target's states after so many first tokens of the text, fewer than T; the
        newest `SNAPSHOTS`. Several prefixes can share them.
      on_host: whether the arrays are NumPy arrays, and the caches have T slots.
    """

    tokens: Int[np.ndarray, "T"]
    cache: KVCache
    drafter_state: Any
    snapshots: dict[int, States] = dataclasses.field(default_factory=dict)
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
            slots = min(k.shape[2] for k, window in layers if window is not None and k is not None)
            if length > slots and length - count > RING_SPARE:
                return False
        return True

    @property
    def state_length(self) -> int | None:
        """The tokens in the target's states; None without states."""
        if not self.cache.states:
            return None
        return int(global_arrays.fetch(self.cache.lengths).max())

    def from_state(self, length: int) -> tuple[KVCache, Any]:
        """Returns the row with the states after `length` tokens, kept ones or those at its end."""
        states = self.snapshots.get(length, self.cache.states)
        return dataclasses.replace(self.cache, states=states), self.drafter_state

    def with_snapshots(self, others: dict[int, States]) -> "Prefix":
        """Returns the prefix with the newest of its own and other states of its text."""
        snapshots = {n: x for n, x in (self.snapshots | others).items() if n < len(self.tokens)}
        newest = sorted(snapshots)[-SNAPSHOTS:]
        return dataclasses.replace(self, snapshots={n: snapshots[n] for n in newest})

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.row, self.snapshots)))


class PrefixStore:
    """Prefixes on the device and in host memory, each bounded; least recently used ones leave.

    A prefix that leaves the device goes to host memory, and one that leaves host memory is dropped.
    A hit in host memory returns the prefix to the device.

    Attributes:
      entry_bytes: bytes of one entry on the device.
      max_entries: on the device; 0: nothing is stored.
      max_host_bytes: 0: nothing is stored in host memory.
      min_shared: common tokens; prefixes that share fewer are not reused.
      rule: says which common tokens are computed again. A model with sliding windows goes on from
        the last `RING_SPARE` tokens of a text that is longer than its rings.
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
        rule: PrefillRule = _BY_TOKEN,
    ):
        """Starts an empty store.

        Args:
          max_bytes, entry_bytes: bytes of all entries on the device, and of one.
          min_shared: common tokens; prefixes that share fewer are not reused, and shorter ones not
            stored.
          max_host_bytes: bytes of all entries in host memory.
          row_shapes: shapes and shardings of the arrays on the device, if max_host_bytes is not 0.
          rule: how prompts are prefilled.
        """
        self.rule = rule
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
        """The bytes for the entries on the device, whether or not they have all states."""
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
        best, reused = self._longest_match(tokens)
        if best is None:
            return None, 0
        reused = min(reused, len(tokens) - 1)
        self.hits += 1
        self.host_hits += best.on_host
        self.reused_tokens += reused
        best = self._touch(best)
        row = best.row if not best.cache.states else best.from_state(self.rule.first(reused))
        return jax.tree.map(jnp.copy, row), reused

    def match(self, tokens: Int[np.ndarray, "T"]) -> int:
        """Returns how many first tokens a text has from an entry; 0 if too few."""
        return self._longest_match(tokens)[1]

    def shared(self, tokens: Int[np.ndarray, "T"]) -> int:
        """Returns the most first tokens that a text shares with an entry, reusable or not."""
        return max((common_prefix(entry.tokens, tokens) for entry in self._entries), default=0)

    def _longest_match(self, tokens: Int[np.ndarray, "T"]) -> tuple[Prefix | None, int]:
        """Returns the entry that gives a text the most tokens, and how many.

        Of several, it is the most recently used one.
        """
        best, most = None, self.min_shared - 1
        for entry in reversed(self._entries):
            shared = common_prefix(entry.tokens, tokens)
            if shared > most and (count := self._num_reusable(entry, len(tokens), shared)) > most:
                best, most = entry, count
        return (None, 0) if best is None else (best, most)

    def _num_reusable(self, entry: Prefix, length: int, shared: int) -> int:
        """Returns how many of the tokens that a text of a length shares with an entry it gives."""
        if not entry.cache.states:
            recomputed = max(1, self.rule.window, self.rule.overlap)
            return shared if entry.holds(shared - recomputed) else 0
        states = *entry.snapshots, len(entry.tokens)  # since `add`
        return self.rule.cached_by_states(length, shared, states)

    def add(self, prefix: Prefix) -> tuple[KVCache, Any] | None:
        """Stores a prefix; returns arrays on the device that it has no more use for, or None.

        A prefix of another entry is not stored, and replaces those that are its own prefixes. The
        entry that remains has the states of both. States after a stop string are not stored: they
        have tokens after it that no text begins with.
        """
        if not self.max_entries or len(prefix.tokens) < self.min_shared:
            return prefix.row
        if prefix.state_length not in (None, len(prefix.tokens)):
            return prefix.row
        for entry in self._entries:
            if common_prefix(entry.tokens, prefix.tokens) == len(prefix.tokens):
                self._entries[-1] = self._touch(entry).with_snapshots(prefix.snapshots)
                return prefix.row
        own_prefixes = [
            e for e in self._entries if common_prefix(e.tokens, prefix.tokens) == len(e.tokens)
        ]
        for entry in own_prefixes:
            self._entries.remove(entry)
            prefix = prefix.with_snapshots(self._copied_states(entry))
        buffers = next((entry.row for entry in own_prefixes if not entry.on_host), None)
        buffers = buffers or self._make_room()
        self._entries.append(prefix)
        return buffers

    def _copied_states(self, prefix: Prefix) -> dict[int, States]:
        """Returns copies on the device of all states of a prefix, if it has any."""
        if not prefix.cache.states:
            return {}
        if prefix.on_host:
            put = functools.partial(_put_states, row_shapes=self._row_shapes)
            all_states = prefix.snapshots | {len(prefix.tokens): prefix.cache.states}
            return {length: put(states) for length, states in all_states.items()}
        final_states = jax.tree.map(jnp.copy, prefix.cache.states)  # the row may be donated
        return prefix.snapshots | {len(prefix.tokens): final_states}

    def _touch(self, prefix: Prefix) -> Prefix:
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

    def truncate(x):
        if not isinstance(x, KVCache):
            return x
        k, v = jax.tree.map(lambda slots: slots[:, :, :length], (x.k, x.v))
        return dataclasses.replace(x, k=k, v=v)

    fetched, snapshots = global_arrays.fetch((prefix.row, prefix.snapshots))
    truncated_row = jax.tree.map(truncate, fetched, is_leaf=lambda x: isinstance(x, KVCache))
    # Copies: what is fetched from a CPU device are views of buffers that programs will overwrite.
    (cache, drafter_state), snapshots = jax.tree.map(np.array, (truncated_row, snapshots))
    return Prefix(prefix.tokens, cache, drafter_state, snapshots, on_host=True)


def to_device(prefix: Prefix, row_shapes: Any) -> Prefix:
    """Returns a copy of a prefix of `to_host` on the device; zeros follow the text.

    Args:
      prefix: in host memory.
      row_shapes: shapes and shardings of the arrays on the device.
    """
    snapshots = {n: _put_states(states, row_shapes) for n, states in prefix.snapshots.items()}
    cache, drafter_state = jax.tree.map(_put, prefix.row, row_shapes)
    return Prefix(prefix.tokens, cache, drafter_state, snapshots)


def _put(x: np.ndarray, shape: Any) -> jax.Array:
    """Returns an array of a shape and sharding, with zeros after `x`."""
    padded = np.zeros(shape.shape, shape.dtype)
    padded[tuple(map(slice, x.shape))] = x
    return global_arrays.put(padded, shape.sharding)


def _put_states(states: States, row_shapes: Any) -> States:
    return jax.tree.map(_put, states, row_shapes[0].states)


def make_store(setup: EngineSetup) -> PrefixStore:
    """Returns the empty store of an engine.

    Raises:
      ValueError: fewer bytes of host memory than the longest prefix has.
      OutOfMemoryError: more bytes than host memory has.
    """
    config, row, rule = setup.config, setup.row, setup.prefill_rule
    size = entry_bytes(row)
    # A shorter prefix saves no step of prefill.
    sizes = num_prefixes(row, config) * size, size, row.settings.chunk
    if not config.host_prefix_bytes:
        return PrefixStore(*sizes, rule=rule)
    shapes = _with_shardings(setup)
    _check_host_bytes(config.host_prefix_bytes, shapes, snapshot_bytes(row))
    return PrefixStore(*sizes, config.host_prefix_bytes, shapes, rule)


def _with_shardings(setup: EngineSetup) -> Any:
    """Returns the shapes of a row's arrays with their shardings, on one device as well."""
    default_sharding = setup.row.rows.limits.sharding
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or default_sharding),
        setup.row_shapes,
    )


def _check_host_bytes(max_bytes: int, shapes: Any, snapshots: int) -> None:
    """Raises ValueError or OutOfMemoryError; see `make_store`."""
    longest = snapshots + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
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
