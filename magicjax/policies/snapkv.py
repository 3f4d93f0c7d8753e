"""SnapKV: what the newest queries attend to (arXiv 2404.14469), and PyramidKV's budgets for it."""

import dataclasses
import fractions

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from magicjax.policies.base import Evidence, Policy

POOLINGS = ("max", "avg")


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """Pins, for each KV head, the entries that the newest queries attended to, pooled.

    The attention of the newest `window` queries is summed over them and over the query heads that
    share a KV head, and pooled along the text, so that neighbours of what matters come with it. A
    prompt shorter than the window has only its own queries.

    The paper keeps the window itself beside the pins; here the ring does, so `recent` should be no
    smaller. It pools what lies before the window; here, what lies before the ring.

    Attributes:
      window: W, how many of the newest queries.
      kernel: width of the pooling, odd; 1: none.
      pooling: `max` or `avg`.
      scaled: divide scores by sqrt(D) before the softmax, as the model does; MagicDec's own
        SnapKV (arXiv 2408.11049) does not.

    Raises:
      ValueError: window < 1, an even or too small kernel, an unknown pooling.
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
        around = (1, 1, self.kernel)
        if self.pooling == "max":
            mass = jnp.where(evidence.live(), mass, -jnp.inf)
            return lax.reduce_window(mass, -jnp.inf, lax.max, around, (1, 1, 1), "SAME")
        mass = jnp.where(evidence.live(), mass, 0)
        return lax.reduce_window(mass, 0.0, lax.add, around, (1, 1, 1), "SAME") / self.kernel


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's choice, with more pins in lower layers and fewer in higher ones.

    Lower layers spread their attention over the text, higher ones gather it on few entries. The
    mean of the layers' budgets is the budget. Source: PyramidKV (arXiv 2406.02069); its pins of
    the last layer are the mean's 1 / beta, and the others lie on a line.

    Attributes:
      beta: how many times the mean the pins of the last layer are fewer; 1: all layers alike.

    Raises:
      ValueError: beta < 1 or not finite, or what SnapKV refuses.
    """

    beta: float = 20.0

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.beta < float("inf"):
            raise ValueError(f"beta={self.beta}: it must be a number from 1 on, and finite")

    def pinned(self, budget: int, layers: int) -> tuple[int, ...]:
        mean = budget - self.ring(budget)
        if layers == 1:
            return (mean,)
        last = mean / fractions.Fraction(self.beta)
        line = [last + (mean - last) * 2 * (layers - 1 - i) / (layers - 1) for i in range(layers)]
        pins = [int(exact) for exact in line]
        # What rounding down left over goes to those who lost most, so that the total is kept.
        losers = sorted(range(layers), key=lambda i: (pins[i] - line[i], i))
        for layer in losers[: layers * mean - sum(pins)]:
            pins[layer] += 1
        return tuple(pins)
