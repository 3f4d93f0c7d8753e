"""Programs for a mesh of devices: the sharding of every argument and result.

A program for a mesh is the program for one device, run on each device's part: `data` divides rows,
`model` divides models (`sharding.Split`), and `stage` divides the target's layers
(`magicjax.parallel.pipeline_stages`). Devices communicate in a model's all-reduces, in choices over
its vocabulary, and from stage to stage. Decisions are equal on all devices of a group. Groups do
not communicate in the loop: a group whose rows have ended stops.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

import models
from magicjax.model import Model
from magicjax.parallel import pipeline_stages
from magicjax.parallel.layouts import Pipelined
from magicjax.verification.sampling import shares
from sharding import (
    BATCH,
    DATA,
    STAGE,
    AnyMesh,
    Split,
    factored,
    global_arrays,
    split_over,
)

ROWS, EVERYWHERE = PartitionSpec(DATA), PartitionSpec()


@struct.dataclass
class PerDevice:
    """A pytree that one program of a mesh computes and another reads, on the same devices.

    Each device keeps its own arrays, so nothing needs to say how they are divided.

    Attributes:
      leaves: the arrays [1, ...]; [devices, ...] outside of the programs.
      treedef: static; of the pytree.
    """

    leaves: tuple[Array, ...]
    treedef: Any = struct.field(pytree_node=False)

    @classmethod
    def pack(cls, tree: Any) -> "PerDevice":
        """Returns this device's arrays."""
        leaves, treedef = jax.tree.flatten(tree)
        return cls(tuple(jnp.asarray(x)[None] for x in leaves), treedef)

    def unpack(self) -> Any:
        """Returns the pytree of this device's arrays."""
        return jax.tree.unflatten(self.treedef, [x[0] for x in self.leaves])


def split_of(config: models.DecoderConfig, shards: int | None, mesh: AnyMesh) -> Split:
    """Returns the division of a model over a mesh.

    Args:
      config: the model's.
      shards: number of parts; None: the size of the mesh's `model` axis. An EAGLE head is never
        divided.
      mesh: factored.

    Raises:
      ValueError: heads, MLP, experts or vocabulary do not divide, or the axis does not have such
        parts.
    """
    c = config
    if isinstance(c, models.EagleConfig):
        shards = 1
    experts, delta_net = getattr(c, "num_experts", None), getattr(c, "delta_net", None)
    sizes = {"query heads": c.num_heads}
    if experts is None:
        sizes["MLP units"] = c.intermediate_size
    else:
        sizes["experts"] = experts
    if (shared := getattr(c, "shared_expert_size", None)) is not None:
        sizes["units of the shared expert"] = shared
    if delta_net is not None:  # of which value heads are a multiple
        sizes["key heads of gated delta nets"] = delta_net.key_heads
    split = split_over(mesh, c.num_kv_heads, sizes | {"tokens": c.vocab_size}, shards)
    full_kv_heads = getattr(c, "full_kv_heads", None)
    # The heads of both kinds of layers have one division, so none are replicated.
    if full_kv_heads is not None and (
        full_kv_heads % split.shards or split.kv_shards < split.shards
    ):
        common = math.gcd(c.num_kv_heads, full_kv_heads)
        valid = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"model={split.shards} does not divide the {c.num_kv_heads} KV heads of the layers "
            f"with a window and the {full_kv_heads} of those without (family {c.family!r}): "
            f"use one of {', '.join(map(str, valid))}"
        )
    draft_vocab_size = getattr(c, "draft_vocab_size", None)
    if split.shards > 1 and draft_vocab_size is not None:
        raise ValueError(
            f"a model with draft_vocab_size={draft_vocab_size} cannot be divided over "
            f"model={split.shards} devices: load it with shards=1"
        )
    if shares(c.vocab_size) % split.shards:
        valid = [n for n in (1, 2, 4, 8, 16) if shares(c.vocab_size) % n == 0]
        raise ValueError(
            f"model={split.shards} does not divide the {shares(c.vocab_size)} shares of the "
            f"vocabulary of {c.vocab_size} in which tokens are sampled: use one of "
            f"{', '.join(map(str, valid))}"
        )
    return split


