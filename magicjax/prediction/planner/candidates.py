"""Candidates of the planner from drafters: name, cost, memory, and maximum depth."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from magicjax.decoding import footprint
from magicjax.drafters import (
    Drafter,
    FullCacheSpeculation,
    PageRetrieval,
    PromptLookup,
    SelfSpeculation,
    SmallModel,
    layer_skipping,
)
from magicjax.drafters.sparse import KV_DTYPES
from magicjax.drafters.spec import text_of
from magicjax.model import Model
from magicjax.prediction import cost_model
from magicjax.prediction.planner.planning import MAX_DEPTH, Candidate
from models import WeightFormat
from sharding import abstract_mesh

# On the target's weights.
TARGET_DRAFTERS = SelfSpeculation | PageRetrieval | FullCacheSpeculation


def model_sizes(model: Model, dtype: Any) -> cost_model.Sizes:
    """Returns the sizes of a model; `dtype` is that of an abstract one, which has no weights."""
    dtype = str(np.dtype(dtype if model.params is None else model.dtype))
    return cost_model.sizes_of(
        model.config,
        dtype,
        model.name or "the model",
        model.offload,
        model.weights,
        model.kv_bits,
    )


def name_of(drafter: Drafter) -> str:
    """Returns the text of the drafter.

    Raises:
      ValueError: the planner does not support the drafter.
    """
    if not isinstance(drafter, TARGET_DRAFTERS | SmallModel | PromptLookup):
        raise ValueError(
            f"the cost of {type(drafter).__name__} is not modelled: use SelfSpeculation, "
            "PageRetrieval, FullCacheSpeculation, SmallModel or PromptLookup"
        )
    return text_of(drafter)


def make_draft(drafter: Drafter, target: cost_model.Sizes, dtype: Any) -> cost_model.Draft:
    """Returns the drafter's model and cache for the cost model.

    Args:
      drafter: one that runs the target, a small model, or prompt lookup.
      target: sizes of the target.
      dtype: dtype of a small model without weights.

    Raises:
      ValueError: the planner does not support the drafter, or the target lacks its layers.
    """
    name_of(drafter)
    if isinstance(drafter, PromptLookup):
        return cost_model.Draft(None)
    assert isinstance(drafter, TARGET_DRAFTERS | SmallModel)
    sizes = target
    if isinstance(drafter, SmallModel):
        sizes = model_sizes(drafter.model, dtype)
    else:
        if drafter.layers is not None:
            layer_skipping.check(drafter.layers, target.num_layers, target.streamed)
            sizes = target.with_layers(len(layer_skipping.parse(drafter.layers)))
        if drafter.weights is not None:
            itemsize = WeightFormat.parse(drafter.weights).itemsize
            sizes = dataclasses.replace(sizes, matrix_itemsize=itemsize, streamed=False)
    if isinstance(drafter, PageRetrieval):
        size, every = drafter.page_size, drafter.refresh_every
        return cost_model.Draft(sizes, drafter.budget, page_size=size, every=every)
    sparse = getattr(drafter, "sparse", None)
    if sparse is None:
        return cost_model.Draft(sizes)
    return cost_model.Draft(sizes, sparse.budget, KV_DTYPES[sparse.kv_dtype])


def max_draft_depth(drafter: Drafter) -> int:
    """Returns the maximum depth of a tree, which the ring of the draft cache limits."""
    sparse = getattr(drafter, "sparse", None)
    if sparse is None:
        return MAX_DEPTH
    # A small model also commits the backlog of the previous round, at most one path.
    room = (sparse.ring - 1) // 2 if isinstance(drafter, SmallModel) else sparse.ring - 1
    return min(MAX_DEPTH, room)


def footprint_on(
    machine: cost_model.Machine, target: Model, drafter: Drafter | None, batch: int, context: int
) -> footprint.Footprint:
    """Returns the footprint on each device of a machine.

    A small model is divided over as many devices as its time is predicted for.

    Args:
      machine: divides rows and models.
      target, drafter: with or without weights; the drafter after `Drafter.for_target`.
      batch, context: B, and the slots of each row's cache.

    Raises:
      ValueError: a model does not divide over the machine.
    """
    if isinstance(drafter, SmallModel) and drafter.model.shards is None:
        draft = cost_model.Draft(model_sizes(drafter.model, target.dtype))
        shards = draft.machine(machine).model
        drafter = dataclasses.replace(
            drafter, model=dataclasses.replace(drafter.model, shards=shards)
        )
    mesh = abstract_mesh(machine.data, machine.model)
    return footprint.of_models(target, drafter, machine.rows(batch), context, mesh)


def free_memory(target: Model, machine: cost_model.Machine, batch: int, context: int) -> float:
    """Returns the bytes free on each device beside the target.

    Args:
      target: with or without weights.
      machine: divides rows and models.
      batch, context: B, and the slots of each row's cache.

    Raises:
      ValueError: the target does not fit, or does not divide over the machine.
    """

    def needed(batch: int) -> int:
        return footprint_on(machine, target, None, batch, context).resident

    memory = machine.device.memory
    if (free := memory - needed(batch)) >= 0:
        return free
    rows = footprint.largest(range(machine.data, batch, machine.data), memory, needed)
    remedy = (
        f"at most {rows} rows fit; use a smaller batch or more devices"
        if rows
        else "not one row fits; use more devices"
    )
    raise ValueError(
        f"batch={batch} with context={context} needs {(memory - free) / 1e9:.1f} GB on each of "
        f"{machine.devices} {machine.device.name} with {memory / 1e9:.0f} GB: {remedy}"
    )


def make_candidate(
    drafter: Drafter,
    target: cost_model.Sizes,
    dtype: Any,
    acceptance: Sequence[Sequence[float]],
    memory: int = 0,
) -> Candidate:
    """Returns the candidate of a drafter, for `planner.plan`.

    Args:
      drafter, target, dtype: arguments of `make_draft`.
      acceptance: [depths, ranks], see `magicjax.optimal`. Prompt lookup uses the first rank
        only: its trees branch at the root alone, and only chains are planned.
      memory: bytes of its weights and caches on each device.
    """
    if isinstance(drafter, PromptLookup):
        acceptance = [row[:1] for row in acceptance]
    return Candidate(
        name=name_of(drafter),
        draft=make_draft(drafter, target, dtype),
        acceptance=tuple(tuple(map(float, row)) for row in acceptance),
        deepest=max_draft_depth(drafter),
        memory=memory,
    )
