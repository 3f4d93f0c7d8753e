"""Programs for a mesh of devices: where every argument lies, and who runs what.

A program for a mesh is the program for one device, run on each device's part: of rows by `data`, of
models by `model` (`sharding.Split`), of the target's layers by `stage`
(`magicjax.parallel.pipeline_stages`). Only a
model's sums, the choices over its vocabulary and what goes from stage to stage speak with other
devices; what is decided is the same on all devices of a group, so all of them take the same
decisions. Rows of different groups never meet: a group whose rows have ended is done.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

import models
from magicjax.kv_cache.attention_stats import Seen
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.model import Model
from magicjax.parallel import offloading, pipeline_stages
from magicjax.verification.sampling import shares
from sharding import (
    DATA,
    STAGE,
    AnyMesh,
    Split,
    factored,
    first_axes,
    processes,
    split_over,
    undivided,
)

ROWS, EVERYWHERE = PartitionSpec(DATA), PartitionSpec()


def split_of(config: models.Config, shards: int | None, mesh: AnyMesh) -> Split:
    """Returns how a model is divided over a mesh.

    Args:
      config: the model's.
      shards: parts; None: as many as the mesh's `model` axis has devices.
      mesh: factored.

    Raises:
      ValueError: heads, MLP or vocabulary do not divide, or the axis has no such parts.
    """
    c = config
    sizes = c.num_heads, c.num_kv_heads, c.intermediate_size, c.vocab_size
    split = split_over(mesh, *sizes, shards)
    if shares(c.vocab_size) % split.shards:
        fits = [n for n in (1, 2, 4, 8, 16) if shares(c.vocab_size) % n == 0]
        raise ValueError(
            f"model={split.shards} does not divide the {shares(c.vocab_size)} shares of the "
            f"vocabulary of {c.vocab_size} in which tokens are sampled: use one of "
            f"{', '.join(map(str, fits))}"
        )
    return split


def check(
    mesh: AnyMesh, target: Model, drafter: Any, batch: int, micro_batches: int | None = None
) -> None:
    """Raises ValueError unless target, drafts and rows divide over the mesh."""
    mesh = factored(mesh)
    groups, count = mesh.shape[DATA], mesh.shape[STAGE]
    if batch % groups:
        raise ValueError(
            f"{batch} prompts do not divide over data={groups} groups of devices: give a multiple "
            f"of {groups}, such as {-(-batch // groups) * groups}"
        )
    if target.shards is not None:
        raise ValueError(
            f"the target has shards={target.shards}: it is always divided over the whole of "
            "`model`; shards is for small models"
        )
    for model in (target, *models_of(drafter)):
        try:
            split_of(model.config, model.shards, mesh)
        except ValueError as error:
            what = "the target" if model is target else f"the drafter {model.name or ''}".strip()
            hint = "" if model is target else "; a draft can do with fewer shards, also with 1"
            raise ValueError(f"{what}: {error}{hint}") from error
        if model is not target and model.stages > 1:
            raise ValueError(
                f"the drafter {model.name or ''} lies on {model.stages} stages, as only a target "
                "may: load it with stages=1, and every stage has all of it"
            )
    try:
        pipeline_stages.check(target.config.num_layers, count)
    except ValueError as error:
        raise ValueError(f"the target: {error}") from error
    if target.stages not in (1, count):
        raise ValueError(
            f"the target lies on {target.stages} stages, and the mesh has {count}: pass the mesh "
            "that it was loaded for"
        )
    if count > 1 and target.blocks is not None:
        raise ValueError(
            f"stage={count} of an offloaded target is not supported: stages hold their layers; "
            "leave offload out, or use a mesh without stages"
        )
    pipeline_stages.check_micro_batches(micro_batches, batch // groups, count)
    for one in getattr(drafter, "drafters", (drafter,)):
        if not models_of(one):  # of a small model all layers are on every stage
            pipeline_stages.check_policy(one, target.config.num_layers, count)


def models_of(tree: Any) -> list[Model]:
    """Returns the models in a drafter."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_model)
    return [leaf for leaf in leaves if _is_model(leaf)]


def _is_model(x: Any) -> bool:
    return isinstance(x, Model)


def parameter_shardings(module: nn.Module, shards: int | None, mesh: AnyMesh) -> models.Place:
    """Returns what tells a parameter's place by the logical names of its axes."""
    mesh = factored(mesh)
    split = split_of(module.config, shards, mesh)
    return lambda names: NamedSharding(mesh, split.spec(names))


def place_model(model: Model, mesh: AnyMesh, put: Callable = processes.put) -> Model:
    """Returns the model with its parameters where the mesh wants them; those that are stay.

    Every stage gets all of its layers, as of a draft.
    """
    place = parameter_shardings(model.module, model.shards, mesh)
    boxes, blocks = _boxes(model.module), model.blocks
    if blocks is not None:
        boxes = models.split_blocks(boxes)[0]
        wanted = offloading.shapes(model.module, offloading.is_int8(blocks), place)
        blocks = jax.tree.map(lambda x, shape: put(x, shape.sharding), blocks, wanted)
    params = jax.tree.map(
        lambda box, x: put(x, place(box.names)),
        boxes,
        model.params,
        is_leaf=models.is_boxed,
    )
    return dataclasses.replace(model, params=params, blocks=blocks)


