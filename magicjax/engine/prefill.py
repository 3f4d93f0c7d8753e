"""Prefill of one request in a cache of one row, in pieces between calls of the loop.

One program with a dynamic number of steps serves all prompt lengths. The last piece of a prompt
includes the newest tokens whose queries the drafter's policy reads, so it may begin before the end
of the cached ones and compute some of them again.
"""

import dataclasses
from typing import Any

from magicjax.decoding import runner
from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.decoding.request import Request, round_up
from magicjax.engine.templates import Templates, put_row
from magicjax.kv_cache.full_cache import KVCache


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a prompt that one call of a program prefills.

    Attributes:
      first, end: positions; the tokens before `first` are cached.
      chunk: tokens of a step of the program.
    """

    first: int
    end: int
    chunk: int

    @property
    def tokens(self) -> int:
        """The tokens that run, padding included."""
        return round_up(self.end - self.first, self.chunk)


def pieces(templates: Templates, length: int, cached: int) -> list[Piece]:
    """Returns the pieces of a prompt whose first `cached` < `length` tokens are in the cache.

    With at most 512 tokens between calls of the loop, a prompt of 1,200 tokens has the pieces 0 to
    512, 512 to 1,024, and 1,024 to 1,200.
    """
    chunk, largest = templates.row.settings.chunk, templates.config.prefill_chunk
    if templates.needs_whole_prompt:
        return [Piece(0, length, chunk)]
    found, first = [], cached
    while length - first > largest:
        found.append(Piece(first, first + largest, largest))
        first += largest
    return [*found, Piece(max(0, min(first, length - templates.window)), length, chunk)]


@dataclasses.dataclass(eq=False)
class Prefilling:
    """A prompt that is being prefilled.

    Attributes:
      request: of one row.
      cache: the target's, of one row.
      drafter_state: the drafter's state of an earlier text, of which the first `reused` tokens are
        those of the prompt.
      reused: the tokens of the prompt that were cached before.
      pieces: those that have not run.
    """

    request: Request
    cache: KVCache
    drafter_state: Any
    reused: int
    pieces: list[Piece]


def start(
    templates: Templates, request: Request, row: tuple[KVCache, Any], reused: int = 0
) -> Prefilling:
    """Returns the prefill of a request in the row's buffers, which it donates."""
    length = len(request.prompts[0])
    reused = min(reused, length - 1)  # the last token's hidden state gives the first new token
    return Prefilling(request, *row, reused, pieces(templates, length, reused))


def advance(prefilling: Prefilling) -> tuple[Prefilled, float]:
    """Runs the next piece; returns the results of the program and its seconds."""
    piece, request = prefilling.pieces.pop(0), prefilling.request
    end, first = put_row(request, piece.end, piece.first)
    settings = dataclasses.replace(request.settings, chunk=piece.chunk)
    request = dataclasses.replace(request, lengths=end, settings=settings)
    cache = dataclasses.replace(prefilling.cache, lengths=first)
    (prefilling.cache, prefilled), seconds = runner.extend(request, cache)
    return prefilled, seconds


def finish(prefilling: Prefilling, prefilled: Prefilled) -> tuple[DecodeState, float]:
    """Returns the state of the row after the last piece, and the seconds."""
    request = prefilling.request
    (reused,) = put_row(request, prefilling.reused)
    return runner.resume_state(
        request, prefilling.cache, prefilled, prefilling.drafter_state, reused
    )
