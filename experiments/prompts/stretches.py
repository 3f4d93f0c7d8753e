"""Prompts that are stretches of text and ask nothing, and the choice among them.

Texts make one stream of tokens; prompts are its stretches that end at evenly spaced places. A
stretch of a book lies within that book. Greedy text of a small model soon repeats itself, and a
loop is easy to draft. So more places can be tried than there are rows, and the rows are those
whose text repeats itself least.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.prompts import corpus, metrics, sources
from experiments.prompts.prompt import Prompt, encode, join, opening, tokens_of

GOLDEN = 0.6180339887498949  # its multiples, without the whole part, fill [0, 1) evenly


def of_stream(
    kind: str, tokenizer: Any, path: str, count: int, context: int, seed: int
) -> list[Prompt]:
    """Returns prompts from the library's held-out modules (`stdlib`), or the texts of `path`.

    Raises:
      ValueError: the text is too short, or a file is no text.
    """
    if kind == sources.STDLIB:
        stream = stdlib_stream(tokenizer)
    else:
        stream = _file_stream(tokenizer, path, sources.fingerprint(kind, path))
    rows = cut(stream, count, context, seed, opening(tokenizer))
    return [Prompt(row) for row in rows]


def of_books(tokenizer: Any, path: str, count: int, context: int, seed: int) -> list[Prompt]:
    """Returns prompts each from one book: the first of every book, then the second, and so on.

    Books come in the order of their files, and no more are read than needed. A book is divided
    into as many stretches as fit, which do not overlap; the seed chooses where they begin, and
    their order.

    Raises:
      ValueError: the books are too few or too short, or a file is no text.
    """
    begin = opening(tokenizer)
    length = context - len(begin)
    lengths: list[int] = []
    parts: dict[str, list[Prompt]] = {}  # by text: a book that is there twice counts once
    books = (book for file in sources.files(sources.PG19, path) for book in sources.texts(file))
    for number, (source, text) in enumerate(books):
        tokens = tokens_of(tokenizer, text)
        lengths.append(len(tokens))
        if length <= len(tokens) and text not in parts:
            rows = _divide(tokens, length, np.random.default_rng([seed, number]))
            parts[text] = [Prompt(join(begin, row), source=source) for row in rows]
        if len(parts) == count:
            break
    turns = itertools.chain.from_iterable(itertools.zip_longest(*parts.values()))
    made = list(itertools.islice((prompt for prompt in turns if prompt), count))
    if len(made) < count:
        # The first length that is too long, if stretches of n tokens are a book's tokens // n.
        fits = bisect.bisect_left(
            range(1, max(lengths, default=0) + 2),
            True,
            key=lambda n: sum(book // n for book in lengths) < count,
        )
        remedy = f"choose a context of at most {fits + len(begin)}, or " if fits else ""
        raise ValueError(
            f"{count} prompts of context={context} are asked for, but the {len(lengths)} books in "
            f"{path} have {len(made)} stretches of that length: {remedy}give more books"
        )
    return made


@functools.lru_cache(maxsize=4)
def stdlib_stream(tokenizer: Any) -> Int[np.ndarray, " n"]:
    """Returns int32 [n]: the held-out modules' tokens, each followed by the end token.

    The split goes by paths, so it holds for any version of Python; the text is that of the one
    that runs, and so prompts, and timings a little, differ between versions.

    Raises:
      ValueError: there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: prompts are made from text")
    return stream(tokenizer, stdlib_texts())


def stdlib_texts() -> list[str]:
    """Returns the modules of the standard library that no embedded model was trained on."""
    _, modules = corpus.split(corpus.library())
    return [module.text for module in modules]


@functools.lru_cache(maxsize=4)
def _file_stream(tokenizer: Any, path: str, fingerprint: str) -> np.ndarray:
    """Returns the stream of a path's texts; read anew once their fingerprint is another."""
    del fingerprint
    found = sources.files(sources.FILES, path)
    return stream(tokenizer, (text for file in found for _, text in sources.texts(file)))


def stream(tokenizer: Any, texts: Iterable[str]) -> Int[np.ndarray, " n"]:
    """Returns int32 [n]: the texts' tokens, each followed by the end token if there is one."""
    tokens: list[int] = []
    for text in texts:
        tokens += encode(tokenizer, text)
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
    return np.array(tokens, np.int32)


def cut(
    stream: Int[np.ndarray, " n"],
    count: int,
    context: int,
    seed: int = 0,
    begin: Iterable[int] = (),
) -> Int[np.ndarray, "N T"]:
    """Returns int32 [count, context], stretches that end at evenly spaced places.

    With n = 100, count = 2, context = 60 and seed = 0 they end before tokens 70 and 90: in the
    middle of each half of what is left. Another seed moves all of them. Stretches may overlap; no
    two are the same place. `begin` is put before each, and counts as a part of its context.

    Raises:
      ValueError: the stream is too short.
    """
    begin = list(begin)
    length = context - len(begin)
    room = len(stream) - length
    if room < count:
        most = len(stream) - count + len(begin)
        remedy = f"choose a context of at most {most}, or give" if most > len(begin) else "give"
        raise ValueError(
            f"{count} prompts (rows times candidates) of context={context} need {length + count} "
            f"tokens, but the text has {len(stream)}: {remedy} a longer text"
        )
    shift = (0.5 + seed * GOLDEN) % 1.0
    ends = length + ((np.arange(count) + shift) * room / count).astype(int)
    return np.stack([join(begin, stream[end - length : end]) for end in ends])


def least_repetitive(
    candidates: Int[np.ndarray, "N T"],
    batch: int,
    continue_: Callable[[Int[np.ndarray, "B T"]], Int[np.ndarray, "B M"]],
) -> Int[np.ndarray, "B T"]:
    """Returns the `batch` candidates whose continuation repeats itself least, in their order.

    Args:
      candidates: prompts; N is a multiple of `batch`.
      batch: how many are wanted, and how many are continued at once.
      continue_: gives the plain greedy continuation of `batch` prompts.
    """
    if len(candidates) == batch:
        return candidates
    parts = [continue_(part) for part in np.split(candidates, len(candidates) // batch)]
    repeated = [metrics.repeated_ngrams(row[None]) for part in parts for row in part]
    return candidates[np.sort(np.argsort(repeated, kind="stable")[:batch])]


def _divide(
    tokens: Int[np.ndarray, " n"], length: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Returns all stretches of a length that fit into the tokens side by side, in random order."""
    count = len(tokens) // length
    first = rng.integers(len(tokens) - count * length + 1)
    starts = first + length * rng.permutation(count)
    return [tokens[start : start + length] for start in starts]
