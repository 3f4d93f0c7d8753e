"""Prompts that are excerpts of text.

Texts are concatenated to one stream of tokens; prompts end at evenly spaced positions of it. An
excerpt of a book lies within that book. Greedy text of a small model soon loops, and loops are easy
to draft. So `least_repetitive` chooses among more candidates than there are rows. It also selects
prompts of tasks.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.prompts import corpus, metrics, sources
from experiments.prompts.prompt import Prompt, encode, encode_cached, join, leading_tokens

GOLDEN = 0.6180339887498949  # the fractional parts of its multiples fill [0, 1) evenly


def from_stream(
    kind: str, tokenizer: Any, path: str, count: int, context: int, seed: int
) -> list[Prompt]:
    """Returns prompts from the library's held-out modules (`stdlib`), or the texts of `path`.

    Raises:
      ValueError: the text is too short, or a file is not text.
    """
    stream = _stream(tokenizer, path, sources.fingerprint(kind, path))
    rows = cut(stream, count, context, seed, leading_tokens(tokenizer))
    return [Prompt(row) for row in rows]


def from_books(tokenizer: Any, path: str, count: int, context: int, seed: int) -> list[Prompt]:
    """Returns prompts from one book each: the first of every book, then the second, and so on.

    Books are read in the order of their files, only as many as needed. A book is divided into as
    many excerpts as fit without overlap; the seed chooses their offset and order.

    Raises:
      ValueError: the books are too few or too short, or a file is not text.
    """
    leading = leading_tokens(tokenizer)
    length = context - len(leading)
    lengths: list[int] = []
    excerpts: dict[str, list[Prompt]] = {}  # by text: a repeated book counts once
    books = (book for file in sources.files(sources.PG19, path) for book in sources.texts(file))
    for number, (source, text) in enumerate(books):
        tokens = encode_cached(tokenizer, text)
        lengths.append(len(tokens))
        if length <= len(tokens) and text not in excerpts:
            rows = _divide(tokens, length, np.random.default_rng([seed, number]))
            excerpts[text] = [Prompt(join(leading, row), source=source) for row in rows]
        if len(excerpts) == count:
            break
    interleaved = itertools.chain.from_iterable(itertools.zip_longest(*excerpts.values()))
    prompts = list(itertools.islice(filter(None, interleaved), count))
    if len(prompts) < count:
        # The largest length n for which the books have enough excerpts, tokens // n each.
        limit = bisect.bisect_left(
            range(1, max(lengths, default=0) + 2),
            True,
            key=lambda n: sum(book // n for book in lengths) < count,
        )
        remedy = f"choose a context of at most {limit + len(leading)}, or " if limit else ""
        raise ValueError(
            f"the {len(lengths)} books in {path} have {len(prompts)} of the {count} prompts of "
            f"context={context}: {remedy}give more books"
        )
    return prompts


def stdlib_stream(tokenizer: Any) -> Int[np.ndarray, " n"]:
    """Returns int32 [n]: the held-out modules' tokens, each followed by the end token.

    Modules are split by path, the same way in every version of Python. Their text, and so the
    prompts, differ between versions.
    """
    return _stream(tokenizer, "", "")


def texts(path: str) -> Iterator[str]:
    """Yields the texts of a file or folder, without a path those that no zoo model was trained on.

    Raises:
      ValueError: there are no files, or one is not text.
    """
    if not path:
        yield from (module.text for module in corpus.split(corpus.library())[1])
    for file in sources.files(sources.FILES, path):
        yield from (text for _, text in sources.texts(file))


@functools.lru_cache(maxsize=4)
def _stream(tokenizer: Any, path: str, fingerprint: str) -> np.ndarray:
    """Returns the stream of a path's texts; a changed fingerprint reads them again."""
    del fingerprint
    return stream(tokenizer, texts(path))


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
    leading: Iterable[int] = (),
) -> Int[np.ndarray, "N T"]:
    """Returns int32 [count, context], excerpts that end at evenly spaced positions.

    With n = 100, count = 2, context = 60 and seed = 0 they end before tokens 70 and 90, the middles
    of both halves of the remaining 40. Another seed shifts all of them. Excerpts may overlap, but
    no two are equal. `leading` tokens are prepended and count as part of the context.

    Raises:
      ValueError: the stream is too short.
    """
    leading = list(leading)
    length = context - len(leading)
    room = len(stream) - length
    if room < count:
        limit = len(stream) - count + len(leading)
        remedy = f"choose a context of at most {limit}, or give" if limit > len(leading) else "give"
        raise ValueError(
            f"{count} prompts (rows × candidates) of context={context} need {length + count} "
            f"tokens, but the text has {len(stream)}: {remedy} a longer text"
        )
    shift = (0.5 + seed * GOLDEN) % 1.0
    ends = length + ((np.arange(count) + shift) * room / count).astype(int)
    return np.stack([join(leading, stream[end - length : end]) for end in ends])


def least_repetitive(
    candidates: Int[np.ndarray, "N T"],
    count: int,
    continue_: Callable[[Int[np.ndarray, "B T"]], Int[np.ndarray, "B M"]],
    end_tokens: Collection[int] = (),
) -> Int[np.ndarray, "B"]:
    """Returns the indices, ascending, of the `count` candidates whose continuations repeat least.

    Args:
      candidates: prompts; N is a multiple of `count`.
      count: how many are chosen.
      continue_: returns the plain greedy continuation of `count` prompts.
      end_tokens: tokens that end an answer. What follows does not count, and candidates whose
        answer ends come after all others, the longest answer first.
    """
    if len(candidates) == count:
        return np.arange(count)
    batches = np.split(candidates, len(candidates) // count)
    ranks = [_rank(row, end_tokens) for batch in batches for row in continue_(batch)]
    return np.sort(sorted(range(len(ranks)), key=ranks.__getitem__)[:count])


def _rank(row: Int[np.ndarray, "M"], end_tokens: Collection[int]) -> tuple[int, float]:
    """Returns (tokens after the answer, repetition in the answer) of a continuation."""
    ended = np.isin(row, list(end_tokens))
    answer = row[: ended.argmax()] if ended.any() else row
    repeated = metrics.repeated_ngrams(answer[None]) if len(answer) >= metrics.NGRAM else 0.0
    return len(row) - len(answer), repeated


def _divide(
    tokens: Int[np.ndarray, " n"], length: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Returns adjacent excerpts of a length, as many as fit, in random order."""
    count = len(tokens) // length
    first = rng.integers(len(tokens) - count * length + 1)
    starts = first + length * rng.permutation(count)
    return [tokens[start : start + length] for start in starts]
