"""Prefill of one request in a cache of one row, in pieces between calls of the loop.

One program with a dynamic number of steps serves all prompt lengths.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from magicjax.decoding.decoder import Decoder
from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.drafters.base import Previous
from magicjax.engine.scheduler import Piece
from magicjax.engine.setup import put_row
from magicjax.kv_cache.full_cache import KVCache


@dataclasses.dataclass(eq=False)
class PrefillRow:
    """A prompt in prefill.

    Attributes:
      decoder: a decoder for one row.
      cache: the target's, of one row, which the programs donate.
      drafter_state: the drafter's state of an earlier text, of which the first `reused` tokens are
        those of the prompt.
      reused: the tokens of the prompt that were cached before.
      layer_inputs: inputs of the target's layers at the prefilled tokens; the programs donate them.
      snapshots: the target's states after so many tokens, copied (`magicjax.engine.prefix_store`).
    """

    decoder: Decoder
    cache: KVCache
    drafter_state: Any
    reused: int
    layer_inputs: dict[int, Any]
    snapshots: dict[int, Any] = dataclasses.field(default_factory=dict)

    def advance(self, piece: Piece) -> Prefilled:
        """Prefills a piece; returns the results of the program."""
        request = self.decoder.request
        end, first = put_row(request, piece.end, piece.first)
        settings = dataclasses.replace(request.prefill_settings, chunk=piece.chunk)
        rows = dataclasses.replace(request.rows, lengths=end)
        cache = dataclasses.replace(self.cache, lengths=first)
        self.cache, prefilled = self.decoder.prefill(rows, settings, cache, self.layer_inputs)
        self.layer_inputs = prefilled.stats.layer_inputs
        if piece.is_kept:
            self.keep_states(piece.end)
        return prefilled

    def keep_states(self, length: int) -> None:
        """Keeps a copy of the target's states, which have `length` tokens."""
        self.snapshots[length] = jax.tree.map(jnp.copy, self.cache.states)

    def finish(self, prefilled: Prefilled, without_drafter: bool) -> DecodeState:
        """Returns the state of the row after the last piece.

        Args:
          prefilled: the results of the last piece.
          without_drafter: whether the state has no drafter's.
        """
        if without_drafter:
            plain = dataclasses.replace(self.decoder, without_drafter=True)
            return plain.init(self.cache, prefilled)
        (reused,) = put_row(self.decoder.request, self.reused)
        return self.decoder.init(self.cache, prefilled, Previous(self.drafter_state, reused))
