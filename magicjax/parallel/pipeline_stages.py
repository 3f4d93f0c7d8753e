"""Pipeline stages: a target's layers and their caches, divided over groups of devices.

SpecInfer serves its largest model this way over two nodes (arXiv 2305.09781, section 6.2). The
stages run every pass of the target in micro-batches: prefill, drafts of self-speculation, and
verification. Every stage runs everything else: embeddings, small models, prompt lookup, and all
decisions, which depend on the last stage's hidden states. Stages therefore exchange activations,
and the few integers that the first stage decides.

Per-layer arrays are stacked by stage. Slot i of stage s holds layer s * L/S + i: a parameter is
[S, ...], and a cache's [B, K, slots, D] is [S * B, K, slots, D].
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import models
from magicjax.parallel.offloading import check_independent
from models import ShardingFn
from sharding import STAGES


def check_layers(config: Any, stages: int) -> None:
    """Raises ValueError unless the layers divide over the stages into equal parts."""
    layers = config.num_layers
    if stages > 1:
        check_independent(config, f"stage={stages}", "use a mesh without stages")
    names = "slides", "rotations", "linear"  # another decoder than the package's may have none
    kinds = list(zip(*(getattr(config, name, (0,) * layers) for name in names), strict=True))

    def alike(count: int) -> bool:
        return all(kinds[i] == kinds[i % (layers // count)] for i in range(layers))

    divisors = [n for n in range(1, layers + 1) if layers % n == 0 and alike(n)]
    if stages in divisors:
        return
    below, above = max(n for n in divisors if n < stages), [n for n in divisors if n > stages]
    nearest = " or ".join(map(str, [below, *above[:1]]))
    if layers % stages:
        raise ValueError(f"stage={stages} does not divide its {layers} layers: use {nearest}")
    raise ValueError(
        f"stage={stages} gives stages different layers, by sliding windows, rotary positions "
        f"or gated delta nets, and all stages must be alike: use {nearest}"
    )


def check_formats(formats: models.MatrixFormats, layers: int, stages: int) -> None:
    """Raises ValueError unless the matrices of all stages have the same formats."""
    of_layer = [formats.within(f"{models.BLOCK}{layer}") for layer in range(layers)]
    if any(of_layer[i] != of_layer[i % (layers // stages)] for i in range(layers)):
        raise ValueError(
            f"the target's layers have matrices in several formats ({formats}), and all stages "
            "need the same: load the target with the mesh"
        )


def check_micro_batches(micro_batches: int | None, rows: int, stages: int) -> None:
    """Raises ValueError unless `micro_batches` divides the rows of a device group."""
    if micro_batches is None:
        return
    if stages == 1:
        raise ValueError(
            f"micro_batches={micro_batches} requires a mesh with stages: pass one, or remove "
            "micro_batches"
        )
    if micro_batches < 1 or rows % micro_batches:
        divisors = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ValueError(
            f"micro_batches={micro_batches} does not divide the {rows} rows of a device group: use "
            f"one of {divisors}"
        )


def best_micro_batches(rows: int, stages: int, weights: int, caches: int) -> int:
    """Returns the number of micro-batches that minimizes the bytes read in a decoding pass.

    A pass takes M + S - 1 steps. In each step a stage reads all of its weights, and the caches of
    one micro-batch. Few micro-batches are best where weights dominate, many where caches do.

    Args:
      rows: the rows of a device group.
      stages: S.
      weights, caches: bytes that a pass over all rows reads.
    """
    counts = [n for n in range(1, rows + 1) if rows % n == 0]
    return min(counts, key=lambda n: (n + stages - 1) * (weights + caches / n))


def check_policy(drafter: Any, layers: int, stages: int) -> None:
    """Raises ValueError if a draft on the target's layers does not support stages.

    Its copy would be quantized, it would skip layers, or its budgets differ.
    """
    for name in ("weights", "layers") if stages > 1 else ():
        if value := getattr(drafter, name, None):
            raise ValueError(
                f"{name}={value!r} of self-speculation with stage={stages} is not supported: omit "
                f"the drafter's {name}, or use a mesh without stages"
            )
    sparse = getattr(drafter, "sparse", None)
    if sparse is None or stages == 1:
        return
    pinned, local_layers = sparse.policy.pinned(sparse.budget, layers), layers // stages
    if any(pinned[i] != pinned[i % local_layers] for i in range(layers)):
        raise ValueError(
            f"{type(sparse.policy).__name__} gives layers different budgets, and all stages must "
            "have the same: use another policy, or a mesh without stages"
        )


def stack_layers(params: Any, stages: int) -> Any:
    """Returns a model's variables with the blocks' parameters stacked by stage.

    Args:
      params: the variables of all layers: arrays, shapes, or boxed shapes.
      stages: S.
    """
    stacked, layers = models.split_blocks(params)
    slots = len(layers) // stages
    for slot in range(slots):
        stacked["params"][f"{models.BLOCK}{slot}"] = jax.tree.map(
            lambda *values: _stack(values), *layers[slot::slots], is_leaf=models.is_boxed
        )
    return stacked


def _stack(values: Sequence[Any]) -> Any:
    first = values[0]
    if models.is_boxed(first):
        value = _stack([box.value for box in values])
        return first.replace(value=value, names=(STAGES, *first.names))
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(values), *first.shape), first.dtype)
    return jnp.stack(values)


def _shardings(module: nn.Module, stages: int, sharding_of: ShardingFn) -> Any:
    boxes = stack_layers(models.abstract_params(module), stages)
    return jax.tree.map(lambda box: sharding_of(box.names), boxes, is_leaf=models.is_boxed)


def load_params(checkpoint: models.Checkpoint, stages: int, sharding_of: ShardingFn) -> Any:
    """Returns a checkpoint's variables stacked by stage; each process keeps only its part.

    Args:
      checkpoint: the result of `models.load_checkpoint(lazy_blocks=True, uniform_layers=True)`.
        `stages` of its blocks are in host memory at a time.
      stages: S.
      sharding_of: the sharding of a parameter, by its logical axes.
    """
    module, loaded = checkpoint.module, dict(checkpoint.params["params"])
    boxes = stack_layers(models.abstract_params(module), stages)["params"]
    layers = module.config.num_layers
    slots = layers // stages

    def put(box, *values):
        def read(index):
            local_stages = range(*index[0].indices(stages))
            parts = [np.asarray(values[s][index[1:]], box.value.dtype) for s in local_stages]
            return np.stack(parts)

        return jax.make_array_from_callback(box.value.shape, sharding_of(box.names), read)

    for slot in range(slots):
        blocks = [checkpoint.read_block(layer) for layer in range(slot, layers, slots)]
        name = f"{models.BLOCK}{slot}"
        loaded[name] = jax.tree.map(put, boxes[name], *blocks, is_leaf=models.is_boxed)
    return {"params": loaded}


def init_params(module: nn.Module, seed: int, stages: int, sharding_of: ShardingFn) -> Any:
    """Returns the parameters of `models.init_params`, stacked by stage and sharded."""

    def init(key):
        return stack_layers(nn.meta.unbox(models.init_boxed(module, key)), stages)

    shardings = _shardings(module, stages, sharding_of)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))
