"""StreamingLLM: the first tokens (attention sinks) and the newest ones (arXiv 2309.17453)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from magicjax.cache import KVCache


@dataclasses.dataclass(frozen=True)
class StreamingLLM:
    """Pins the first `sinks` positions; everything else of the budget is the ring.

    Attributes:
      sinks: P. The paper uses 4, MagicDec 16; it costs little to have more.

    Raises:
      ValueError: sinks < 1.
    """

    sinks: int = 16

    def __post_init__(self):
        if self.sinks < 1:
            raise ValueError(f"sinks={self.sinks}: a streaming cache needs at least 1")

    def num_pinned(self, budget: int) -> int:
        del budget
        return self.sinks

    def pins(self, cache: KVCache, budget: int) -> tuple[Int[Array, "B K P"], ...]:
        del budget
        shape = (*cache.k[0].shape[:2], self.sinks)
        first = jnp.broadcast_to(jnp.arange(self.sinks, dtype=jnp.int32), shape)
        return tuple(first for _ in cache.k)
