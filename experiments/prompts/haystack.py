"""What RULER's tasks share: a text to hide things in, words that are not in it, and the room left.

RULER (arXiv 2404.06654) hides what a question asks for in a long text of no interest. Real text is
a better haystack than generated lines, which repeat themselves: drafts would be flattered.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from experiments.prompts.prompt import encode

NEAR = 64  # tokens within which a hidden line moves to the next line break
TRIES = 1000  # random words drawn before it is said that the text has them all


class TooShortError(Exception):
    """A prompt is too short for its task; `least` is the length that would do, in tokens."""

    def __init__(self, least: int):
        super().__init__(f"at least {least} tokens")
        self.least = least


@dataclasses.dataclass(frozen=True, eq=False)
class Haystack:
    """A text, and its tokens without any special one.

    Attributes:
      tokens: int32 [n].
      breaks: bool [n], whether a token begins with a line break.
      text: what they say.
    """

    tokens: Int[np.ndarray, "n"]
    breaks: Bool[np.ndarray, "n"]
    text: str


def of_texts(tokenizer: Any, texts: Iterable[str]) -> Haystack:
    """Returns the haystack that the texts make, one behind the other.

    Raises:
      ValueError: there is no text.
    """
    texts = list(texts)
    tokens = np.array([t for text in texts for t in encode(tokenizer, text)], np.int32)
    if not len(tokens):
        raise ValueError("there is no text to hide anything in: give files with text")
    starts = [t for t in np.unique(tokens) if tokenizer.decode([int(t)]).startswith("\n")]
    return Haystack(tokens, np.isin(tokens, starts), "\n".join(texts))


def hide(
    haystack: Haystack,
    room: int,
    rng: np.random.Generator,
    hidden: Sequence[list[int]],
    asked: list[int],
) -> Int[np.ndarray, "T"]:
    """Returns int32 tokens: a stretch of the haystack with lines hidden in it, and the question.

    The stretch has `room` tokens, and goes on at the haystack's start where that ends. The lines
    keep their order, and lie at random depths: at the line break or end that follows, if near.
    """
    at = (rng.integers(len(haystack.tokens)) + np.arange(room)) % len(haystack.tokens)
    places = np.sort(rng.choice(room + 1, len(hidden), replace=room + 1 < len(hidden)))
    breaks = np.append(np.flatnonzero(haystack.breaks[at]), room)
    following = breaks[np.searchsorted(breaks, places)]
    places = np.where(following - places <= NEAR, following, places)
    head, *rest = np.split(haystack.tokens[at], places)
    parts = [part for pair in zip(hidden, rest, strict=True) for part in pair]
    return np.concatenate([head, *parts, asked]).astype(np.int32)


def room_beside(length: int, *needed: list[int]) -> int:
    """Returns how many of a prompt's tokens are left beside the needed ones, at least 1.

    Raises:
      TooShortError: none is.
    """
    taken = sum(map(len, needed))
    if length <= taken:
        raise TooShortError(taken + 1)
    return length - taken


def fresh(
    rng: np.random.Generator, tokenizer: Any, alphabet: str, length: int, count: int, text: str
) -> list[str]:
    """Returns random words of one length, no two the same, none to be found in the text.

    Raises:
      ValueError: the text has nearly all words of that length, or the tokenizer cannot write them.
    """
    if not writes(tokenizer, alphabet):
        read = tokenizer.decode(encode(tokenizer, alphabet))
        raise ValueError(
            f"the tokenizer cannot write {alphabet!r}, which reads as {read!r}, and the task needs "
            "words of these letters: choose prompts that are plain text"
        )
    found: dict[str, None] = {}
    for _ in range(TRIES + 2 * count):
        word = "".join(rng.choice(list(alphabet), length))
        if word not in text:
            found[word] = None
        if len(found) == count:
            break
    else:
        raise ValueError(
            f"the haystack holds nearly every word of {length} letters of {alphabet!r}, so none "
            "can be hidden in it: give another one"
        )
    return list(found)


def writes(tokenizer: Any, word: str) -> bool:
    """Returns whether a word can be read again from its tokens, spaces aside."""
    return re.sub(r"\s", "", tokenizer.decode(encode(tokenizer, word))) == word