def check(
    mesh: AnyMesh, target: Model, drafter: Any, batch: int, micro_batches: int | None = None
) -> None:
    """Raises ValueError unless target, drafts and rows divide over the mesh."""
    mesh = factored(mesh)
    groups, stages = mesh.shape[DATA], mesh.shape[STAGE]
    if batch % groups:
        raise ValueError(
            f"{batch} prompts do not divide over data={groups} groups of devices: pass a multiple "
            f"of {groups}, such as {-(-batch // groups) * groups}"
        )
    _check_target(target, mesh)
    for model in models_of(drafter):
        label = f"the drafter {model.name or ''}".strip()
        _check_split(model, mesh, label, "; a draft may have fewer shards, down to 1")
        if model.layout.stages > 1:
            raise ValueError(
                f"{label} has {model.layout.stages} stages, and only a target may have several: "
                "load it with stages=1"
            )
    pipeline_stages.check_micro_batches(micro_batches, batch // groups, stages)
    for member in () if drafter is None else drafter.members():
        if not models_of(member):  # all layers of a small model are on every stage
            pipeline_stages.check_policy(member, target.config.num_layers, stages)


def _check_target(target: Model, mesh: AnyMesh) -> None:
    stages = mesh.shape[STAGE]
    if target.shards is not None:
        raise ValueError(
            f"the target has shards={target.shards}: a target is always divided over all of "
            "`model`; use shards for small models"
        )
    _check_split(target, mesh, "the target")
    try:
        pipeline_stages.check_layers(target.config, stages)
    except ValueError as error:
        raise ValueError(f"the target: {error}") from error
    if target.layout.stages not in (1, stages):
        raise ValueError(
            f"the target has {target.layout.stages} stages, and the mesh has {stages}: pass the "
            "mesh that it was loaded for"
        )
    if stages > 1 and target.offload:
        raise ValueError(
            f"stage={stages} with an offloaded target is not supported: load it without offload, "
            "or use a mesh without stages"
        )


def _check_split(model: Model, mesh: AnyMesh, label: str, hint: str = "") -> None:
    try:
        parameter_shardings(model.module, model.shards, mesh)
    except ValueError as error:
        raise ValueError(f"{label}: {error}{hint}") from error


def check_single_device(target: Model, drafter: Any) -> None:
    """Raises ValueError if a model is on several devices; for requests without a mesh."""
    for model in (target, *models_of(drafter)):
        counts = [
            len(leaf.sharding.device_set)
            for leaf in jax.tree.leaves(model)
            if isinstance(leaf, jax.Array)
        ]
        for count, unit in ((model.layout.stages, "stages"), (max(counts, default=1), "devices")):
            if count > 1:
                raise ValueError(
                    f"the model {model.name!r} is on {count} {unit}: pass the mesh that it was "
                    "loaded for"
                )


def models_of(tree: Any) -> list[Model]:
    """Returns the models in a drafter."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_model)
    return [leaf for leaf in leaves if _is_model(leaf)]


def with_backend(tree: Any, backend: str) -> Any:
    """Returns the models in a pytree with a backend."""

    def change(x):
        return x.with_backend(backend) if _is_model(x) else x

    return jax.tree.map(change, tree, is_leaf=_is_model)


def _is_model(x: Any) -> bool:
    return isinstance(x, Model)


def parameter_shardings(module: nn.Module, shards: int | None, mesh: AnyMesh) -> models.ShardingFn:
    """Returns a function from a parameter's logical axes to its sharding."""
    mesh = factored(mesh)
    split = split_of(module.config, shards, mesh)
    if (formats := models.formats_of(module)).is_packed and mesh.size > 1:
        raise ValueError(
            f"matrices in {formats} are packed for the CPU kernels of one device: load the model "
            "with the mesh, or with activations='float'"
        )
    if formats:
        formats.check(module.config.matrix_inputs(split.shards), split.shards)
    return lambda names: NamedSharding(mesh, split.spec(names))


def shard_model(model: Model, mesh: AnyMesh, put: Callable = global_arrays.put) -> Model:
    """Returns the model with its parameters sharded over the mesh, in its layout."""
    module, layout = model.module, model.layout
    sharding_of = parameter_shardings(module, model.shards, mesh)
    params = jax.tree.map(
        lambda box, x: put(x, sharding_of(box.names)),
        layout.abstract_params(module),
        model.params,
        is_leaf=models.is_boxed,
    )
    layout = layout.shard(module, sharding_of, put)
    return dataclasses.replace(model, params=params, layout=layout)


def shard_target(
    target: Model, mesh: AnyMesh, micro_batches: int, put: Callable = global_arrays.put
) -> Model:
    """Returns the target as `shard_model` does, its layers divided over the mesh's stages."""
    stages = factored(mesh).shape[STAGE]
    if stages > 1:
        params = target.params
        if target.layout.stages == 1:
            pipeline_stages.check_formats(target.weights, target.config.num_layers, stages)
            params = pipeline_stages.stack_layers(params, stages)
        layout = Pipelined(stages, micro_batches)
        target = dataclasses.replace(target, params=params, layout=layout)
    return shard_model(target, mesh, put)


def shard_drafter(drafter: Any, mesh: AnyMesh, put: Callable = global_arrays.put) -> Any:
    """Returns the drafter with its models sharded over the mesh, and other arrays replicated."""
    replicated = NamedSharding(factored(mesh), EVERYWHERE)

    def place(leaf):
        return shard_model(leaf, mesh, put) if _is_model(leaf) else put(leaf, replicated)

    return jax.tree.map(place, drafter, is_leaf=_is_model)


def on_mesh(
    function: Callable, mesh: AnyMesh, arguments: tuple, results: Any
) -> Callable[..., Any]:
    """Returns the function, mapped over each device's part of its arguments.

    Args:
      function: takes and returns the arrays of one device.
      mesh: factored.
      arguments: arrays or shapes, each with a sharding over the mesh.
      results: the shapes and shardings of what the function returns (`result_shapes`).
    """
    return _mapped(function, mesh, arguments)(out_specs=_specs(results))


def result_shapes(
    function: Callable, mesh: AnyMesh, arguments: tuple, replicated_rows: bool = False
) -> Any:
    """Returns the shapes and shardings of what the function returns; runs nothing.

    A field's metadata declares the logical axes of its arrays (`sharding.logical_axes`); a field
    without it has those of the enclosing field, at the outermost level (BATCH,). The nearest
    enclosing attribute `split` maps them to mesh axes. With `replicated_rows`, `data` divides no
    axis.
    """
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    local = jax.eval_shape(_mapped(function, mesh, arguments)(out_specs=EVERYWHERE), *plain)
    data_axes = () if replicated_rows else (DATA,)
    return _global_shapes(local, mesh, (BATCH,), Split(), data_axes)


def _global_shapes(
    node: Any, mesh: AnyMesh, axes: tuple, split: Split, data_axes: tuple[str, ...]
) -> Any:
    if isinstance(node, jax.ShapeDtypeStruct):
        spec = split.spec((*axes, *[None] * len(node.shape))[: len(node.shape)], data_axes)
        return _global_shape(node, NamedSharding(mesh, spec))
    if isinstance(node, PerDevice):
        on_each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return jax.tree.map(lambda x: _global_shape(x, on_each), node)
    split = getattr(node, "split", split)
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
    declared = {field.name: field.metadata.get("axes", axes) for field in fields}

    def child(path, x):
        child_axes = declared.get(getattr(path[0], "name", ""), axes)
        return _global_shapes(x, mesh, child_axes, split, data_axes)

    return jax.tree_util.tree_map_with_path(child, node, is_leaf=lambda x: x is not node)


def _global_shape(local: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    sizes = list(local.shape)
    for axis, names in enumerate(sharding.spec):
        names = (names,) if isinstance(names, str) else names or ()
        sizes[axis] *= math.prod(sharding.mesh.shape[name] for name in names)
    return jax.ShapeDtypeStruct(tuple(sizes), local.dtype, sharding=sharding)


def _mapped(function: Callable, mesh: AnyMesh, arguments: tuple) -> Callable:
    def run_local(*local_arguments):
        return function(*(_local_models(x, mesh) for x in local_arguments))

    specs = _specs(arguments)
    return functools.partial(jax.shard_map, run_local, mesh=mesh, in_specs=specs, check_vma=False)


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def _local_models(argument: Any, mesh: AnyMesh) -> Any:
    """Returns the argument with modules for a device's part of their parameters."""

    def localize(leaf):
        if not _is_model(leaf):
            return leaf
        module = leaf.module.clone(split=split_of(leaf.config, leaf.shards, mesh))
        module, params = leaf.layout.local_part(module, leaf.params)
        return dataclasses.replace(leaf, module=module, params=params)

    return jax.tree.map(localize, argument, is_leaf=_is_model)
