"""RULER's tasks of counting: long lists of words, of which the most frequent are asked for.

Their text is the list itself, and rare words fill it. A list is written one word a line, and each
line encoded by itself, so that a word has the same tokens wherever it stands.
"""

import bisect
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.prompts.haystack import Haystack, TooShortError, fresh, room_beside, writes
from experiments.prompts.prompt import Prompt, encode

COMMON, TIMES = 10, 30  # so many words, each so many times
RARE_TIMES = TIMES // 3  # the most that any other word occurs
FREQUENT, LETTERS = 3, 6  # so many coded words are asked for; letters of one
ALPHA = 2.0  # of the zipf distribution: the word of rank k has a share of k ** -ALPHA / zeta(ALPHA)
NOISE = "..."  # the word of rank 1, which is not asked for
# From so many words on, the last word asked for occurs more often than the next: 74 of them are 2.8
# of rank 4 and 1.8 of rank 5.
FEWEST = 74
RANKS, WORDS_A_RANK = 50, 50  # at least so many ranks, and more in longer lists

START = 'words = """\n'


def common_words(tokenizer: Any, haystack: Haystack, length: int, seed: int, row: int) -> Prompt:
    """Returns a prompt that asks for the words most frequent in a long list (RULER, §3).

    The words are from the haystack. `COMMON` of them occur `TIMES` times, like RULER's, and the
    others at most `RARE_TIMES`; where the others are too few for a long prompt, all occur more
    often, by the same factor.

    Raises:
      TooShortError: there is no room for the common words and the question.
      ValueError: the haystack has too few words.
    """
    rng, lines = np.random.default_rng([seed, row]), _lines(tokenizer, haystack)
    words = rng.permutation(sorted(lines)).tolist()
    common, others = words[:COMMON], words[COMMON:]
    start, end = encode(tokenizer, START), _asked(tokenizer, f"{COMMON} most common of these words")
    once = sum(len(lines[word]) for word in common) * TIMES
    most = sum(len(lines[word]) for word in others) * RARE_TIMES
    if most < once:
        raise ValueError(
            f"the haystack has {len(words)} words of four letters a to z or more, and common_words "
            f"needs about {4 * COMMON}: give a longer text"
        )
    factor = max(1, math.ceil((length - len(start) - len(end)) / (once + most)))
    entries = [lines[word] for word in common] * (TIMES * factor)
    room = room_beside(length, start, end, *entries)
    rare = itertools.cycle([lines[word] for word in others])
    return Prompt(_listed(start, entries, rare, room, end, rng), tuple(common))


def frequent_words(tokenizer: Any, haystack: None, length: int, seed: int, row: int) -> Prompt:
    """Returns a prompt that asks for the words most frequent in a coded text (RULER, §3).

    Words of random letters occur as often as a zipf distribution says; the most frequent "word" is
    `NOISE`, and the `FREQUENT` ones behind it are asked for.

    Raises:
      TooShortError: there is no room for so many words that the ones asked for stand out.
    """
    del haystack
    rng = np.random.default_rng([seed, row])
    ranks = max(RANKS, length // WORDS_A_RANK)
    coded = fresh(rng, tokenizer, "abcdefghijklmnopqrstuvwxyz", LETTERS, ranks - 1, "")
    lines = [encode(tokenizer, f"{word}\n") for word in (NOISE, *coded)]
    start = encode(tokenizer, START)
    end = _asked(tokenizer, f"{FREQUENT} most frequent of these words, dots aside")
    sizes = np.array([len(line) for line in lines])
    shares = np.arange(1, ranks + 1) ** -ALPHA
    shares /= math.pi**2 / 6  # zeta(2)

    def counts(words: int) -> np.ndarray:
        return (words * shares).astype(int)

    def taken(words: int) -> int:
        return int(counts(words) @ sizes)

    room = length - len(start) - len(end)
    words = bisect.bisect_right(range(max(0, 2 * room)), room, key=taken) - 1
    if words < FEWEST:
        raise TooShortError(len(start) + len(end) + taken(FEWEST))
    times = counts(words)
    entries = [lines[rank] for rank in np.repeat(np.arange(ranks), times)]
    rare = itertools.cycle([line for line, count in zip(lines, times) if not count])
    tokens = _listed(start, entries, rare, room - taken(words), end, rng)
    return Prompt(tokens, tuple(coded[:FREQUENT]))


def _asked(tokenizer: Any, what: str) -> list[int]:
    return encode(tokenizer, f'""".split()\n# The {what}:\nanswer = [')


def _listed(
    start: list[int],
    entries: list[list[int]],
    rare: Iterator[list[int]],
    room: int,
    end: list[int],
    rng: np.random.Generator,
) -> np.ndarray:
    """Returns int32 tokens: the entries, and rare ones in the room left, in random order.

    The first of the list is a rare one cut to what is left: its end is a rare word too.
    """
    entries = list(entries)
    while len(line := next(rare)) < room:
        entries.append(line)
        room -= len(line)
    first = line[len(line) - room :]
    parts = [entries[i] for i in rng.permutation(len(entries))]
    return np.concatenate([start, first, *parts, end]).astype(np.int32)


@functools.lru_cache(maxsize=4)
def _lines(tokenizer: Any, haystack: Haystack) -> dict[str, list[int]]:
    """Returns the haystack's words that the tokenizer can write, each with its line's tokens."""
    words = sorted(set(re.findall(r"\b[a-z]{4,}\b", haystack.text)))
    return {word: encode(tokenizer, f"{word}\n") for word in words if writes(tokenizer, word)}
