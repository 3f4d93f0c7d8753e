"""Programs for a mesh of devices: where every argument lies, and who runs what.

A program for a mesh is the program for one device, run on each device's part: of rows by `data`, of
models by `model` (`sharding.Split`). Only a model's sums and the choices over its vocabulary speak
with other devices; what they give is the same on all devices of a group, so all of them take the
same decisions. Rows of different groups never meet: a group whose rows have ended is done.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

import models
from magicjax import offloading
from magicjax.model import Model
from magicjax.sampling import shares
from sharding import DATA, AnyMesh, Split, factored, first_axes, split_over

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


def check(mesh: AnyMesh, target: Model, drafter: Any, batch: int) -> None:
    """Raises ValueError unless target, drafts and rows divide over the mesh."""
    mesh = factored(mesh)
    groups = mesh.shape[DATA]
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


def place_model(model: Model, mesh: AnyMesh, put: Callable = jax.device_put) -> Model:
    """Returns the model with its parameters where the mesh wants them; those that are stay."""
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
        is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned),
    )
    return dataclasses.replace(model, params=params, blocks=blocks)


@functools.lru_cache(maxsize=32)  # tracing a model takes a third of a second, or more
def _boxes(module: nn.Module) -> Any:
    return models.abstract_params(module)


def check_on_one(target: Model, drafter: Any) -> None:
    """Raises ValueError if a model lies on several devices, and no mesh was given."""
    for model in (target, *models_of(drafter)):
        for leaf in jax.tree.leaves(model):
            count = len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 1
            if count > 1:
                raise ValueError(
                    f"the model {model.name!r} lies on {count} devices: pass the mesh that it was "
                    "loaded for"
                )


def place_drafter(drafter: Any, mesh: AnyMesh, put: Callable = jax.device_put) -> Any:
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

    Where a device's part of an array is smaller than the array, there the array is divided.
    """
    whole = jax.eval_shape(function, *arguments)
    part = jax.eval_shape(_mapped(function, mesh, arguments)(out_specs=EVERYWHERE), *arguments)

    def shape(whole, part):
        sharding = NamedSharding(mesh, _spec(mesh, whole.shape, part.shape))
        return jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)

    return jax.tree.map(shape, whole, part)


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
        split = split_of(leaf.config, leaf.shards, mesh)
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
