"""Synthetic long-context tasks whose right answer is known, in the manner of RULER.

RULER (arXiv 2404.06654) hides what a question asks for in a long text of no interest. The embedded
models know nothing but Python's source, so here what is hidden are assignments, the text around
them is source too, from held-out modules, and a question is a comment and the beginning of its
answer, for the model to go on. Real source is a better haystack than generated lines, which repeat
themselves: drafts would be flattered. Only `common_words` has no haystack: its text is the list.

Every task takes (tokenizer, stream, context, seed, row) and returns a prompt of exactly `context`
tokens, always the same for the same arguments. `stream` is `prompts.held_out_stream`. Filler gives
way to reach the length, never the question or what it asks for.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "123456789"
NAME = 5  # letters of a variable
NEEDLE_DIGITS, CHAIN_DIGITS = 7, 5
CHAINS, HOPS = 2, 4  # one chain is asked for; a hop is an assignment from the variable before
COMMON, TIMES = 10, 30  # so many words, each so many times
RARE_TIMES = TIMES // 3  # the most that any other word occurs


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt and the right answer to its question.

    Attributes:
      tokens: int32 [T].
      answer: every text that a right answer holds, in any order; none if nothing is asked.
    """

    tokens: Int[np.ndarray, "T"]
    answer: tuple[str, ...] = ()


def needle(tokenizer: Any, stream: np.ndarray, context: int, seed: int, row: int) -> Prompt:
    """Returns a prompt that asks for the value of one assignment at a random place (RULER, §3).

    Raises:
      ValueError: the context is too short for the assignment and the question.
    """
    rng = np.random.default_rng([seed, row])
    text = tokenizer.decode(stream)
    (name,) = _fresh(rng, LETTERS, NAME, 1, text)
    (value,) = _fresh(rng, DIGITS, NEEDLE_DIGITS, 1, text)
    question = f"\n# The value of {name}, which was assigned above:\n{name} ="
    hidden = [_encode(tokenizer, f"\n{name} = {value}\n")]
    asked = _encode(tokenizer, question)
    room = _room(context, "needle", *hidden, asked)
    return Prompt(_hide(tokenizer, stream, room, rng, hidden, asked), (value,))


def variable_tracking(
    tokenizer: Any, stream: np.ndarray, context: int, seed: int, row: int
) -> Prompt:
    """Returns a prompt that asks which variables hold a value, handed on in a chain (RULER, §3).

    `A = 12345`, `B = A`, `C = B`, ... lie in this order at random places, among them another chain
    with another value.

    Raises:
      ValueError: the context is too short for the assignments and the question.
    """
    rng = np.random.default_rng([seed, row])
    text = tokenizer.decode(stream)
    names = np.reshape(_fresh(rng, LETTERS, NAME, CHAINS * (HOPS + 1), text), (CHAINS, -1))
    values = _fresh(rng, DIGITS, CHAIN_DIGITS, CHAINS, text)
    chains = [
        [f"{name} = {source}" for name, source in zip(chain, [value, *chain])]
        for chain, value in zip(names.tolist(), values)
    ]
    turns = rng.permutation(np.repeat(np.arange(CHAINS), HOPS + 1))
    hidden = [_encode(tokenizer, f"\n{chains[turn].pop(0)}\n") for turn in turns]
    question = f"\n# All variables above whose value is {values[0]}:\nvariables = ["
    asked = _encode(tokenizer, question)
    room = _room(context, "variable_tracking", *hidden, asked)
    tokens = _hide(tokenizer, stream, room, rng, hidden, asked)
    return Prompt(tokens, tuple(names[0].tolist()))


def common_words(tokenizer: Any, stream: np.ndarray, context: int, seed: int, row: int) -> Prompt:
    """Returns a prompt that asks for the words most frequent in a long list (RULER, §3).

    The words are from the held-out modules. `COMMON` of them occur `TIMES` times, like RULER's, and
    the others, which are the filler, at most `RARE_TIMES`.

    Raises:
      ValueError: the context is too short for the common words and the question, or so long that
        the other words would occur too often.
    """
    rng = np.random.default_rng([seed, row])
    text = tokenizer.decode(stream, skip_special_tokens=True)
    words = rng.permutation(sorted(set(re.findall(r"\b[a-z]{4,}\b", text)))).tolist()
    common, others = words[:COMMON], words[COMMON:]
    start = _encode(tokenizer, 'words = """\n')
    end = _encode(tokenizer, f'""".split()\n# The {COMMON} most common of these words:\ncommon = [')
    line = functools.cache(lambda word: _encode(tokenizer, f"{word}\n"))
    entries = [line(word) for word in common] * TIMES
    room = _room(context, "common_words", start, end, *entries)
    for word in others * RARE_TIMES:
        if len(line(word)) >= room:
            break
        room -= len(line(word))
        entries.append(line(word))
    else:
        raise ValueError(
            f"context={context} is too long for common_words: the held-out text has {len(words)} "
            f"words, and at most {RARE_TIMES} of each fill {context - room} tokens; choose a "
            "context of at most that"
        )
    listed = [entries[i] for i in rng.permutation(len(entries))]
    # The first word of the list is cut to what is left: a part of it is a rare word too.
    tokens = np.concatenate([start, line(word)[-room:], *listed, end])
    return Prompt(tokens.astype(np.int32), tuple(common))


TASKS = {"needle": needle, "variable_tracking": variable_tracking, "common_words": common_words}


def _hide(
    tokenizer: Any,
    stream: np.ndarray,
    room: int,
    rng: np.random.Generator,
    hidden: Sequence[list[int]],
    asked: list[int],
) -> np.ndarray:
    """Returns int32 tokens: a stretch of the stream with lines hidden in it, and the question.

    The stretch has `room` tokens, and goes on at the stream's start where that ends. The lines keep
    their order, and lie at random line breaks of the stretch or at its ends.
    """
    filler = np.take(stream, rng.integers(len(stream)) + np.arange(room), mode="wrap")
    breaks = [t for t in np.unique(filler) if tokenizer.decode([t]).startswith("\n")]
    places = np.concatenate([[0], np.flatnonzero(np.isin(filler, breaks)), [room]])
    chosen = np.sort(rng.choice(places, len(hidden), replace=len(places) < len(hidden)))
    head, *rest = np.split(filler, chosen)
    parts = [part for pair in zip(hidden, rest, strict=True) for part in pair]
    return np.concatenate([head, *parts, asked]).astype(np.int32)


def _room(context: int, task: str, *needed: list[int]) -> int:
    """Returns how many tokens of filler a prompt has beside the needed ones, at least 1.

    Raises:
      ValueError: there is no room for any.
    """
    length = sum(map(len, needed))
    if context <= length:
        raise ValueError(
            f"context={context} is too short for {task}: what it asks for and the question take "
            f"{length} tokens, and there must be text around them; choose a context of at least "
            f"{length + 1}"
        )
    return context - length


def _fresh(
    rng: np.random.Generator, alphabet: str, length: int, count: int, text: str
) -> list[str]:
    """Returns random words of one length, no two the same, none to be found in the text."""
    found: list[str] = []
    while len(found) < count:
        word = "".join(rng.choice(list(alphabet), length))
        if word not in text and word not in found:
            found.append(word)
    return found


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
