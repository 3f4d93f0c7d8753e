"""The byte automaton of JSON objects of bounded nesting.

A state is the stack of open containers and what may follow inside the innermost one. JSON with
unbounded nesting is no regular language.
"""

import collections
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

MAX_DEPTH = 5  # of objects and arrays
LITERALS = ("true", "false", "null")
TAIL = (0x80, 0xBF)  # the bytes after the second one of a character
# The last first byte -> the ranges of the bytes after it (The Unicode Standard, table 3-7).
CHARACTERS = {
    0x7F: (),
    0xC1: None,
    0xDF: (TAIL,),
    0xE0: ((0xA0, 0xBF), TAIL),
    0xEC: (TAIL, TAIL),
    0xED: ((0x80, 0x9F), TAIL),
    0xEF: (TAIL, TAIL),
    0xF0: ((0x90, 0xBF), TAIL, TAIL),
    0xF3: (TAIL, TAIL, TAIL),
    0xF4: ((0x80, 0x8F), TAIL, TAIL),
    0xFF: None,
}
# State of a number -> (class of bytes, next state); those in ENDS may be followed by other text.
NUMBERS = {
    "-": [("0", "zero"), ("123456789", "whole")],
    "zero": [(".", "point"), ("eE", "exponent")],
    "whole": [("0123456789", "whole"), (".", "point"), ("eE", "exponent")],
    "point": [("0123456789", "fraction")],
    "fraction": [("0123456789", "fraction"), ("eE", "exponent")],
    "exponent": [("+-", "sign"), ("0123456789", "power")],
    "sign": [("0123456789", "power")],
    "power": [("0123456789", "power")],
}
ENDS = ("zero", "whole", "fraction", "power")


class State(NamedTuple):
    """A state of the automaton.

    Attributes:
      stack: the open containers, "{" or "[" each.
      expects: what comes next: "object", "value", "first value" (or "]"), "key", "first key"
        (or "}"), "colon", "next" (a comma or a bracket), "end", a state of a number, the rest of a
        literal, or "string" and "key string".
      rest: inside a string, the bytes of the current character or escape sequence: ranges, or
        "escape" or the number of hexadecimal digits.
      spaced: whether a space has just been read; at most one separates two tokens.
    """

    stack: str
    expects: str
    rest: tuple | str | int = ()
    spaced: bool = False


@functools.cache
def json_automaton() -> tuple[Int[np.ndarray, "S 256"], Bool[np.ndarray, "S"]]:
    """Returns (the state after each byte, -1 for none; which states are final); 0 is the first."""
    number = {State("", "object"): 0}
    queue, edges = collections.deque(number), []
    while queue:
        state = queue.popleft()
        for byte in range(256):
            after = _after(state, byte)
            if after is not None:
                if after not in number:
                    number[after] = len(number)
                    queue.append(after)
                edges.append((number[state], byte, number[after]))
    following = np.full((len(number), 256), -1, np.int32)
    states, read, targets = np.array(edges).T
    following[states, read] = targets
    return following, np.array([state.expects == "end" for state in number])


def _after(state: State, byte: int) -> State | None:
    """Returns the state after a byte, or None."""
    stack, expects, _, spaced = state
    if expects in ("string", "key string"):
        return _in_string(state, byte)
    char = chr(byte)
    if expects in NUMBERS:
        for chars, after in NUMBERS[expects]:
            if char in chars:
                return State(stack, after)
        if expects not in ENDS:
            return None
        expects = "next"
    if any(literal.endswith(expects) for literal in LITERALS):
        return State(stack, expects[1:] or "next") if char == expects[0] else None
    if char == " " and expects not in ("object", "end"):
        return None if spaced else State(stack, expects, spaced=True)
    if char == "}" and stack.endswith("{") and expects in ("first key", "next"):
        return _closed(stack)
    if char == "]" and stack.endswith("[") and expects in ("first value", "next"):
        return _closed(stack)
    if expects == "colon":
        return State(stack, "value") if char == ":" else None
    if expects == "next":
        return State(stack, "key" if stack[-1] == "{" else "value") if char == "," else None
    if expects in ("key", "first key"):
        return State(stack, "key string") if char == '"' else None
    if expects in ("value", "first value", "object"):
        return _value(stack, char, expects == "object")
    return None


def _value(stack: str, char: str, only_object: bool) -> State | None:
    """Returns the state after the first byte of a value."""
    if char in "{[" and len(stack) < MAX_DEPTH and (char == "{" or not only_object):
        return State(stack + char, "first key" if char == "{" else "first value")
    if only_object:
        return None
    if char == '"':
        return State(stack, "string")
    if char == "-":
        return State(stack, "-")
    for chars, after in NUMBERS["-"]:
        if char in chars:
            return State(stack, after)
    rests = (literal[1:] for literal in LITERALS if literal[0] == char)
    return next((State(stack, rest) for rest in rests), None)


def _closed(stack: str) -> State:
    return State(stack[:-1], "next" if stack[:-1] else "end")


def _in_string(state: State, byte: int) -> State | None:
    stack, expects, rest, _ = state
    char = chr(byte)
    if rest == "escape":
        if char == "u":
            return State(stack, expects, 4)
        return State(stack, expects) if char in '"\\/bfnrt' else None
    if isinstance(rest, int):
        left = rest - 1
        return State(stack, expects, left or ()) if char in "0123456789abcdefABCDEF" else None
    if isinstance(rest, tuple) and rest:
        (low, high), *later = rest
        return State(stack, expects, tuple(later)) if low <= byte <= high else None
    if char == '"':
        return State(stack, "colon" if expects == "key string" else "next")
    if char == "\\":
        return State(stack, expects, "escape")
    ranges = next(ranges for last, ranges in CHARACTERS.items() if byte <= last)
    return State(stack, expects, ranges) if byte >= 0x20 and ranges is not None else None
