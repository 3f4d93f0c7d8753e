"""Policies that score entries by the attention they received: H2O, TOVA, SnapKV and PyramidKV."""

import dataclasses
import fractions

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from magicjax.policies.base import Evidence, Policy

POOLINGS = ("max", "avg")


@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """Pins the heavy hitters: the entries with the most attention from all queries so far.

    Source: H2O (arXiv 2306.14048), which evicts token by token during decoding, by the attention
    among the entries it still holds. Here the attention is that of the full prompt, plus the newest
    `window` queries at each refresh. As in the paper, half the budget holds the newest tokens.

    Attributes:
      window: how many of the newest queries a refresh can add.

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
    """Pins what the newest query attends to, averaged over all heads: the same for each KV head.

    Source: TOVA (arXiv 2401.06104), which drops the least attended entry at every token. Here the
    choice is made for the prompt and at every refresh, and the ring is kept too.
    """

    window = 1

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        mass = evidence.window_mass()
        return jnp.broadcast_to(evidence.mean_over_heads(mass), mass.shape)


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """Pins, for each KV head, the entries that the newest queries attended to, pooled.

    The attention of the newest `window` queries is summed over them and over the query heads that
    share a KV head, and pooled along the text, so that neighbours of important entries are pinned
    too. A prompt shorter than the window has fewer queries.

    The paper keeps the window beside the pins; here the ring does, so `recent` should be at least
    `window`. The paper pools what precedes the window; here, what precedes the ring. Source: SnapKV
    (arXiv 2404.14469).

    Attributes:
      window: W, how many of the newest queries.
      kernel: width of the pooling, odd; 1: none.
      pooling: "max" or "avg".
      scaled: divide scores by sqrt(D) before the softmax, as the model does; MagicDec's SnapKV
        (arXiv 2408.11049) does not.

    Raises:
      ValueError: window < 1, an even kernel or one below 1, an unknown pooling.
    """

    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    scaled: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1 query")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}: it must be odd, 1 or more")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling={self.pooling!r}: use one of {', '.join(POOLINGS)}")

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        mass = evidence.window_mass(self.scaled)
        window = (1, 1, self.kernel)
        if self.pooling == "max":
            mass = jnp.where(evidence.live(), mass, -jnp.inf)
            return lax.reduce_window(mass, -jnp.inf, lax.max, window, (1, 1, 1), "SAME")
        mass = jnp.where(evidence.live(), mass, 0)
        return lax.reduce_window(mass, 0.0, lax.add, window, (1, 1, 1), "SAME") / self.kernel


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores, with more pins in lower layers and fewer in higher ones.

    Lower layers spread their attention over the text; higher ones concentrate it on few entries.
    The mean over layers is the budget. Source: PyramidKV (arXiv 2406.02069): the last layer has
    1 / beta of the mean pins, and the layers lie on a line.

    Attributes:
      beta: the mean number of pins over that of the last layer; 1: all layers are equal.

    Raises:
      ValueError: beta < 1 or not finite, or an invalid field of SnapKV.
    """

    beta: float = 20.0

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.beta < float("inf"):
            raise ValueError(f"beta={self.beta}: it must be a finite number of at least 1")

    def pinned(self, budget: int, layers: int) -> tuple[int, ...]:
        mean = budget - self.ring(budget)
        if layers == 1:
            return (mean,)
        last = mean / fractions.Fraction(self.beta)
        exact = [last + (mean - last) * 2 * (layers - 1 - i) / (layers - 1) for i in range(layers)]
        pins = [int(count) for count in exact]
        # The pins lost to rounding go to the layers that lost most, so that the sum is kept.
        by_loss = sorted(range(layers), key=lambda i: (pins[i] - exact[i], i))
        for layer in by_loss[: layers * mean - sum(pins)]:
            pins[layer] += 1
        return tuple(pins)
