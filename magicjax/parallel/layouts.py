"""Layouts: where the layers of a model are, and how a pass runs through them.

A `Model` has one layout: `Resident`, `Offloaded` or `Pipelined`. The decoding loop and the drafters
call the same methods on all of them, and never distinguish them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

import models
from magicjax.parallel import offloading, pipeline_stages
from models import Attend, PassResult, ShardingFn
from sharding import STAGE, Split, host, pipeline


class Layout:
    """The methods of a layout, with defaults for a model whose layers are all on every stage.

    Attributes:
      stages: the number of pipeline stages.
      micro_batches: the number of parts into which a batch is divided for the stages.
      offload: whether the blocks' weights are in host memory.
    """

    stages = 1
    micro_batches = 1
    offload = False

    def run(
        self,
        module: nn.Module,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        layer_inputs: tuple[int, ...],
    ) -> PassResult:
        """Returns what `Model.__call__` does."""
        raise NotImplementedError

    def abstract_params(self, module: nn.Module) -> Any:
        """Returns the shapes of `Model.params`, boxed with their logical axes."""
        return _abstract_params(module)

    def shard(self, module: nn.Module, sharding_of: ShardingFn, put: Callable) -> "Layout":
        """Returns the layout with its own arrays, if any, moved by `put(array, sharding)`."""
        return self

    def local_part(self, module: nn.Module, params: Any) -> tuple[nn.Module, Any]:
        """Returns module and parameters of this stage's layers, inside a program for a mesh."""
        return module, params

    def first_layer(self, num_layers: int) -> Int[Array, ""] | int:
        """Returns the index in the whole model of the first of `num_layers` local layers."""
        return 0

    def last_hidden(self, hidden: Float[Array, "*B E"], split: Split) -> Float[Array, "*B E"]:
        """Returns the hidden states of the model's last layer."""
        return hidden

    def broadcast_decision(self, tree: Any) -> Any:
        """Returns int32 arrays that are equal on all stages."""
        return tree

    def any_running(self, running: Bool[Array, ""]) -> Bool[Array, ""]:
        """Returns whether `running` holds on any device that must take the same rounds."""
        return running


@struct.dataclass
class Resident(Layout):
    """All parameters are on the device."""

    def run(self, module, params, tokens, positions, attend, layer_inputs) -> PassResult:
        if not layer_inputs:  # which another decoder than the package's may not have
            return *module.apply(params, tokens, positions, attend)[:2], {}
        return module.apply(params, tokens, positions, attend, layer_inputs)


@struct.dataclass
class BlocksOnly(Layout):
    """The parameters of the blocks, without embeddings and final norm: part of another model."""

    def abstract_params(self, module: nn.Module) -> Any:
        return models.blocks_of(_abstract_params(module))


@struct.dataclass
class Offloaded(Layout):
    """The blocks' weights are in host memory; each pass streams them to the device.

    Attributes:
      blocks: the weights as `offloading.stack` returns them; `Model.params` lacks them.
    """

    blocks: tuple[Any, ...]

    offload = True

    def run(self, module, params, tokens, positions, attend, layer_inputs) -> PassResult:
        def run_layer(x, layer, weights):
            block, rotation = models.layer_module(module, layer), module.config.rotations[layer]
            out, aux = models.apply_block(block, weights, x, positions, attend(layer), rotation)
            return out, (aux, x)

        x = module.apply(params, tokens, positions, method="embed")
        x, outputs = host.stream(run_layer, x, offloading.by_layer(module, self.blocks))
        aux, inputs = zip(*outputs, strict=True)
        inputs = (*inputs, x)
        return x, aux, {layer: inputs[layer] for layer in layer_inputs}

    def abstract_params(self, module: nn.Module) -> Any:
        return models.split_blocks(_abstract_params(module))[0]

    def shard(self, module: nn.Module, sharding_of: ShardingFn, put: Callable) -> "Offloaded":
        shapes = offloading.shapes(module, sharding_of)
        blocks = jax.tree.map(lambda x, shape: put(x, shape.sharding), self.blocks, shapes)
        return dataclasses.replace(self, blocks=blocks)


@struct.dataclass
class Pipelined(Layout):
    """The layers are divided over pipeline stages (`magicjax.parallel.pipeline_stages`)."""

    stages: int = struct.field(pytree_node=False)
    micro_batches: int = struct.field(pytree_node=False, default=1)

    def run(self, module, params, tokens, positions, attend, layer_inputs) -> PassResult:
        """Returns this stage's hidden states, `attend`'s aux of its layers, and layers' inputs.

        `attend` has `rows(first, count)`, which returns the same for some rows of the batch.
        """
        rows = tokens.shape[0] // self.micro_batches

        def run_stage(x, first):
            row_positions, row_attend = positions, attend
            if first is not None:
                row_positions = jax.lax.dynamic_slice_in_dim(positions, first, rows)
                row_attend = attend.rows(first, rows)  # type: ignore[attr-defined]
            aux, inputs = [], [x]
            for layer in range(layers):
                x, layer_aux = module.apply(
                    params, x, row_positions, row_attend, layer, method="block"
                )
                aux.append(layer_aux)
                inputs.append(x)
            return x, (tuple(aux), [inputs[layer - owner * layers] for layer, owner in owners])

        layers = module.config.num_layers
        owners = [(layer, min(layer // layers, self.stages - 1)) for layer in layer_inputs]
        x = module.apply(params, tokens, positions, method="embed")
        axis_names = _replicated_axes(x, module.split)
        x, (aux, parts) = pipeline.pipelined(run_stage, x, self.micro_batches, axis_names)
        inputs = {
            layer: pipeline.broadcast_from(owner, part, axis_names)
            for (layer, owner), part in zip(owners, parts, strict=True)
        }
        return x, aux, inputs

    def abstract_params(self, module: nn.Module) -> Any:
        return pipeline_stages.stack_layers(_abstract_params(module), self.stages)

    def local_part(self, module: nn.Module, params: Any) -> tuple[nn.Module, Any]:
        inner, slots = models.split_blocks(params)
        for i, slot in enumerate(slots):
            inner["params"][f"{models.BLOCK}{i}"] = jax.tree.map(lambda x: x[0], slot)
        layers = module.config.num_layers // self.stages
        module = models.of_layers(module, range(layers))  # stages are alike: `check_layers`
        split = dataclasses.replace(module.split, layer_axes=(STAGE,))
        return module.clone(split=split), inner

    def first_layer(self, num_layers: int) -> Int[Array, ""]:
        return pipeline.stage_index() * num_layers

    def last_hidden(self, hidden: Float[Array, "*B E"], split: Split) -> Float[Array, "*B E"]:
        return pipeline.broadcast_from(self.stages - 1, hidden, _replicated_axes(hidden, split))

    def broadcast_decision(self, tree: Any) -> Any:
        return pipeline.broadcast_from_first(tree)

    def any_running(self, running: Bool[Array, ""]) -> Bool[Array, ""]:
        return pipeline.any_data_group(running)


@functools.lru_cache(maxsize=32)  # tracing a model takes a third of a second or more
def _abstract_params(module: nn.Module) -> Any:
    return models.abstract_params(module)


def _replicated_axes(hidden: Array, split: Split) -> tuple[str, ...]:
    """Returns the mesh axes along which `hidden` is replicated and its last axis can be divided."""
    return split.axes if hidden.shape[-1] % split.shards == 0 else ()
