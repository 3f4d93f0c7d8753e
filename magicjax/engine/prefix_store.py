"""Texts whose keys and values are kept, so that later prompts prefill only what differs.

A new prompt starts from a copy of the entry that shares the most tokens with its beginning. All
entries have the shapes of one row, so copying compiles nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from magicjax.engine.templates import Templates
from magicjax.kv_cache.full_cache import KVCache

DEFAULT_ENTRIES = 4


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The keys and values of a text.

    Attributes:
      tokens: int32 [T], of the text.
      cache: the target's, of one row.
      drafter_state: the drafter's, of one row, after the text.
    """

    tokens: Int[np.ndarray, "T"]
    cache: KVCache
    drafter_state: Any

    @property
    def row(self) -> tuple[KVCache, Any]:
        """The arrays, which can be donated to a program once the prefix is not stored."""
        return self.cache, self.drafter_state


class PrefixStore:
    """A bounded number of prefixes; the least recently used one is evicted.

    Attributes:
      entry_bytes: of one entry.
      max_entries: 0: nothing is stored.
      lookups, hits: prompts that were looked up, and those that shared enough tokens.
      reused_tokens: of all hits.
    """

    def __init__(self, max_bytes: int, entry_bytes: int, at_least: int):
        """Starts an empty store; prefixes of fewer than `at_least` common tokens are not reused."""
        self.entry_bytes = entry_bytes
        self.lookups = self.hits = self.reused_tokens = 0
        self.max_entries, self._at_least = max_bytes // entry_bytes, at_least
        self._entries: list[Prefix] = []  # least recently used first

    @property
    def num_bytes(self) -> int:
        """The bytes of all entries."""
        return len(self._entries) * self.entry_bytes

    def copy_longest(self, tokens: Int[np.ndarray, "T"]) -> tuple[tuple[KVCache, Any] | None, int]:
        """Returns a copy of the arrays that share the most first tokens, and their number.

        (None, 0) if none shares enough.
        """
        if not self.max_entries:
            return None, 0
        self.lookups += 1
        best, common = self._longest(tokens)
        if best is None:
            return None, 0
        self._use(best)
        self.hits += 1
        self.reused_tokens += common
        return jax.tree.map(jnp.copy, best.row), common

    def is_worth_waiting(
        self, tokens: Int[np.ndarray, "T"], others: Sequence[Int[np.ndarray, "U"]]
    ) -> bool:
        """Returns whether one of the prompts, once it is stored, shares more than all entries."""
        if not self.max_entries:
            return False
        stored = max(self._at_least - 1, self._longest(tokens)[1])
        return any(common_prefix(other, tokens) > stored for other in others)

    def _longest(self, tokens: Int[np.ndarray, "T"]) -> tuple[Prefix | None, int]:
        best, common = None, self._at_least - 1
        for entry in self._entries:
            if (count := common_prefix(entry.tokens, tokens)) > common:
                best, common = entry, count
        return (None, 0) if best is None else (best, common)

    def add(self, prefix: Prefix) -> Prefix | None:
        """Stores a prefix; returns one that is not stored, whose buffers are free, or None.

        A prefix of another entry is not stored, and replaces those that are its own prefixes.
        """
        if not self.max_entries:
            return prefix
        for entry in self._entries:
            if common_prefix(entry.tokens, prefix.tokens) == len(prefix.tokens):
                self._use(entry)
                return prefix
        covered = [
            e for e in self._entries if common_prefix(e.tokens, prefix.tokens) == len(e.tokens)
        ]
        for entry in covered:
            self._remove(entry)
        if len(self._entries) == self.max_entries:
            covered.append(self._entries.pop(0))
        self._entries.append(prefix)
        return covered[0] if covered else None

    def clear(self) -> None:
        """Drops all entries and counts."""
        self._entries = []
        self.lookups = self.hits = self.reused_tokens = 0

    def _use(self, prefix: Prefix) -> None:
        self._remove(prefix)
        self._entries.append(prefix)

    def _remove(self, prefix: Prefix) -> None:
        self._entries = [entry for entry in self._entries if entry is not prefix]


def make_store(templates: Templates, max_bytes: int | None) -> PrefixStore:
    """Returns the store of an engine; None: four slots' worth of bytes, if prompts can be reused.

    Raises:
      ValueError: fewer bytes than a prompt has, or prompts that must be prefilled whole.
    """
    whole, entry_bytes = templates.needs_whole_prompt, sum(templates.row.kv_bytes)
    if max_bytes is None:
        max_bytes = 0 if whole else DEFAULT_ENTRIES * entry_bytes
    if max_bytes and whole:
        raise ValueError(
            f"prefix_bytes={max_bytes}: the drafter's policy reads the attention of all prompt "
            "tokens, so each prompt is prefilled whole: omit prefix_bytes, or use another policy, "
            "such as streaming or snapkv"
        )
    if max_bytes < 0 or 0 < max_bytes < entry_bytes:
        raise ValueError(
            f"prefix_bytes={max_bytes}: one prefix has {entry_bytes} bytes, those of a slot; use "
            "at least as many, or 0 to keep none"
        )
    # A shorter prefix saves no step of prefill.
    return PrefixStore(max_bytes, entry_bytes, templates.row.settings.chunk)


def common_prefix(a: Int[np.ndarray, "T"], b: Int[np.ndarray, "U"]) -> int:
    """Returns the number of equal tokens before the first difference."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if differing.size else length
