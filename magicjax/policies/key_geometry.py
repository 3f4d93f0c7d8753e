"""Policies that look at keys alone, or at nothing: they need no attention and no second read."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from magicjax.policies.base import Evidence, Policy
from sharding import collectives


def _norms(x: Float[Array, "*B D"]) -> Float[Array, "*B"]:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1))


def _dot(spec: str, a: Array, b: Array) -> Array:
    """Returns the einsum with keys in their own dtype, summed in float32."""
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum(
        spec, a.astype(b.dtype), b, precision=highest, preferred_element_type=jnp.float32
    )


@dataclasses.dataclass(frozen=True)
class KeyDiff(Policy):
    """Pins the keys least like the others: lowest cosine similarity to the mean direction.

    The mean is that of the candidates' unit keys, for each row and KV head. Source: KeyDiff
    (arXiv 2504.15364), which evicts block by block; here the choice is made once for
    the prompt, and at every refresh.
    """

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        # No unit key is ever stored: keys are weighed by their inverse norm.
        inverse = 1 / jnp.maximum(_norms(evidence.keys), 1e-12)
        weight = jnp.where(evidence.live(), inverse, 0)
        mean = _dot("bks,bksd->bkd", weight, evidence.keys)  # its length does not matter
        mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
        return -_dot("bkd,bksd->bks", mean, evidence.keys) * inverse


@dataclasses.dataclass(frozen=True)
class KNorm(Policy):
    """Pins the keys of the smallest norm, which tend to draw attention (arXiv 2406.11430).

    The paper leaves the first two layers uncompressed; here every layer has the same budget.
    """

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        return -_norms(evidence.keys)


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """A control: pins random entries, the same positions in every row.

    So a row's draft does not depend on the rows beside it.

    Attributes:
      seed: another seed, other entries.
    """

    seed: int = 0

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        (own, slots), split = evidence.keys.shape[1:3], evidence.split
        heads = own * split.kv_shards
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), evidence.layer)
        # Drawn position by position, so that a larger cache does not change the numbers.
        of_position = jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(key, p), (heads,)))
        numbers = of_position(jnp.arange(slots)).T  # of all heads, on whatever device they are
        first = collectives.place(split.kv_axes) * own
        numbers = jax.lax.dynamic_slice_in_dim(numbers, first, own)
        return jnp.broadcast_to(numbers, evidence.keys.shape[:3])
