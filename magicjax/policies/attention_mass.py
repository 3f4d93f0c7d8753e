"""H2O and TOVA: entries by the attention they were paid, unpooled."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from magicjax.policies.base import Evidence, Policy


@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """Pins the heavy hitters: the entries that all queries so far attended to most.

    Source: H2O (arXiv 2306.14048), which evicts token by token while it decodes, by the attention
    among what it still holds; here the attention is the full one, summed over the whole prompt, and
    with `refresh_every` also over the newest `window` queries of every refreshing round. As in the
    paper, half the budget is for the newest tokens.

    Attributes:
      window: how many of the newest queries a refresh may add.

    Raises:
      ValueError: window < 1.
    """

    window: int = 32
    accumulates = True

    def __post_init__(self):
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1 query")

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        return evidence.total


@dataclasses.dataclass(frozen=True)
class TOVA(Policy):
    """Pins what the newest query attends to, the mean of all heads: the same for each KV head.

    Source: TOVA (arXiv 2401.06104), which drops the least attended entry at every token; here the
    choice is made once for the prompt, and again at every refresh, and the ring is kept too.
    """

    window = 1

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        mass = evidence.window_mass()
        return jnp.broadcast_to(evidence.mean_of_heads(mass), mass.shape)