def place_target(
    target: Model, mesh: AnyMesh, micro_batches: int, put: Callable = processes.put
) -> Model:
    """Returns what `place_model` does of a target, whose layers are divided over the stages."""
    mesh = factored(mesh)
    count = mesh.shape[STAGE]
    if count == 1:
        return place_model(target, mesh, put)
    place = parameter_shardings(target.module, target.shards, mesh)
    wanted = pipeline_stages.shardings(target.module, count, mesh, place)
    if target.stages == count:
        params = jax.tree.map(put, target.params, wanted)
    else:
        params = pipeline_stages.place_params(target.params, wanted, count, put)
    return dataclasses.replace(target, params=params, stages=count, micro_batches=micro_batches)


@functools.lru_cache(maxsize=32)  # tracing a model takes a third of a second, or more
def _boxes(module: nn.Module) -> Any:
    return models.abstract_params(module)


def check_on_one(target: Model, drafter: Any) -> None:
    """Raises ValueError if a model lies on several devices, and no mesh was given."""
    for model in (target, *models_of(drafter)):
        if model.stages > 1:
            raise ValueError(
                f"the model {model.name!r} lies on {model.stages} stages: pass the mesh that it "
                "was loaded for"
            )
        for leaf in jax.tree.leaves(model):
            count = len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 1
            if count > 1:
                raise ValueError(
                    f"the model {model.name!r} lies on {count} devices: pass the mesh that it was "
                    "loaded for"
                )


def place_drafter(drafter: Any, mesh: AnyMesh, put: Callable = processes.put) -> Any:
    """Returns the drafter with its models in their places; other arrays are everywhere."""
    everywhere = NamedSharding(factored(mesh), EVERYWHERE)

    def place(leaf):
        return place_model(leaf, mesh, put) if _is_model(leaf) else put(leaf, everywhere)

    return jax.tree.map(place, drafter, is_leaf=_is_model)


def on_mesh(
    function: Callable, mesh: AnyMesh, arguments: tuple, results: Any
) -> Callable[..., Any]:
    """Returns the function, run on each device's part of its arguments.

    Args:
      function: of what one device holds.
      mesh: factored.
      arguments: as they will be passed, arrays or shapes, each with a sharding over the mesh.
      results: of what the function gives back, likewise (`result_shapes`).
    """
    return _mapped(function, mesh, arguments)(out_specs=_specs(results))


def result_shapes(function: Callable, mesh: AnyMesh, arguments: tuple) -> Any:
    """Returns what the function gives back, as shapes with their shardings; nothing runs.

    Where a device's part of an array is smaller than it would be on a mesh that divides nothing but
    layers, there the array is divided. What is held layer by layer has the rows of all stages.
    """
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    whole, part = (
        jax.eval_shape(_mapped(function, on, arguments)(out_specs=EVERYWHERE), *plain)
        for on in (undivided(mesh), mesh)
    )

    def shape(whole, part, count=1):
        spec, (rows, *others) = _spec(mesh, whole.shape, part.shape), whole.shape or (None,)
        if count == 1:
            sizes = whole.shape
        else:
            spec, sizes = PartitionSpec((STAGE, DATA), *spec[1:]), (count * rows, *others)
        return jax.ShapeDtypeStruct(sizes, whole.dtype, sharding=NamedSharding(mesh, spec))

    def of_node(whole, part):
        found = jax.tree.map(shape, whole, part)
        if not _in_stages(whole):
            return found
        of_layers = {
            name: jax.tree.map(
                functools.partial(shape, count=whole.stages),
                getattr(whole, name),
                getattr(part, name),
            )
            for name in whole.of_layers
        }
        return dataclasses.replace(found, **of_layers)

    return jax.tree.map(of_node, whole, part, is_leaf=_in_stages)


def _in_stages(x: Any) -> bool:
    return isinstance(x, KVCache | DraftCache | Seen) and x.stages > 1


def _mapped(function: Callable, mesh: AnyMesh, arguments: tuple) -> Callable:
    def of_part(*parts):
        return function(*(_as_part(part, mesh) for part in parts))

    specs = _specs(arguments)
    return functools.partial(jax.shard_map, of_part, mesh=mesh, in_specs=specs, check_vma=False)


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def _as_part(argument: Any, mesh: AnyMesh) -> Any:
    """Returns the argument with its models made for a device's part of their parameters."""

    def divide(leaf):
        if not _is_model(leaf):
            return leaf
        if leaf.stages > 1:
            leaf = pipeline_stages.own_part(leaf)
        undivided = all(size == 1 for name, size in mesh.shape.items() if name != STAGE)
        split = Split() if undivided else split_of(leaf.config, leaf.shards, mesh)
        return dataclasses.replace(leaf, module=leaf.module.clone(split=split))

    return jax.tree.map(divide, argument, is_leaf=_is_model)


def _spec(mesh: AnyMesh, whole: tuple[int, ...], part: tuple[int, ...]) -> PartitionSpec:
    """Returns how an array is divided, by its shape and that of a device's part.

    Axis 0 is one of rows wherever it is divided, any other is one of heads or the vocabulary.
    """
    names: list[Any] = []
    for axis, (size, own) in enumerate(zip(whole, part, strict=True)):
        if size == own:
            names.append(None)
        else:
            names.append(DATA if axis == 0 else first_axes(mesh, size // own))
    return PartitionSpec(*names)
