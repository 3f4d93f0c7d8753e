"""Log-probabilities of tokens under the target."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from sharding import collectives
from sharding.collectives import AxisNames

MAX_ALTERNATIVES = 20


@struct.dataclass
class LogProbs:
    """Natural logarithms of probabilities under the target: `log_softmax` of its logits.

    They are computed in float32, before temperature, top_k and top_p; -inf for tokens that a
    grammar does not allow.

    Attributes:
      chosen: float32 [..., T], of the tokens that were emitted.
      top: float32 [..., T, K], of the K most likely tokens, in descending order; K may be 0.
      top_tokens: int32 [..., T, K], these tokens.
    """

    chosen: Float[Any, "*B T"]
    top: Float[Any, "*B T K"]
    top_tokens: Int[Any, "*B T K"]

    def __getitem__(self, index: Any) -> "LogProbs":
        """Returns the log-probabilities of some of the tokens; the index is of `chosen`."""
        return jax.tree.map(lambda x: x[index], self)

    def most_likely(self, count: int) -> "LogProbs":
        """Returns the log-probabilities with fewer of the most likely tokens."""
        return LogProbs(self.chosen, self.top[..., :count], self.top_tokens[..., :count])


def log_probs(
    logits: Float[Array, "*B T V"],
    tokens: Int[Array, "*B T"],
    count: int,
    axis_names: AxisNames = (),
) -> LogProbs:
    """Returns the log-probabilities of tokens, and of the `count` most likely ones.

    Args:
      logits: the target's logits, from which each token was chosen.
      tokens: the chosen ones.
      count: K.
      axis_names: the mesh axes that shard the vocabulary.
    """
    logs = collectives.log_softmax(logits.astype(jnp.float32), axis_names)
    chosen = collectives.take_global(logs, tokens, axis_names)
    return LogProbs(chosen, *collectives.top_k(logs, count, axis_names))
