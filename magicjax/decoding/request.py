"""A request: what `magicjax.generate` was asked for, as arrays and program settings.

`magicjax.decoding.preparation` makes requests from its arguments.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt32

from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.drafters import Drafter
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.settings import PrefillSettings, Settings, StatsSpec
from magicjax.trees.token_tree import Tree
from magicjax.verification.logits_processor import LogitsProcessor
from magicjax.verification.sampling import Sampling
from sharding import AnyMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The keyword arguments of `magicjax.generate`, which documents them.

    A drafter is a `Drafter` or its text. `magicjax.generation` also takes what `magicjax.Auto`
    describes, and `magicjax.decoding` does not.
    """

    drafter: Any = None
    tree: Tree | str | None = None
    verifier: str | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    backend: str | None = None
    mesh: AnyMesh | None = None
    micro_batches: int | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """A validated request.

    Until `place` moves them to the devices, its arrays are numpy arrays, and under sampling the row
    keys are JAX arrays.

    Attributes:
      settings: static settings of the programs.
      target, drafter: the models.
      prompts: token ids of each row.
      params: of each row.
      tokens: int32 [B, T], the prompts, right-padded.
      lengths: int32 [B], of the prompts.
      limits: int32 [B], the maximum number of new tokens.
      eos: int32 [B, E], tokens that end each row; -1 for none.
      sampling: parameters and key of each row; None if all rows are greedy.
      wants_logprobs: bool [B].
      speculative: bool [B].
      pad_token_id: pads rows that ended.
      processor: of the rows' logits; None if no row has one.
      allowed: uint32 [B, W], the first tokens that the rows' grammars allow
        (`magicjax.grammars.masking`); None if no row has a grammar.
    """

    settings: Settings
    target: Model
    drafter: Drafter | None
    prompts: list[np.ndarray]
    params: tuple[SamplingParams, ...]
    tokens: Int[Any, "B T"]
    lengths: Int[Any, "B"]
    limits: Int[Any, "B"]
    eos: Int[Any, "B E"]
    sampling: Sampling | None
    wants_logprobs: Bool[Any, "B"]
    speculative: Bool[Any, "B"]
    pad_token_id: int
    processor: LogitsProcessor | None = None
    allowed: UInt32[Any, "B W"] | None = None

    @property
    def prefill_settings(self) -> PrefillSettings:
        """Static settings of the program `prefill`."""
        stats_spec = StatsSpec() if self.drafter is None else self.drafter.stats_spec()
        return PrefillSettings(
            capacity=self.settings.capacity,
            chunk=self.settings.chunk,
            backend=self.settings.backend,
            stats_spec=dataclasses.replace(stats_spec, rounds=False),  # concerns decoding only
            mesh=self.settings.mesh,
            replicated_rows=self.settings.replicated_rows,
            logprobs=self.settings.logprobs,
        )

    @property
    def prefill_arguments(self) -> tuple:
        """Arguments of the program `prefill`."""
        per_row = self.tokens, self.lengths, self.sampling, self.processor, self.allowed
        return self.target, *per_row, self.eos

    def init_arguments(self, cache: KVCache, prefilled: Prefilled) -> tuple:
        """Returns the arguments of the program `init`, which runs on the results of `prefill`."""
        per_row = self.tokens, self.limits, self.eos, self.sampling
        flags = self.wants_logprobs, self.speculative
        return self.target, self.drafter, cache, prefilled, *per_row, *flags

    def loop_arguments(self, state: DecodeState) -> tuple:
        """Returns the arguments of the programs `decode`, `decode_until_row_ends` and `step`."""
        return self.target, self.drafter, state

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of the KV caches of (target, drafter); nothing is allocated."""
        batch, capacity = len(self.prompts), self.settings.capacity
        draft = 0
        if self.drafter is not None:
            draft = self.drafter.cache_bytes(self.target, batch, capacity)
        return self.target.kv_bytes(batch, capacity), draft
