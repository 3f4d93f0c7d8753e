"""Policies that need no queries: they score entries by position, by key, or at random."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from magicjax.policies.base import Evidence, Policy
from sharding import collectives


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy):
    """Pins the first `sinks` positions; the ring is the remainder of the budget.

    Source: StreamingLLM (arXiv 2309.17453).

    Attributes:
      sinks: P, the attention sinks. The paper uses 4, MagicDec 16; more cost little.

    Raises:
      ValueError: sinks < 1, or `recent` is given.
    """

    sinks: int = 16

    def __post_init__(self):
        super().__post_init__()
        if self.sinks < 1:
            raise ValueError(f"sinks={self.sinks}: a streaming cache needs at least 1")
        if self.recent is not None:
            raise ValueError(
                f"recent={self.recent}: the ring of a streaming cache is the budget without the "
                "sinks; omit recent"
            )

    def ring(self, budget: int) -> int:
        return budget - self.sinks

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        earlier_first = -jnp.arange(evidence.keys.shape[2], dtype=jnp.float32)
        return jnp.broadcast_to(earlier_first, evidence.keys.shape[:3])


@dataclasses.dataclass(frozen=True)
class KeyDiff(Policy):
    """Pins the keys with the lowest cosine similarity to the mean direction.

    The mean is that of the candidates' unit keys, for each row and KV head. Source: KeyDiff
    (arXiv 2504.15364), which evicts block by block; here the choice is made for the prompt and at
    every refresh.
    """

    reads_keys = True

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        # Weighting keys by their inverse norm avoids storing the unit keys.
        inverse = 1 / jnp.maximum(_norms(evidence.keys), 1e-12)
        weight = jnp.where(evidence.live(), inverse, 0)
        mean = _dot("bks,bksd->bkd", weight, evidence.keys)  # its length does not matter
        mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
        return -_dot("bkd,bksd->bks", mean, evidence.keys) * inverse


@dataclasses.dataclass(frozen=True)
class KNorm(Policy):
    """Pins the keys of the smallest norm, which tend to attract attention (arXiv 2406.11430).

    The paper leaves the first two layers uncompressed; here every layer has the same budget.
    """

    reads_keys = True

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        # In the first layer, equal tokens have keys of equal norm. Fewer bits make them equal
        # scores, of which the oldest is pinned, where rounding would decide.
        return -jax.lax.reduce_precision(_norms(evidence.keys), exponent_bits=8, mantissa_bits=14)


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """A control: pins random entries, at the same positions in every row.

    A row's draft therefore does not depend on other rows.

    Attributes:
      seed: seed of the random scores.
    """

    seed: int = 0

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        (local_heads, slots), split = evidence.keys.shape[1:3], evidence.split
        heads = local_heads * split.kv_shards
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), evidence.layer)
        # One key for each position, so that scores do not depend on the capacity of the cache.
        score = jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(key, p), (heads,)))
        scores = score(jnp.arange(slots)).T  # of all heads, the same on every device
        first = collectives.axis_index(split.kv_axes) * local_heads
        scores = jax.lax.dynamic_slice_in_dim(scores, first, local_heads)
        return jnp.broadcast_to(scores, evidence.keys.shape[:3])


def _norms(x: Float[Array, "*B D"]) -> Float[Array, "*B"]:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1))


def _dot(spec: str, a: Array, b: Array) -> Array:
    """Returns an einsum of keys in their own dtype, accumulated in float32."""
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum(
        spec, a.astype(b.dtype), b, precision=highest, preferred_element_type=jnp.float32
    )
