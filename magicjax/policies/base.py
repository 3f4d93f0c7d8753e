"""What a policy is: a class that says how much each committed entry is worth to a draft."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax.kv_cache.attention_stats import Queries
from pallas_kernels import prefix_mass
from sharding import Split, collectives


@struct.dataclass
class Evidence:
    """What a policy may judge the entries of one layer by.

    Attributes:
      keys, values: [B, K, S, D], committed entries, position by position; keys are rotated.
      candidates: int32 [B], positions below it can be pinned; those from there on are in the ring,
        or do not exist.
      queries: the newest `window` queries; None if the policy asked for none.
      accumulated: float32 [B, K, S], the attention that all queries so far paid to each position,
        summed over the G heads that share a KV head; None unless the policy accumulates. Read it
        as `total`.
      layer: static; which layer, from 0; traced where layers are divided over stages.
      config: static; the model's, with `rope` in models that rotate.
      split: static; how the model is divided over devices. K and H are those of this device; what
        goes over all heads, or over the query heads of a KV head, must be summed over devices.
      backend: static; of `prefix_mass`; None: xla.
    """

    keys: Float[Array, "B K S D"]
    values: Float[Array, "B K S D"]
    candidates: Int[Array, "B"]
    queries: Queries | None
    accumulated: Float[Array, "B K S"] | None
    layer: Int[Array, ""] | int = struct.field(pytree_node=False)
    config: Any = struct.field(pytree_node=False)
    split: Split = struct.field(pytree_node=False, default=Split())
    backend: str | None = struct.field(pytree_node=False, default=None)

    def live(self) -> Array:
        """Returns bool [B, 1, S], which positions can be pinned."""
        return (jnp.arange(self.keys.shape[2]) < self.candidates[:, None])[:, None]

    @property
    def total(self) -> Float[Array, "B K S"]:
        """The attention that all queries so far paid to each position.

        Raises ValueError if the policy did not ask for it.
        """
        if self.accumulated is None:
            raise ValueError("a policy that reads `evidence.total` must set accumulates = True")
        return self.accumulated

    def window_mass(self, scaled: bool = True) -> Float[Array, "B K S"]:
        """Returns the attention that the newest queries paid to each position, float32.

        Summed over the queries and over the G heads that share a KV head.

        Args:
          scaled: divide scores by sqrt(D) before the softmax, as the model does.
        """
        if self.queries is None:
            raise ValueError("a policy that reads `evidence.queries` must set `window`")
        q, seen = self.queries.q, self.queries.seen
        if scaled:
            mass = prefix_mass(q, self.keys, seen, self.queries.lse, backend=self.backend)
        else:
            mass = prefix_mass(q * q.shape[-1] ** 0.5, self.keys, seen, backend=self.backend)
        return collectives.total(mass, self.split.replica_axes)

    def mean_of_heads(self, x: Float[Array, "B K S"]) -> Float[Array, "B 1 S"]:
        """Returns the mean over all KV heads of the model."""
        mean = x.mean(1, keepdims=True)
        return collectives.total(mean, self.split.kv_axes) / self.split.kv_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Which entries of a long text a draft cache pins; the rest of it is a ring of the newest.

    A policy of one's own is a frozen dataclass with a `score`; what it gives is checked once, when
    the first program with it is made.

    Attributes:
      recent: R, the slots of the ring; None: half the budget.

    Raises:
      ValueError: recent < 1.
      TypeError: a field that is a whole number is given another.
    """

    recent: int | None = None

    # What it needs to be shown; class attributes, or fields where users may choose.
    window = 0  # how many of the newest queries
    accumulates = False  # the attention of all queries

    def __post_init__(self):
        for field in dataclasses.fields(self):
            # A number of tokens is whole; 32.0 would fail deep in a program.
            if field.type in ("int", int, "int | None", int | None):
                value = getattr(self, field.name)
                if value is not None and not isinstance(value, int | np.integer):
                    raise TypeError(f"{field.name}={value!r}: it must be a whole number")
        if self.recent is not None and self.recent < 1:
            raise ValueError(f"recent={self.recent}: the ring needs at least 1 slot")

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        """Returns how much each entry is worth; the highest of the candidates are pinned.

        Of equal ones the earlier are pinned. What stands beyond the candidates is not read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `score`")

    def ring(self, budget: int) -> int:
        """Returns R, the slots of the ring in a cache of `budget` slots."""
        return (budget + 1) // 2 if self.recent is None else self.recent

    def pinned(self, budget: int, layers: int) -> tuple[int, ...]:
        """Returns P of each layer; they sum to layers * (budget - R)."""
        return (budget - self.ring(budget),) * layers


def choose(policy: Policy, evidence: Evidence, count: int) -> Int[Array, "B K P"]:
    """Returns the `count` candidates that the policy scores highest, in order of position.

    Rows with fewer candidates get rubbish in their place; they hold everything in order anyway.

    Raises:
      ValueError: the scores are not of shape [B, K, S], or not real numbers.
    """
    scores = policy.score(evidence)
    expected = evidence.keys.shape[:3]
    if scores.shape != expected or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            f"{type(policy).__name__}.score gave {scores.dtype}{list(scores.shape)}: it must be "
            f"one real number for each entry, [B, K, S] = {list(expected)}"
        )
    # A score that is not a number is the lowest of all.
    scores = jnp.where(evidence.live() & ~jnp.isnan(scores), scores, -jnp.inf)
    slots = scores.shape[-1]
    _, positions = jax.lax.top_k(scores.astype(jnp.float32), min(count, slots))
    positions = jnp.sort(positions.astype(jnp.int32), axis=-1)
    # Where there are more pins than slots, every row is in order, and these are not read.
    return jnp.pad(positions, ((0, 0), (0, 0), (0, max(0, count - slots))))
