"""Prefill of one request in a cache of one row, in pieces between calls of the loop.

One program with a dynamic number of steps serves all prompt lengths.
"""

import dataclasses
from typing import Any

from magicjax.decoding import runner
from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.decoding.request import Request
from magicjax.drafters.base import Previous
from magicjax.engine.scheduler import Piece
from magicjax.engine.templates import put_row
from magicjax.kv_cache.full_cache import KVCache


@dataclasses.dataclass(eq=False)
class PrefillRow:
    """A prompt in prefill.

    Attributes:
      request: of one row.
      cache: the target's, of one row, which the programs donate.
      drafter_state: the drafter's state of an earlier text, of which the first `reused` tokens are
        those of the prompt.
      reused: the tokens of the prompt that were cached before.
      layer_inputs: of the target's pass over the pieces so far, which the programs donate.
    """

    request: Request
    cache: KVCache
    drafter_state: Any
    reused: int
    layer_inputs: dict[int, Any]

    def advance(self, piece: Piece) -> tuple[Prefilled, float]:
        """Prefills a piece; returns the results of the program and its seconds."""
        end, first = put_row(self.request, piece.end, piece.first)
        settings = dataclasses.replace(self.request.settings, chunk=piece.chunk)
        rows = dataclasses.replace(self.request.rows, lengths=end)
        request = dataclasses.replace(self.request, rows=rows, settings=settings)
        cache = dataclasses.replace(self.cache, lengths=first)
        arguments = request.prefill_settings, cache, self.layer_inputs
        (self.cache, prefilled), seconds = runner.prefill(request, *arguments)
        self.layer_inputs = prefilled.stats.layer_inputs
        return prefilled, seconds

    def finish(self, prefilled: Prefilled, without_drafter: bool) -> tuple[DecodeState, float]:
        """Returns the state of the row after the last piece, and the seconds.

        Args:
          prefilled: the results of the last piece.
          without_drafter: whether the state has no drafter's.
        """
        if without_drafter:
            plain = dataclasses.replace(self.request, drafter=None)
            return runner.init_state(plain, self.cache, prefilled)
        (reused,) = put_row(self.request, self.reused)
        previous = Previous(self.drafter_state, reused)
        return runner.init_state(self.request, self.cache, prefilled, previous)
