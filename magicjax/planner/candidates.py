"""Drafters as the planner sees them: what each is called, what it costs, how deep it can draft."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from magicjax import cost_model
from magicjax.drafters import Drafter, LookUp, SelfSpeculation, SmallModel
from magicjax.drafters.sparse import KV_DTYPES
from magicjax.model import Model
from magicjax.planner.planning import MAX_DEPTH, Candidate
from magicjax.policies import POLICIES


def sizes_of_model(model: Model, dtype: Any) -> cost_model.Sizes:
    """Returns the sizes of a model; `dtype` of a skeleton, which has none."""
    own = dtype if model.params is None else model.dtype
    return cost_model.sizes_of(
        model.config, str(np.dtype(own)), model.name or "the model", model.offload
    )


def name_of(drafter: Drafter) -> str:
    """Returns the drafter as commands write it, as far as they can.

    Raises:
      ValueError: it is none that can be planned with.
    """
    if isinstance(drafter, LookUp):
        return f"look-up:{drafter.max_ngram}"
    if not isinstance(drafter, SelfSpeculation | SmallModel):
        raise ValueError(
            f"{type(drafter).__name__} cannot be planned with: what it costs is not known; use "
            "SelfSpeculation, SmallModel or LookUp"
        )
    kind = f"small:{drafter.model.name}" if isinstance(drafter, SmallModel) else "self"
    if drafter.sparse is None:
        return f"{kind}:full"
    policy = type(drafter.sparse.policy)
    name = next((n for n, known in POLICIES.items() if known is policy), policy.__name__)
    return f"{kind}:{name}:{drafter.sparse.budget}"


def draft_of(drafter: Drafter, target: cost_model.Sizes, dtype: Any) -> cost_model.Draft:
    """Returns what the drafter costs.

    Args:
      drafter: one that has a `name_of`.
      target: the target's sizes.
      dtype: of a small model that is a skeleton.
    """
    name_of(drafter)
    if isinstance(drafter, LookUp):
        return cost_model.Draft(None)
    assert isinstance(drafter, SelfSpeculation | SmallModel)
    sizes = target
    if isinstance(drafter, SmallModel):
        sizes = sizes_of_model(drafter.model, dtype)
    if drafter.sparse is None:
        return cost_model.Draft(sizes)
    return cost_model.Draft(sizes, drafter.sparse.budget, KV_DTYPES[drafter.sparse.kv_dtype])


def deepest_of(drafter: Drafter) -> int:
    """Returns the deepest tree that its ring has room for; below 1: none."""
    sparse = getattr(drafter, "sparse", None)
    if sparse is None:
        return MAX_DEPTH
    # A round of a small model commits a path behind a lead as long.
    room = (sparse.ring - 1) // 2 if isinstance(drafter, SmallModel) else sparse.ring - 1
    return min(MAX_DEPTH, room)


def candidate_of(
    drafter: Drafter,
    target: cost_model.Sizes,
    dtype: Any,
    acceptance: Sequence[Sequence[float]],
    **measured: Any,
) -> Candidate:
    """Returns the drafter as a way to draft, for `planner.plan`.

    Args:
      drafter, target, dtype: as for `draft_of`.
      acceptance: [depths, ranks], as `magicjax.optimal` takes it; of a look-up only the first rank
        counts, because its trees branch at the root alone, and only chains are planned.
      measured: what else a trial has measured of it, fields of `Candidate`.
    """
    if isinstance(drafter, LookUp):
        acceptance = [row[:1] for row in acceptance]
    return Candidate(
        name=name_of(drafter),
        draft=draft_of(drafter, target, dtype),
        acceptance=tuple(tuple(map(float, row)) for row in acceptance),
        deepest=deepest_of(drafter),
        shared=isinstance(drafter, SelfSpeculation),
        **measured,
    )
