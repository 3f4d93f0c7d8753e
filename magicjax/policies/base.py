"""The base class of policies, which score the committed entries for a sparse draft cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax.kv_cache.model_stats import RecentQueries
from magicjax.model import softcap_of
from magicjax.options import check_options, fields_of
from pallas_kernels import prefix_mass
from sharding import Split, collectives


@struct.dataclass
class Evidence:
    """What a policy can read of one layer.

    Attributes:
      keys, values: [B, K, S, D], committed entries in order of position; keys are rotated.
      candidates: int32 [B], positions below it can be pinned; later ones are in the ring, or empty.
      queries: the newest `window` queries; None if the policy has no window.
      accumulated: float32 [B, K, S], the attention of all queries so far to each position, summed
        over the G heads that share a KV head; None unless the policy accumulates. Read `total`.
      layer: int32, the layer, from 0.
      config: static; of the model, with `rope` if its positions are rotary.
      split: static; how the model is sharded. K and H count this device's heads; sums over all
        heads, or over the query heads of a KV head, must be summed over devices.
      backend: static; of `prefix_mass`.
    """

    keys: Float[Array, "B K S D"]
    values: Float[Array, "B K S D"]
    candidates: Int[Array, "B"]
    queries: RecentQueries | None
    accumulated: Float[Array, "B K S"] | None
    layer: Int[Array, ""]
    config: Any = struct.field(pytree_node=False)
    split: Split = struct.field(pytree_node=False, default=Split())
    backend: str | None = struct.field(pytree_node=False, default=None)

    def live(self) -> Array:
        """Returns bool [B, 1, S], which positions can be pinned."""
        return (jnp.arange(self.keys.shape[2]) < self.candidates[:, None])[:, None]

    @property
    def total(self) -> Float[Array, "B K S"]:
        """The attention of all queries so far to each position.

        Raises ValueError unless the policy accumulates.
        """
        if self.accumulated is None:
            raise ValueError("a policy that reads `evidence.total` must set accumulates = True")
        return self.accumulated

    def window_mass(self, scaled: bool = True) -> Float[Array, "B K S"]:
        """Returns the attention of the newest queries to each position, float32.

        It is summed over the queries and over the G heads that share a KV head.

        Args:
          scaled: divide scores by sqrt(D) before the softmax, as the model does.
        """
        if self.queries is None:
            raise ValueError("a policy that reads `evidence.queries` must set `window`")
        q, seen = self.queries.q, self.queries.seen
        if scaled:
            options: Any = dict(softcap=softcap_of(self.config), backend=self.backend)
            mass = prefix_mass(q, self.keys, seen, self.queries.lse, **options)
        else:
            mass = prefix_mass(q * q.shape[-1] ** 0.5, self.keys, seen, backend=self.backend)
        return collectives.psum(mass, self.split.replica_axes)

    def mean_over_heads(self, x: Float[Array, "B K S"]) -> Float[Array, "B 1 S"]:
        """Returns the mean over all KV heads of the model."""
        mean = x.mean(1, keepdims=True)
        return collectives.psum(mean, self.split.kv_axes) / self.split.kv_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Scores the committed entries, of which a sparse draft cache pins the highest.

    The other slots of the cache are a ring of the newest tokens.

    A custom policy is a frozen dataclass with a `score` method, whose result is validated when the
    first program is traced.

    Attributes:
      recent: R, the slots of the ring of the newest tokens; None: half the budget.

    Raises:
      ValueError: recent < 1.
      TypeError: a field has a value of another type.
    """

    recent: int | None = None

    # The statistics it needs; class attributes, or fields if users can set them.
    window = 0  # how many of the newest queries
    accumulates = False  # whether the attention of all queries is summed
    reads_keys = False  # whether it computes with `evidence.keys`; with ALiBi they have positions
    rotates = False  # whether it rotates queries, which not all layers of some models do

    def __post_init__(self):
        check_options(self, fields_of(type(self)).values())
        if self.recent is not None and self.recent < 1:
            raise ValueError(f"recent={self.recent}: the ring needs at least 1 slot")

    def score(self, evidence: Evidence) -> Float[Array, "B K S"]:
        """Returns the score of each entry; the candidates with the highest scores are pinned.

        Among equal scores the earlier entries are pinned. Scores beyond the candidates are ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `score`")

    def ring(self, budget: int) -> int:
        """Returns R, the slots of the ring in a cache of `budget` slots."""
        return (budget + 1) // 2 if self.recent is None else self.recent

    def pinned(self, budget: int, layers: int) -> tuple[int, ...]:
        """Returns P for each layer; the sum is layers * (budget - R)."""
        return (budget - self.ring(budget),) * layers


@functools.partial(jax.jit, static_argnames=("policy", "count"))  # traced once for all layers
def choose(policy: Policy, evidence: Evidence, count: int) -> Int[Array, "B K P"]:
    """Returns the `count` candidates with the highest scores, in order of position.

    The result is undefined for rows with fewer candidates, whose cache holds every token in order.

    Raises:
      ValueError: the scores do not have shape [B, K, S], or are not floating-point numbers.
    """
    scores = policy.score(evidence)
    expected = evidence.keys.shape[:3]
    if scores.shape != expected or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            f"{type(policy).__name__}.score returned {scores.dtype}{list(scores.shape)}: it must "
            f"return one float for each entry, [B, K, S] = {list(expected)}"
        )
    # NaN is the lowest score.
    scores = jnp.where(evidence.live() & ~jnp.isnan(scores), scores, -jnp.inf)
    slots = scores.shape[-1]
    _, positions = jax.lax.top_k(scores.astype(jnp.float32), min(count, slots))
    positions = jnp.sort(positions.astype(jnp.int32), axis=-1)
    # With more pins than slots every row is in order, and the padding is never read.
    return jnp.pad(positions, ((0, 0), (0, 0), (0, max(0, count - slots))))
