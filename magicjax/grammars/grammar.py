"""Grammars: what a text must match, and their byte automata."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from magicjax.grammars import json_schema
from magicjax.grammars.json_mode import json_automaton

NO_BYTE = 256  # outlines-core's EOS
END_MARKER = 0  # a byte that no text has
MAX_STATES = 2**14  # of a byte automaton
HINTS = {  # by a part of outlines-core's error
    "universal start state": "; omit ^ and $, because the whole text must match",
    "building NFA": ": it has a syntax error, look-around or a backreference",
}


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What a generated text must match; hashable.

    A text ends with EOS where the grammar allows its end. A text that reaches its limit of new
    tokens before is the beginning of a match.

    Attributes:
      name: "regex", "json_schema" or "json_object".
      pattern: the regular expression; "" for "json_object".
    """

    name: str
    pattern: str

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Returns the grammar of the texts that match a regular expression from begin to end.

        The syntax is that of Rust's crate `regex`, without look-around and backreferences.

        Raises:
          TypeError, ValueError: not a string, a syntax error, or an expression without matches.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"pattern has type {type(pattern).__name__}: it must be a string")
        grammar = cls("regex", pattern)
        byte_automaton(grammar)
        return grammar

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """Returns the grammar of the JSON texts that a JSON schema describes.

        All of them are valid. Properties have the order of the schema, others do not occur, and at
        most one space separates tokens of JSON (see `json_schema`). A `pattern` describes a string
        as a whole.

        Args:
          schema: as a mapping, or as JSON text.

        Raises:
          TypeError, ValueError: not a schema, or one with parts that are not supported.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as error:
                raise ValueError(f"the JSON schema is not valid JSON: {error}") from error
        if not isinstance(schema, Mapping):
            raise TypeError(f"schema has type {type(schema).__name__}: pass a dict, or JSON text")
        grammar = cls("json_schema", json_schema.expression(schema))
        try:
            byte_automaton(grammar)
        except ValueError as error:
            reason = str(error).splitlines()[0].strip()
            raise ValueError(f"the JSON schema is not supported: {reason}") from error
        return grammar

    @classmethod
    def json_object(cls) -> "Grammar":
        """Returns the grammar of JSON objects, nested at most `json_mode.MAX_DEPTH` deep."""
        return cls("json_object", "")


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over the bytes of UTF-8 text; state 0 is the first one.

    Attributes:
      next: int32 [S, 256], the state after a byte; -1: no match has this beginning.
      final: bool [S], whether the text may end.
    """

    next: Int[np.ndarray, "S 256"]
    final: Bool[np.ndarray, "S"]


@functools.lru_cache(maxsize=64)
def byte_automaton(grammar: Grammar) -> ByteAutomaton:
    """Returns the automaton of a grammar.

    Raises:
      ValueError: its regular expression has a syntax error, or no matches.
      ImportError: outlines-core is not installed.
    """
    if grammar.name == "json_object":
        return ByteAutomaton(*json_automaton())
    if grammar.name == "regex":
        _index(grammar.pattern)  # with an unmatched parenthesis, the one below may be valid
    # outlines-core omits the bytes that lead from the end of a match to text that is none yet. With
    # an end marker, no state before it is such an end.
    index = _index(f"(?:{grammar.pattern})\\x{END_MARKER:02x}")
    edges, ends = index.get_transitions(), index.get_final_states()
    if len(edges) > MAX_STATES:
        raise ValueError(
            f"the automaton of the grammar has {len(edges)} states, and at most {MAX_STATES} are "
            "supported: use fewer or smaller bounded repetitions"
        )
    number = {index.get_initial_state(): 0}
    for state in edges:
        number.setdefault(state, len(number))
    following = np.full((len(number), 256), -1, np.int32)
    final = np.zeros(len(number), bool)
    for state, after in edges.items():
        final[number[state]] = after.pop(END_MARKER, None) in ends
        after.pop(NO_BYTE, None)
        following[number[state], [*after]] = [number[target] for target in after.values()]
    if not final.any():
        raise ValueError(f"the regular expression {grammar.pattern!r} matches no text")
    return ByteAutomaton(following, final)


def _index(pattern: str) -> Any:
    """Returns outlines-core's automaton over single bytes."""
    outlines = _outlines()
    single_bytes = outlines.Vocabulary(NO_BYTE, {bytes([byte]): [byte] for byte in range(256)})
    try:
        return outlines.Index(pattern, single_bytes)
    except ValueError as error:
        reason = " ".join(str(error).split())
        hint = next((hint for text, hint in HINTS.items() if text in reason), "")
        raise ValueError(f"the regular expression is not supported: {reason}{hint}") from error


def _outlines() -> Any:
    try:
        import outlines_core
    except ImportError as error:
        raise ImportError(
            "grammars require outlines-core: pip install 'magicjax[grammar]'"
        ) from error
    return outlines_core
