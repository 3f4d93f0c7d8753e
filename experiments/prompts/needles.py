"""RULER's tasks of finding and following: assignments hidden in a haystack.

The embedded models know nothing but Python's source. So what is hidden are assignments, and a
question is a comment and the beginning of its answer, for the model to go on.

Every task takes (tokenizer, haystack, length, seed, row) and returns a prompt of exactly `length`
tokens, always the same for the same arguments. Filler gives way to reach the length, never the
question or what it asks for.
"""

import dataclasses
from typing import Any

import numpy as np

from experiments.prompts.haystack import Haystack, fresh, hide, room_beside
from experiments.prompts.prompt import Prompt, encode

LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "123456789"
NAME = 5  # letters of a variable
NEEDLE_DIGITS, CHAIN_DIGITS = 7, 5
CHAINS, HOPS = 2, 4  # one chain is asked for; a hop is an assignment from the variable before


@dataclasses.dataclass(frozen=True)
class Needles:
    """How many variables are assigned to, how often each, and of how many the values are asked."""

    names: int = 1
    values: int = 1
    asked: int = 1


NEEDLES = {
    "needle": Needles(),
    "needle_multikey": Needles(names=4),
    "needle_multivalue": Needles(values=4),
    "needle_multiquery": Needles(names=4, asked=4),
}


def needle(
    kind: str, tokenizer: Any, haystack: Haystack, length: int, seed: int, row: int
) -> Prompt:
    """Returns a prompt that asks for the values of assignments at random places (RULER, §3).

    Raises:
      TooShortError: there is no room for the assignments and the question.
    """
    rng, how = np.random.default_rng([seed, row]), NEEDLES[kind]
    names = fresh(rng, tokenizer, LETTERS, NAME, how.names, haystack.text)
    count = how.names * how.values
    values = fresh(rng, tokenizer, DIGITS, NEEDLE_DIGITS, count, haystack.text)
    lines = [f"\n{name} = {value}\n" for name, value in zip(names * how.values, values)]
    hidden = [encode(tokenizer, lines[i]) for i in rng.permutation(count)]
    chosen = names[: how.asked]
    answer = tuple(value for name, value in zip(names * how.values, values) if name in chosen)
    asked = encode(tokenizer, _question(chosen, len(answer)))
    room = room_beside(length, *hidden, asked)
    return Prompt(hide(haystack, room, rng, hidden, asked), answer)


def _question(names: list[str], values: int) -> str:
    """Returns what asks for the values of the names, and begins the answer."""
    if values == 1:
        return f"\n# The value of {names[0]}, which was assigned above:\n{names[0]} ="
    if len(names) == 1:
        return f"\n# All {values} values that were assigned to {names[0]} above:\nvalues = ["
    return f"\n# The values of {', '.join(names)}, which were assigned above:\nvalues = ["


def variable_tracking(
    tokenizer: Any, haystack: Haystack, length: int, seed: int, row: int
) -> Prompt:
    """Returns a prompt that asks which variables hold a value, handed on in a chain (RULER, §3).

    `A = 12345`, `B = A`, `C = B`, ... lie in this order at random places, among them another chain
    with another value.

    Raises:
      TooShortError: there is no room for the assignments and the question.
    """
    rng, text = np.random.default_rng([seed, row]), haystack.text
    drawn = fresh(rng, tokenizer, LETTERS, NAME, CHAINS * (HOPS + 1), text)
    names = np.reshape(drawn, (CHAINS, -1)).tolist()
    values = fresh(rng, tokenizer, DIGITS, CHAIN_DIGITS, CHAINS, text)
    chains = [
        [f"{name} = {source}" for name, source in zip(chain, [value, *chain])]
        for chain, value in zip(names, values)
    ]
    turns = rng.permutation(np.repeat(np.arange(CHAINS), HOPS + 1))
    hidden = [encode(tokenizer, f"\n{chains[turn].pop(0)}\n") for turn in turns]
    question = f"\n# All variables above whose value is {values[0]}:\nvariables = ["
    asked = encode(tokenizer, question)
    room = room_beside(length, *hidden, asked)
    return Prompt(hide(haystack, room, rng, hidden, asked), tuple(names[0]))
