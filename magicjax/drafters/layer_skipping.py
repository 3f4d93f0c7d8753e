"""Layer skipping: the target drafts with some of its own layers.

A draft of the layers 0, 2 and 3 of four runs these blocks, and reads the keys and values that the
target computed in the same layers. Nothing is copied: all functions return references to the
target's arrays. Sources: Draft & Verify (arXiv 2309.08168); the first layers alone are the early
exit of LayerSkip (arXiv 2404.16710).

`layers` is the ascending indices of the layers in the target; None: all of them.
"""

import dataclasses
import re
from typing import Any

import models
from magicjax.drafters.base import RoundOutcome
from magicjax.kv_cache.full_cache import KVCache, select
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.model import Model

LayerIndices = tuple[int, ...] | None


def parse(text: str) -> tuple[int, ...]:
    """Returns the layers of a text: "0-2,5" is 0, 1, 2, 5.

    Raises:
      ValueError: the text is not such a list, or its numbers do not increase.
    """
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text):
        raise ValueError(
            f"layers={text!r}: write the numbers of layers from 0 and ranges of them, such as "
            "0-9,20-29"
        )
    ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    layers = tuple(n for ends in ranges for n in range(ends[0], ends[-1] + 1))
    if any(ends[0] > ends[-1] for ends in ranges) or sorted({*layers}) != [*layers]:
        raise ValueError(f"layers={text!r}: write each layer once, in ascending order")
    return layers


def check(text: str, num_layers: int, offload: bool = False, stages: int = 1) -> None:
    """Raises ValueError unless a target can draft with the layers of `text`.

    Args:
      text: numbers and ranges of layers, such as "0-9,20-29".
      num_layers: the target's number of layers.
      offload: whether the target's blocks are in host memory.
      stages: the target's pipeline stages.
    """
    problem, layers = None, parse(text)
    if layers[-1] >= num_layers:
        problem = f"the layers of the target are 0 to {num_layers - 1}; use some of them"
    elif len(layers) == num_layers:
        problem = f"the target has no other layers than these {num_layers}; omit layers"
    elif offload:
        problem = (
            "the target is offloaded, and every draft step would stream the blocks; omit layers, "
            "or load the target without offload"
        )
    elif stages > 1:
        problem = (
            f"the target has {stages} stages, each with layers of its own; omit layers, or use a "
            "mesh without stages"
        )
    if problem:
        raise ValueError(f"layers={text!r}: {problem}")


def of_model(target: Model, layers: LayerIndices) -> Model:
    """Returns the model of these layers of the target, with its embeddings and final norm."""
    if layers is None:
        return target
    module, params = models.of_layers(target.module, layers), target.params
    if params is not None:
        others, blocks = models.split_blocks(params)
        chosen = {f"{models.BLOCK}{i}": blocks[layer] for i, layer in enumerate(layers)}
        params = {"params": others["params"] | chosen}
    return dataclasses.replace(target, module=module, params=params)


def of_cache(cache: KVCache, layers: LayerIndices) -> KVCache:
    """Returns the target's cache with these layers only."""
    return cache if layers is None else cache.of_layers(layers)


def of_stats(stats: ModelStats, layers: LayerIndices) -> ModelStats:
    """Returns the target's attention statistics with these layers only."""
    queries, total = _select(stats.queries, layers), _select(stats.total, layers)
    return dataclasses.replace(stats, queries=queries, total=total)


def of_outcome(outcome: RoundOutcome, layers: LayerIndices) -> RoundOutcome:
    """Returns the outcome of a round with these layers only."""
    return dataclasses.replace(
        outcome,
        kv=_select(outcome.kv, layers),
        queries=_select(outcome.queries, layers),
        cache=of_cache(outcome.cache, layers),
    )


def _select(values: Any, layers: LayerIndices) -> Any:
    """Returns the values of these layers, given one for each layer; None remains None."""
    return values if values is None or layers is None else select(values, layers)
