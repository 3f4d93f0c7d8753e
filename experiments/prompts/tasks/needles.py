"""RULER's retrieval and tracking tasks: assignments hidden in a haystack.

The bundled models are trained on Python source, so the hidden lines are assignments. The question
is a comment followed by the beginning of its answer, for the model to continue.

Every task is a function (tokenizer, haystack, length, seed, row) -> prompt of exactly `length`
tokens, deterministic in its arguments. Only the filler is cut to reach the length.
"""

import dataclasses
from typing import Any

import numpy as np

from experiments.prompts.prompt import Prompt, encode
from experiments.prompts.tasks.haystack import Haystack, hide, new_words, room_beside

LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "123456789"
NAME = 5  # letters of a variable
NEEDLE_DIGITS, CHAIN_DIGITS = 7, 5
CHAINS, HOPS = 2, 4  # one chain is asked for; a hop assigns the previous variable


@dataclasses.dataclass(frozen=True)
class Needles:
    """Number of variables, of values for each, and of variables that are asked for."""

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
    """Returns a prompt that asks for the values of assignments at random depths (RULER, §3).

    Raises:
      TooShortError: the assignments and the question do not fit.
    """
    rng, counts = np.random.default_rng([seed, row]), NEEDLES[kind]
    names = new_words(rng, tokenizer, LETTERS, NAME, counts.names, haystack.text)
    total = counts.names * counts.values
    values = new_words(rng, tokenizer, DIGITS, NEEDLE_DIGITS, total, haystack.text)
    pairs = list(zip(names * counts.values, values, strict=True))
    lines = [encode(tokenizer, f"\n{name} = {value}\n") for name, value in pairs]
    hidden = [lines[i] for i in rng.permutation(total)]
    asked = names[: counts.asked]
    answer = tuple(value for name, value in pairs if name in asked)
    question = encode(tokenizer, _question(asked, len(answer)))
    room = room_beside(length, *hidden, question)
    return Prompt(hide(haystack, room, rng, hidden, question), answer)


def _question(names: list[str], values: int) -> str:
    """Returns a question for the values of the names, and the beginning of its answer."""
    if values == 1:
        return f"\n# The value of {names[0]}, which was assigned above:\n{names[0]} ="
    if len(names) == 1:
        return f"\n# All {values} values that were assigned to {names[0]} above:\nvalues = ["
    return f"\n# The values of {', '.join(names)}, which were assigned above:\nvalues = ["


def variable_tracking(
    tokenizer: Any, haystack: Haystack, length: int, seed: int, row: int
) -> Prompt:
    """Returns a prompt that asks which variables of a chain hold a value (RULER, §3).

    `A = 12345`, `B = A`, `C = B`, ... are hidden in this order at random depths, interleaved with
    another chain for another value.

    Raises:
      TooShortError: the assignments and the question do not fit.
    """
    rng, text = np.random.default_rng([seed, row]), haystack.text
    drawn = new_words(rng, tokenizer, LETTERS, NAME, CHAINS * (HOPS + 1), text)
    names = np.reshape(drawn, (CHAINS, -1)).tolist()
    values = new_words(rng, tokenizer, DIGITS, CHAIN_DIGITS, CHAINS, text)
    chains = [
        [f"{name} = {source}" for name, source in zip(chain, [value, *chain])]
        for chain, value in zip(names, values)
    ]
    order = rng.permutation(np.repeat(np.arange(CHAINS), HOPS + 1))
    hidden = [encode(tokenizer, f"\n{chains[chain].pop(0)}\n") for chain in order]
    asked = f"\n# All variables above whose value is {values[0]}:\nvariables = ["
    question = encode(tokenizer, asked)
    room = room_beside(length, *hidden, question)
    return Prompt(hide(haystack, room, rng, hidden, question), tuple(names[0]))
