"""What all drafts on a sparse cache share: policy and budget, checked, and turned into a cache."""

import dataclasses
import operator
from typing import Any

from magicjax.kv_cache.attention_stats import Seen, Watch, newest
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache, Pins, gather
from magicjax.model import Model
from magicjax.policies import Evidence, Full, Policy, choose, find

KV_DTYPES = {None: None, "int8": 8, "int4": 4}
BUDGET = 256  # unless the user says otherwise


def resolve(drafter: Any, full_reads: str, *unused: str) -> None:
    """Turns a drafter's policy into an object and its budget into an int, and checks both.

    Args:
      drafter: with `policy`, `budget`, `kv_dtype`; frozen, and still in the making.
      full_reads: what the draft does with policy 'full', for the error.
      unused: fields that mean nothing then, besides budget and kv_dtype.

    Raises:
      ValueError: an unknown policy, or a full cache with something that it has no use for.
      TypeError: the policy is neither a name nor an object, or the budget is no whole number.
    """
    object.__setattr__(drafter, "policy", find(drafter.policy))
    if drafter.budget is not None:
        object.__setattr__(drafter, "budget", operator.index(drafter.budget))
    if isinstance(drafter.policy, Full):
        for name in ("budget", *unused, "kv_dtype"):
            value = getattr(drafter, name)
            if value is not None:
                raise ValueError(
                    f"{name}={value!r}: with policy 'full' the draft {full_reads}; give another "
                    f"policy, or leave {name} out"
                )


def sparse_of(drafter: Any) -> "Sparse | None":
    """Returns how the cache of a drafter that was `resolve`d is made sparse; None: it is not."""
    if isinstance(drafter.policy, Full):
        return None
    budget = BUDGET if drafter.budget is None else drafter.budget
    return Sparse(drafter.policy, budget, drafter.kv_dtype)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """How much of its context a draft sees.

    Attributes:
      policy: which entries are pinned.
      budget: C, slots for each layer and KV head; the layers' mean where a policy tells them apart.
      kv_dtype: of the entries: int8 or int4, with a scale for each token and head; None: the
        model's own.
    """

    policy: Policy
    budget: int
    kv_dtype: str | None

    @property
    def ring(self) -> int:
        """R, the slots of the ring."""
        return self.policy.ring(self.budget)

    def check(self, model: Model, needed: int, because: str) -> None:
        """Raises ValueError if the ring is smaller than `needed`, or there is nothing to pin."""
        if self.kv_dtype not in KV_DTYPES:
            names = ", ".join(name for name in KV_DTYPES if name)
            raise ValueError(f"kv_dtype={self.kv_dtype!r} is unknown: use {names}, or None")
        if self.kv_dtype == "int4" and model.config.head_dim % 2:
            raise ValueError(
                f"kv_dtype='int4' packs two elements in a byte, and heads have "
                f"{model.config.head_dim}: use int8"
            )
        pins = self.budget - self.ring
        if self.ring < needed:
            raise ValueError(
                f"budget={self.budget} leaves too small a ring for the newest tokens: {self.ring} "
                f"slots beside {pins} pinned ones, and it must have at least {because} = {needed}; "
                "use a larger budget, fewer pins, or a shallower tree"
            )
        if pins < 1:
            raise ValueError(
                f"budget={self.budget} leaves nothing to pin beside a ring of {self.ring}: use a "
                "larger budget, or a smaller `recent`"
            )
        self._check_pins(model.config.num_layers)

    def _check_pins(self, layers: int) -> None:
        """Raises ValueError unless the policy's own split of the budget is one."""
        pinned = self.policy.pinned(self.budget, layers)
        wanted = layers * (self.budget - self.ring)
        if len(pinned) != layers or min(pinned) < 0 or sum(pinned) != wanted:
            raise ValueError(
                f"{type(self.policy).__name__}.pinned({self.budget}, {layers}) gave {pinned}: it "
                f"must give {layers} numbers, none below 0, with the sum {wanted}"
            )

    def watch(self, refreshes: bool = False) -> Watch:
        """Returns what must be seen of attention for the policy to judge."""
        window, total = self.policy.window, self.policy.accumulates
        return Watch(window, total, rounds=refreshes and window > 0)

    def own(self, seen: Seen) -> Seen:
        """Returns what the policy asked for, of what an ensemble's members asked for together."""
        queries, window = seen.queries, self.policy.window
        if queries is not None:
            queries = tuple(newest(of_layer, window) for of_layer in queries) if window else None
        total = seen.total if self.policy.accumulates else None
        return dataclasses.replace(seen, queries=queries, total=total)

    def pins(self, model: Model, full: KVCache, seen: Seen, backend: str | None) -> Pins:
        """Returns the policy's choice for each layer, by its `own` part of what was seen."""
        candidates = (full.lengths - self.ring).clip(0)
        counts = self.policy.pinned(self.budget, len(full.k))
        pins = []
        for layer, (k, v, count) in enumerate(zip(full.k, full.v, counts, strict=True)):
            evidence = Evidence(
                keys=k,
                values=v,
                candidates=candidates,
                queries=seen.queries[layer] if seen.queries else None,
                accumulated=seen.total[layer] if seen.total else None,
                layer=model.first_layer + layer,
                config=model.config,
                split=model.split,
                backend=backend,
            )
            pins.append(choose(self.policy, evidence, count))
        return tuple(pins)

    def start(self, model: Model, full: KVCache, seen: Seen, backend: str | None) -> DraftCache:
        """Returns the draft cache of what `full` holds."""
        pins = self.pins(model, full, seen, backend)
        return gather(full, pins, self.ring, KV_DTYPES[self.kv_dtype])

    def num_bytes(self, model: Model, batch: int) -> int:
        """Returns the bytes of keys and values of the draft cache, scales included."""
        config, bits = model.config, KV_DTYPES[self.kv_dtype]
        # The layers' budgets differ, but their mean is the budget.
        if bits is None:
            return model.kv_bytes(batch, self.budget)
        of_entry = config.head_dim * bits // 8 + 4  # and a float32 scale
        return 2 * batch * config.num_layers * config.num_kv_heads * self.budget * of_entry
