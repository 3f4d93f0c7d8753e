"""A request: what `magicjax.generate` was asked for, as arrays and program settings.

`magicjax.decoding.preparation` makes requests from its arguments.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from magicjax.decoding.footprint import kv_bytes
from magicjax.decoding.rows import Rows
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.settings import PrefillSettings, Settings, StatsSpec
from magicjax.trees.token_tree import Tree
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

    Attributes:
      settings: static settings of the programs.
      target, drafter: the models.
      prompts: token ids of each row.
      params: one per row.
      rows: what the programs need of each row; placed on the devices by `place`.
      eos: tokens that end a text of the target.
      pad_token_id: pads rows that ended.
    """

    settings: Settings
    target: Model
    drafter: Drafter | None
    prompts: list[np.ndarray]
    params: tuple[SamplingParams, ...]
    rows: Rows
    eos: tuple[int, ...]
    pad_token_id: int

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
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of the KV caches of (target, drafter); nothing is allocated."""
        return kv_bytes(self.target, self.drafter, len(self.prompts), self.settings.capacity)
