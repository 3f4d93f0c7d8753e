"""The table of transitions of all live grammars, on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from magicjax.grammars.compiler import TokenAutomaton, compiled
from magicjax.grammars.grammar import Grammar
from magicjax.grammars.masking import NOT_ALLOWED, GrammarRows

CLASSES = 256  # of tokens; the unit in which an engine's `grammar_states` are counted
LEAST_ENTRIES = 2**16  # requests with small grammars share programs


@dataclasses.dataclass
class _Range:
    start: int
    users: int = 0


class Arena:
    """A table of fixed size in which grammars have contiguous ranges.

    A range stays until its entries are needed for another grammar and no request uses it; the least
    recently used one leaves first.

    Attributes:
      table: int32 [M], see `magicjax.grammars.masking`. It is replaced and never changed, because
        arrays on a CPU device share its memory.
    """

    def __init__(self, entries: int):
        """Starts a table of M entries without grammars."""
        self.table = np.zeros(entries, np.int32)
        self._ranges: dict[TokenAutomaton, _Range] = {}  # least recently used first

    def acquire(self, automaton: TokenAutomaton) -> int | None:
        """Returns the first state of a grammar for one more request; None: there is no room now."""
        found = self._ranges.pop(automaton, None)
        if found is None:
            start = self._make_room(automaton.next.size)
            if start is None:
                return None
            self.table = self.table.copy()
            self.table[start : start + automaton.next.size] = _entries(automaton, start)
            found = _Range(start)
        found.users += 1
        self._ranges[automaton] = found
        return found.start

    def release(self, automaton: TokenAutomaton) -> None:
        """Ends the use of a grammar by one request."""
        self._ranges[automaton].users -= 1

    def _make_room(self, size: int) -> int | None:
        """Returns where `size` entries are free, if no grammar in use is in the way."""
        while (start := self._gap(size)) is None:
            unused = next((a for a, found in self._ranges.items() if not found.users), None)
            if unused is None:
                return None
            del self._ranges[unused]
        return start

    def _gap(self, size: int) -> int | None:
        taken = sorted((r.start, r.start + a.next.size) for a, r in self._ranges.items())
        start = 1  # after the state of rows without a grammar
        for first, end in [*taken, (len(self.table), 0)]:
            if first - start >= size:
                return start
            start = end
        return None


def _entries(automaton: TokenAutomaton, start: int) -> Int[np.ndarray, "M"]:
    """Returns the entries of a grammar's range that begins at `start`."""
    following = automaton.next
    states = start + following * following.shape[1]
    return np.where(following < 0, NOT_ALLOWED, states).ravel()


def automaton_of(target: Any, grammar: Grammar, eos: Sequence[int]) -> TokenAutomaton:
    """Returns the automaton of a grammar over a model's tokens.

    Args:
      target: a model.
      grammar: a `Grammar`.
      eos: the tokens that end a text.

    Raises:
      ValueError: a model without a tokenizer or EOS, or as `compiled`.
    """
    if target.tokenizer is None:
        raise ValueError(
            f"a grammar requires a tokenizer, and the target {target.name!r} has none: load one "
            "with a tokenizer"
        )
    eos = tuple(token for token in eos if 0 <= token < target.config.vocab_size)
    if not eos:
        raise ValueError(
            f"a grammar ends a text with EOS, and the target {target.name!r} has no EOS token: "
            "pass eos_token_id"
        )
    return compiled(grammar, target.tokenizer, eos, target.config.vocab_size)


def rows_of(
    target: Any, grammars: Sequence[Grammar | None], eos: Sequence[int]
) -> tuple[GrammarRows | None, Int[np.ndarray, "M"] | None]:
    """Returns the grammars of the rows and their table, as numpy arrays; (None, None) without.

    Args:
      target, eos: as for `automaton_of`.
      grammars: of each row; None for any text.

    Raises:
      ValueError: as `automaton_of`.
    """
    if all(grammar is None for grammar in grammars):
        return None, None
    automata = [None if one is None else automaton_of(target, one, eos) for one in grammars]
    entries = 1 + sum(one.next.size for one in {*automata} if one is not None)
    arena = Arena(max(LEAST_ENTRIES, 1 << (entries - 1).bit_length()))
    found = [row_of(one, target.config.vocab_size, arena) for one in automata]
    states, classes = zip(*((one.state, one.classes) for one in found if one), strict=True)
    return GrammarRows(np.concatenate(states), np.concatenate(classes)), arena.table


def row_of(automaton: TokenAutomaton | None, vocab_size: int, arena: Arena) -> GrammarRows | None:
    """Returns one row that begins a text under a grammar; None if the arena has no room now."""
    if automaton is None:
        return GrammarRows(np.zeros(1, np.int32), np.zeros((1, vocab_size), np.int32))
    start = arena.acquire(automaton)
    if start is None:
        return None
    return GrammarRows(np.array([start], np.int32), automaton.classes[None])
