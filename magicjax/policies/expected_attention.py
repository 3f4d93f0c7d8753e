"""Expected Attention: the entries that future queries are expected to attend to."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from magicjax.policies.base import Evidence, Policy, RecentQueries
from models.positions import frequencies, rotate_pairs
from sharding import collectives


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Pins the entries with the highest expected attention times the norm of their value.

    Queries before rotation are modelled as normally distributed. Their mean and covariance, rotated
    by the mean rotation of the next `future` positions, give the expected exp(score) of every key
    in closed form, which is averaged over the query heads of a KV head.

    Source: Expected Attention (arXiv 2510.00636), which takes the statistics of all of the prompt's
    queries and weights by the value after the output projection; here they are those of the newest
    `window` queries, and the weight is the norm of the value.

    Attributes:
      window: W, how many of the newest queries give mean and covariance.
      future: the number of future positions over which the rotation is averaged.
      epsilon: added to the expected attention, so that entries with large values count.
      covariance: use the covariance, not only the mean.

    Raises:
      ValueError: window or future < 1, epsilon < 0 or not finite.
    """

    window: int = 128
    future: int = 512
    epsilon: float = 0.0
    covariance: bool = True

    reads_keys = True
    rotates = True

    def __post_init__(self):
        super().__post_init__()
        if self.window < 1 or self.future < 1:
            raise ValueError(f"window={self.window}, future={self.future}: both must be at least 1")
        if not 0 <= self.epsilon < float("inf"):
            raise ValueError(f"epsilon={self.epsilon}: it must be a finite number of at least 0")

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        assert evidence.queries is not None
        keys = evidence.keys.astype(jnp.float32)
        batch, heads, _, size = keys.shape
        mean, covariance = self._statistics(evidence.queries, evidence.config)
        mean = mean.reshape(batch, heads, -1, size)
        scores = jnp.einsum("bkgd,bksd->bkgs", mean, keys) * size**-0.5
        if self.covariance:
            covariance = covariance.reshape(batch, heads, -1, size, size)
            product = jnp.einsum("bkgde,bkse->bkgsd", covariance, keys)
            scores += jnp.einsum("bkgsd,bksd->bkgs", product, keys) / (2 * size)
        attention = jax.nn.softmax(scores, axis=-1, where=evidence.live()[:, :, None])
        norm = jnp.linalg.norm(evidence.values.astype(jnp.float32), axis=-1)
        split = evidence.split
        attention = collectives.psum(attention.mean(2), split.replica_axes)
        return (attention * split.kv_shards / split.shards + self.epsilon) * norm

    def _statistics(
        self, queries: RecentQueries, config
    ) -> tuple[Float[Array, "B H D"], Float[Array, "B H D D"]]:
        """Returns mean and covariance of the queries, rotated to the future positions."""
        q, exists = queries.q.astype(jnp.float32), queries.seen > 0
        rope = getattr(config, "rope", None)
        if rope is not None:
            angles = (1 - queries.seen)[..., None, None] * frequencies(rope, q.shape[-1])[0]
            q = rotate_pairs(q, jnp.cos(angles), jnp.sin(angles))
        weight = exists / jnp.maximum(exists.sum(-1, keepdims=True), 1)
        mean = jnp.einsum("bw,bwhd->bhd", weight, q)
        deviation = q - mean[:, None]
        covariance = jnp.einsum("bw,bwhd,bwhe->bhde", weight, deviation, deviation)
        if rope is not None:
            angles = self._angles(queries.seen.max(-1), rope, q.shape[-1])
            cos, sin = jnp.cos(angles).mean(1)[:, None], jnp.sin(angles).mean(1)[:, None]
            mean = rotate_pairs(mean, cos, sin)
            # R S R^T: the rows, then the columns.
            covariance = rotate_pairs(covariance, cos[:, :, None], sin[:, :, None]).swapaxes(-1, -2)
            covariance = rotate_pairs(covariance, cos[:, :, None], sin[:, :, None])
        return mean, covariance

    def _angles(self, length: Int[Array, "B"], rope, size: int) -> Float[Array, "B T D/2"]:
        """Returns the rotation angles of the positions length, …, length + future - 1."""
        positions = length[:, None] + jnp.arange(self.future)
        return positions[..., None] * frequencies(rope, size)[0]
