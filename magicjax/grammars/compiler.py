"""Token automata: the tokens that a grammar allows after a text, as compact tables."""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Int

from magicjax.grammars.grammar import ByteAutomaton, Grammar, byte_automaton
from magicjax.grammars.vocabulary import Vocabulary, vocabulary_of

BLOCK = 128  # states whose tokens are walked at once: bounds the memory


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens; state 0 is the first one.

    Tokens that lead to the same states everywhere are one class: 49,152 tokens have about 150
    classes under a JSON schema.

    Attributes:
      next: int32 [S, C], the state after a token of each class; -1: it is not allowed.
      classes: int32 [V], the class of each token.
    """

    next: Int[np.ndarray, "S C"]
    classes: Int[np.ndarray, "V"]


def compiled(
    grammar: Grammar, tokenizer: Any, eos: tuple[int, ...], vocab_size: int
) -> TokenAutomaton:
    """Returns the automaton of a grammar over the tokens of a model; the newest ones are kept.

    Args:
      grammar: of the text.
      tokenizer: a fast tokenizer of transformers.
      eos: the tokens that end a text, at least one.
      vocab_size: V, of the model; tokens without text are not allowed.

    Raises:
      ValueError: a tokenizer without bytes, or a grammar without a match that its tokens spell.
      ImportError: outlines-core is not installed.
    """
    return _compiled(grammar, tokenizer, eos, vocab_size)


@functools.lru_cache(maxsize=64)
def _compiled(
    grammar: Grammar, tokenizer: Any, eos: tuple[int, ...], vocab_size: int
) -> TokenAutomaton:
    automaton, vocabulary = byte_automaton(grammar), vocabulary_of(tokenizer)
    spelled = (vocabulary.ids < vocab_size) & ~np.isin(vocabulary.ids, eos)
    vocabulary = Vocabulary(
        *(x[spelled] for x in (vocabulary.ids, vocabulary.texts, vocabulary.lengths))
    )
    own, following = _merged(automaton, vocabulary)
    states, count = following.shape
    classes = np.full(vocab_size, count, np.int32)  # of tokens without text
    classes[vocabulary.ids] = own
    classes[list(eos)] = count + 1
    of_eos = np.where(automaton.final, np.arange(states), -1)
    table = np.column_stack([following, np.full(states, -1), of_eos]).astype(np.int32)
    table = _without_dead_ends(table, automaton.final)
    if not (table[0] >= 0).any():
        raise ValueError(f"no text of the tokenizer's tokens matches the grammar {grammar}")
    return TokenAutomaton(table, classes)


def _merged(
    automaton: ByteAutomaton, vocabulary: Vocabulary
) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "S C"]]:
    """Returns (the class of each token, the state after a token of each class)."""
    states, levels = np.arange(len(automaton.next)), _trie(vocabulary)
    classes = np.zeros(len(vocabulary.ids), np.int32)
    for first in range(0, len(states), BLOCK):
        after = _walk(automaton, states[first : first + BLOCK], levels, len(classes))
        rows = np.column_stack([classes, after])
        number: dict[bytes, int] = {}
        found = (number.setdefault(row.tobytes(), len(number)) for row in rows)
        classes = np.fromiter(found, np.int32, len(rows))
    _, example = np.unique(classes, return_index=True)
    few = Vocabulary(*(x[example] for x in (vocabulary.ids, vocabulary.texts, vocabulary.lengths)))
    return classes, _walk(automaton, states, _trie(few), len(example)).T


@dataclasses.dataclass(frozen=True, eq=False)
class _Level:
    """The nodes of a trie of texts at one depth.

    Attributes:
      parent: int [M], the nodes' parents in the level above.
      byte: uint8 [M], the last byte of each node.
      node, token: int [T], nodes that are whole tokens, and these tokens.
    """

    parent: Int[np.ndarray, "M"]
    byte: Int[np.ndarray, "M"]
    node: Int[np.ndarray, "T"]
    token: Int[np.ndarray, "T"]


def _trie(vocabulary: Vocabulary) -> list[_Level]:
    """Returns the levels of the trie of all tokens: each common beginning is walked once."""
    order = np.lexsort([vocabulary.lengths, *vocabulary.texts.T[::-1]])
    texts, lengths = vocabulary.texts[order], vocabulary.lengths[order]
    levels, above = [], np.zeros(len(order), np.int64)
    is_new = np.zeros(len(order), bool)  # whether the text begins otherwise than the one before
    is_new[0] = True
    for depth in range(texts.shape[1]):
        is_new[1:] |= texts[1:, depth] != texts[:-1, depth]
        inside = lengths > depth
        first = is_new.copy()  # also after a text that ends above
        first[1:] |= ~inside[:-1]
        starts = inside & first
        node = np.cumsum(starts) - 1
        ends = lengths == depth + 1
        levels.append(_Level(above[starts], texts[starts, depth], node[ends], order[ends]))
        above = node
    return levels


def _walk(
    automaton: ByteAutomaton, states: Int[np.ndarray, "S"], levels: list[_Level], tokens: int
) -> Int[np.ndarray, "K S"]:
    """Returns the state after each of `tokens` tokens from each state; -1 for none."""
    dead = len(automaton.next)
    following = np.full((dead + 1, 256), dead, np.int32)
    following[:dead] = np.where(automaton.next < 0, dead, automaton.next)
    found = np.empty((tokens, len(states)), np.int32)
    current = states.astype(np.int32)[None]
    for level in levels:
        current = following.ravel().take(current[level.parent] * 256 + level.byte[:, None])
        found[level.token] = current[level.node]
    found[found == dead] = -1
    return found


def _without_dead_ends(table: Int[np.ndarray, "S C"], final: Any) -> Int[np.ndarray, "S C"]:
    """Returns the table without the tokens after which no tokens spell a match."""
    import scipy.sparse  # a slow import that requests without grammars do not need

    states = len(table)
    source, column = np.nonzero(table >= 0)
    # From a node after all final states, backwards.
    start = np.concatenate([table[source, column], np.full(final.sum(), states)])
    end = np.concatenate([source, np.flatnonzero(final)])
    graph = scipy.sparse.coo_array(
        (np.ones(len(start), bool), (start, end)), shape=(states + 1, states + 1)
    )
    reached = scipy.sparse.csgraph.breadth_first_order(
        graph.tocsr(), states, return_predecessors=False
    )
    alive = np.zeros(states + 1, bool)  # the last one for -1
    alive[reached[1:]] = True
    return np.where(alive[table], table, -1)
