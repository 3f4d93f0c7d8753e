"""StreamingLLM: the first tokens (attention sinks) and the newest ones (arXiv 2309.17453)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from magicjax.policies.base import Evidence, Policy


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy):
    """Pins the first `sinks` positions; everything else of the budget is the ring.

    Attributes:
      sinks: P. The paper uses 4, MagicDec 16; it costs little to have more.

    Raises:
      ValueError: sinks < 1, or `recent` given.
    """

    sinks: int = 16

    def __post_init__(self):
        super().__post_init__()
        if self.sinks < 1:
            raise ValueError(f"sinks={self.sinks}: a streaming cache needs at least 1")
        if self.recent is not None:
            raise ValueError(
                f"recent={self.recent}: the ring of a streaming cache is all of the budget but the "
                "sinks; leave recent out"
            )

    def ring(self, budget: int) -> int:
        return budget - self.sinks

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        earlier_first = -jnp.arange(evidence.keys.shape[2], dtype=jnp.float32)
        return jnp.broadcast_to(earlier_first, evidence.keys.shape[:3])
