"""Pipeline stages: a target's layers, and their caches, divided over groups of devices.

SpecInfer serves its largest model so, over two nodes (arXiv 2305.09781, section 6.2). Every pass of
the target goes through the stages in micro-batches: prefill, drafts of self-speculation, and
verification. All else runs on every stage: embeddings, small models, look-ups, and what is decided
on the last stage's hidden states, which all of them get. So between stages travel activations, and
the few integers that the first stage has decided for all.

What belongs to single layers is held stage by stage. Slot i of stage s is layer s * L/S + i: a
parameter is [S, ...] of all stages, a cache's [B, K, slots, D] is [S * B, K, slots, D].
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import models
from models import Attend, Place
from sharding import STAGE, AnyMesh, pipeline

if TYPE_CHECKING:
    from magicjax.model import Model


def run_blocks(
    model: "Model",
    x: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attend: Attend,
) -> tuple[Float[Array, "B T E"], tuple]:
    """Returns (the last block's output, on the last stage; what `attend` kept of its own layers).

    Args:
      model: whose module has this stage's layers.
      x: the first block's input.
      positions: of the tokens.
      attend: with `rows(first, count)`, the same for some rows of the batch.
    """
    rows = x.shape[0] // model.micro_batches

    def run(x, first):
        at, of_rows = positions, attend
        if first is not None:
            at = jax.lax.dynamic_slice_in_dim(positions, first, rows)
            of_rows = attend.rows(first, rows)  # type: ignore[attr-defined]  # ours all have it
        kept = []
        for layer in range(model.config.num_layers):
            x, of_layer = model.module.apply(model.params, x, at, of_rows, layer, method="block")
            kept.append(of_layer)
        return x, tuple(kept)

    return pipeline.pipelined(run, x, model.micro_batches, alike(model))


def from_last(model: "Model", hidden: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
    """Returns the last stage's hidden states, on every stage."""
    return pipeline.from_last(hidden, alike(model))


def alike(model: "Model") -> tuple[str, ...]:
    """Returns the axes along which devices have the same hidden states and can divide them."""
    divides = model.config.hidden_size % model.split.shards == 0
    return model.split.axes if divides else ()


def check(layers: int, stages: int) -> None:
    """Raises ValueError unless the layers divide over the stages."""
    if layers % stages:
        fits = [n for n in range(1, layers + 1) if layers % n == 0]
        below, above = max(n for n in fits if n < stages), [n for n in fits if n > stages]
        nearest = " or ".join(map(str, [below, *above[:1]]))
        raise ValueError(f"stage={stages} does not divide its {layers} layers: use {nearest}")


def check_micro_batches(given: int | None, rows: int, stages: int) -> None:
    """Raises ValueError unless the rows of a group of devices go in so many micro-batches."""
    if given is None:
        return
    if stages == 1:
        raise ValueError(
            f"micro_batches={given} is for a mesh with stages: give one, or leave it out"
        )
    if given < 1 or rows % given:
        fits = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ValueError(
            f"micro_batches={given} does not divide the {rows} rows of a group of devices: use one "
            f"of {fits}"
        )


def best_micro_batches(rows: int, stages: int, weights: int, caches: int) -> int:
    """Returns the number of micro-batches in which a pass of decoding is fastest, as bytes go.

    A pass takes M + S - 1 turns. In a turn a stage reads its weights, all of them for every
    micro-batch, and the caches of the micro-batch's rows: so few of them are best where weights are
    most of the bytes, and many where caches are.

    Args:
      rows: of a group of devices.
      stages: S.
      weights, caches: bytes that a pass over all rows reads.
    """
    counts = [n for n in range(1, rows + 1) if rows % n == 0]
    return min(counts, key=lambda n: (n + stages - 1) * (weights + caches / n))


def check_policy(drafter: Any, layers: int, stages: int) -> None:
    """Raises ValueError if a draft on the target's layers has another budget in another stage."""
    sparse = getattr(drafter, "sparse", None)
    if sparse is None or stages == 1:
        return
    pinned, own = sparse.policy.pinned(sparse.budget, layers), layers // stages
    if any(pinned[i] != pinned[i % own] for i in range(layers)):
        raise ValueError(
            f"{type(sparse.policy).__name__} gives layers budgets of their own, and stages must "
            "have the same: use another policy, or a mesh without stages"
        )


def arrange(params: Any, stages: int, stacked: Callable[[Sequence[Any]], Any]) -> Any:
    """Returns a model's variables with the blocks' parameters stage by stage.

    Args:
      params: the variables, of all layers.
      stages: S.
      stacked: of a parameter of the S layers that share a slot, what holds them all.
    """
    rest, layers = models.split_blocks(params)
    own = len(layers) // stages
    for slot in range(own):
        of_stages = layers[slot::own]
        rest["params"][f"{models.BLOCK}{slot}"] = jax.tree.map(
            lambda *values: stacked(values), *of_stages, is_leaf=models.is_boxed
        )
    return rest


def names(module: nn.Module, stages: int) -> Any:
    """Returns the logical axes of each parameter, as `arrange` leaves them."""

    def stacked(boxes):
        return (STAGE, *boxes[0].names)

    boxes = arrange(models.abstract_params(module), stages, stacked)
    return jax.tree.map(lambda x: x.names if models.is_boxed(x) else x, boxes, is_leaf=_named)


def _named(x: Any) -> bool:
    return models.is_boxed(x) or isinstance(x, tuple)


def shardings(module: nn.Module, stages: int, mesh: AnyMesh, place: Place) -> Any:
    """Returns where each parameter lies, as `arrange` leaves them."""

    def sharding(axes):
        if axes[:1] != (STAGE,):
            return place(axes)
        of_layer: Any = place(axes[1:])
        return NamedSharding(mesh, PartitionSpec(STAGE, *of_layer.spec))

    return jax.tree.map(sharding, names(module, stages), is_leaf=_named)


def place_params(params: Any, wanted: Any, stages: int, put: Callable) -> Any:
    """Returns the variables of all layers, arrays or shapes, stage by stage where they should lie.

    Args:
      params: of one device, or of the host.
      wanted: `shardings`.
      stages: S.
      put: (array, sharding) -> the array there.
    """

    def stacked(values):
        if isinstance(values[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((stages, *values[0].shape), values[0].dtype)
        return jnp.stack(values)

    return jax.tree.map(put, arrange(params, stages, stacked), wanted)


def load_params(params: Any, wanted: Any, stages: int, dtype: Any) -> Any:
    """Returns the variables of a checkpoint, of which each process reads only its own.

    Args:
      params: the blocks' as arrays of the files (`models.load_checkpoint(mapped_blocks=True)`), the
        others in their places.
      wanted: `shardings`.
      stages: S.
      dtype: of the parameters.
    """

    def put(value, sharding):
        if not isinstance(value, tuple):
            return value
        shape = (stages, *value[0].shape)

        def part(index):
            of_stages = range(*index[0].indices(stages))
            return np.stack([np.asarray(value[s][index[1:]], dtype) for s in of_stages])

        return jax.make_array_from_callback(shape, sharding, part)

    arranged = arrange(params, stages, tuple)
    return jax.tree.map(put, arranged, wanted, is_leaf=lambda x: isinstance(x, tuple))


def init_params(module: nn.Module, seed: int, wanted: Any, stages: int) -> Any:
    """Returns the parameters of `models.init_params`, stage by stage where they should lie."""

    def init(key):
        params = nn.meta.unbox(models.init_boxed(module, key))
        return arrange(params, stages, jnp.stack)

    return jax.jit(init, out_shardings=wanted)(jax.random.key(seed))


def own_part(model: "Model") -> "Model":
    """Returns the model of this stage's layers, inside a program whose arguments are its parts."""
    rest, slots = models.split_blocks(model.params)
    for i, slot in enumerate(slots):
        rest["params"][f"{models.BLOCK}{i}"] = jax.tree.map(lambda x: x[0], slot)
    config = dataclasses.replace(model.config, num_layers=model.config.num_layers // model.stages)
    return dataclasses.replace(model, params=rest, module=model.module.clone(config=config))
