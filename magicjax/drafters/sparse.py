"""Sparse draft caches: a policy and a budget, validated, and turned into a cache."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from magicjax import model
from magicjax.kv_cache.full_cache import KVCache, elements
from magicjax.kv_cache.model_stats import ModelStats, newest
from magicjax.kv_cache.sparse_cache import DraftCache, Pins, gather, window_slots
from magicjax.model import Model
from magicjax.policies import Evidence, Policy, StreamingLLM, choose
from magicjax.settings import StatsSpec

KVDtype = Literal["int8", "int4"]
KV_DTYPES = model.KV_DTYPES | {"int4": 4}
BUDGET = 256  # the default
PIN_BYTES = 4  # of the position of a pinned entry

# Help of the options that drafters with a cache share.
POLICY_HELP = "which entries of the cache are pinned"
BUDGET_HELP = "slots of a sparse cache for each layer and KV head"
KV_DTYPE_HELP = "dtype of a sparse cache; default: the dtype of the model"
DRAW_HELP = (
    "how children are drawn under sampling; default: without_replacement, or top (the most likely) "
    "in a dynamic tree"
)


def check_budget(budget: int) -> None:
    """Raises ValueError unless a draft can read so many slots."""
    if budget < 1:
        raise ValueError(
            f"budget={budget}: a draft cache needs at least 1 slot for each layer and KV head; "
            f"omit budget for the default of {BUDGET}"
        )


def check_refresh(every: int) -> None:
    """Raises ValueError unless a draft can choose its entries again after so many rounds."""
    if every < 1:
        raise ValueError(
            f"refresh_every={every}: it must be at least 1 round; omit it for the default"
        )


@dataclasses.dataclass(frozen=True)
class SparseSettings:
    """The size and contents of a sparse draft cache.

    Attributes:
      policy: chooses the pinned entries.
      budget: C, slots for each layer and KV head; the mean over layers if the policy varies it.
        Layers with a sliding window have only a ring, of `window_slots`.
      kv_dtype: dtype of the entries: int8 or int4, with a scale for each token and head; None: the
        model's dtype.
    """

    policy: Policy
    budget: int
    kv_dtype: str | None

    @property
    def ring(self) -> int:
        """R, the slots of the ring."""
        return self.policy.ring(self.budget)

    @property
    def num_pinned(self) -> int:
        """P = C - R, the pinned slots; the mean over layers."""
        return self.budget - self.ring

    def check(self, model: Model, needed: int, because: str) -> None:
        """Raises ValueError if the ring has fewer than `needed` slots, or nothing can be pinned."""
        if self.kv_dtype == "int4" and model.config.head_dim % 2:
            raise ValueError(
                f"kv_dtype='int4' packs two elements into a byte and needs an even head "
                f"dimension, not {model.config.head_dim}: use int8"
            )
        if model.config.kv_head_dim != model.config.head_dim:
            self._check_alibi()
        if self.policy.rotates and getattr(model.config, "unrotated_layers", False):
            raise ValueError(
                f"policy={self.policy!r} rotates queries, and some layers of the model have no "
                "rotary positions: use a policy that does not, such as snapkv or keydiff"
            )
        check_context(model, self.budget)
        if self.ring < needed:
            raise ValueError(
                f"budget={self.budget} is too small: its ring has {max(self.ring, 0)} slots "
                f"besides {self.num_pinned} pinned ones, and needs at least {because} = {needed}; "
                "use a larger budget, fewer pins, or a shallower tree"
            )
        if self.num_pinned < 1:
            raise ValueError(
                f"budget={self.budget} leaves no pinned slots besides a ring of {self.ring}: use a "
                "larger budget, or a smaller `recent`"
            )
        self._check_windows(model, needed, because)
        layers = model.pinnable.count(True)
        if not layers:
            return
        pinned, total = self.policy.pinned(self.budget, layers), layers * self.num_pinned
        if len(pinned) != layers or min(pinned) < 0 or sum(pinned) != total:
            raise ValueError(
                f"{type(self.policy).__name__}.pinned({self.budget}, {layers}) returned {pinned}: "
                f"it must return {layers} numbers, none below 0, with the sum {total}"
            )

    def _check_windows(self, model: Model, needed: int, because: str) -> None:
        """Raises ValueError if the policy or a round does not suit layers with sliding windows."""
        rings = [window_slots(window, self.budget) for window in model.windows if window]
        if rings and min(rings) < needed:
            raise ValueError(
                f"layers with a sliding window have a ring of {min(rings)} slots in a draft cache, "
                f"and it needs at least {because} = {needed}: use a shallower tree"
            )
        if rings and None not in model.windows and not isinstance(self.policy, StreamingLLM):
            raise ValueError(
                f"policy={self.policy!r}: every layer of the model has a sliding window, and a "
                "sparse cache keeps the newest entries of such layers; use policy='streaming'"
            )

    def slots(self, model: Model) -> tuple[int, ...]:
        """Returns C of each layer, the slots of the cache."""
        pinned = self._pinned(model)
        layers = zip(pinned, model.windows, model.has_kv, strict=True)
        return tuple(
            0
            if not has_kv
            else self.ring + count
            if window is None
            else window_slots(window, self.budget)
            for count, window, has_kv in layers
        )

    def _pinned(self, model: Model) -> tuple[int, ...]:
        """Returns P of each layer: none in those with a sliding window or without slots."""
        counts = iter(self.policy.pinned(self.budget, model.pinnable.count(True)))
        return tuple(next(counts) if pinnable else 0 for pinnable in model.pinnable)

    def stats_spec(self, refreshes: bool = False) -> StatsSpec:
        """Returns the attention statistics that the policy needs."""
        window, total = self.policy.window, self.policy.accumulates
        return StatsSpec(window, total, rounds=refreshes and window > 0)

    def select_stats(self, stats: ModelStats) -> ModelStats:
        """Returns the statistics that the policy needs; an ensemble can have collected more."""
        queries, window = stats.queries, self.policy.window
        if queries is not None:
            queries = (
                tuple(layer and newest(layer, window) for layer in queries) if window else None
            )
        total = stats.total if self.policy.accumulates else None
        return dataclasses.replace(stats, queries=queries, total=total, layer_inputs={})

    def choose_pins(
        self, model: Model, full: KVCache, stats: ModelStats, backend: str | None
    ) -> Pins:
        """Returns the positions that the policy pins in each layer, given selected statistics."""
        candidates = (full.lengths - self.ring).clip(0)
        counts, pins = self._pinned(model), list[Any]()
        for layer, (k, v, count) in enumerate(zip(full.k, full.v, counts, strict=True)):
            if not model.has_kv[layer]:
                pins.append(None)
                continue
            if not model.pinnable[layer]:
                pins.append(jnp.zeros((*k.shape[:2], 0), jnp.int32))
                continue
            evidence = Evidence(
                keys=elements(k, model.dtype),
                values=elements(v, model.dtype),
                candidates=candidates,
                queries=stats.queries[layer] if stats.queries else None,
                accumulated=stats.total[layer] if stats.total else None,
                layer=jnp.int32(model.first_layer + layer),
                config=model.layer_config(layer),
                split=model.split,
                backend=backend,
            )
            pins.append(choose(self.policy, evidence, count))
        return tuple(pins)

    def make_cache(
        self, model: Model, full: KVCache, stats: ModelStats, backend: str | None
    ) -> DraftCache:
        """Returns the draft cache of the tokens in `full`."""
        pins = self.choose_pins(model, full, stats, backend)
        sizes = zip(self.slots(model), pins, strict=True)
        rings = [0 if p is None else n - p.shape[2] for n, p in sizes]
        return gather(full, pins, rings, KV_DTYPES[self.kv_dtype], model.dtype)

    def _check_alibi(self) -> None:
        """Raises ValueError if the cache cannot have keys with positions."""
        if self.kv_dtype is not None:
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} rounds the positions that cached keys have with "
                "ALiBi: omit kv_dtype"
            )
        if self.policy.reads_keys:
            raise ValueError(
                f"policy={self.policy!r} compares keys, which have positions with ALiBi: use a "
                "policy that does not, such as streaming, snapkv or tova"
            )

    def num_bytes(self, model: Model, batch: int) -> int:
        """Returns the bytes of the draft cache: keys and values, scales, positions of pins."""
        bits = KV_DTYPES[self.kv_dtype]
        slots, pinned = enumerate(self.slots(model)), enumerate(self._pinned(model))
        entries = sum(count * model.slot_bytes(layer, bits) for layer, count in slots)
        pins = sum(count * model.layer_config(layer).num_kv_heads for layer, count in pinned)
        return batch * (entries + PIN_BYTES * pins)


def check_context(model: Model, budget: int) -> None:
    """Raises ValueError if a budget exceeds the context of its model."""
    longest = model.config.max_positions
    if longest is not None and budget > longest:
        raise ValueError(
            f"budget={budget} is larger than the context of the model, {longest} tokens: "
            "use a smaller budget, or a full cache (the drafter full, or small:PATH:full)"
        )
