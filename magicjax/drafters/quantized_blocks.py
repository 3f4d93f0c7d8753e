"""A quantized copy of the target's blocks, with which self-speculation drafts."""

import dataclasses
import functools
import weakref
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import models
from magicjax.drafters import layer_skipping
from magicjax.drafters.layer_skipping import LayerIndices
from magicjax.model import Model
from magicjax.parallel.layouts import BlocksOnly, Resident
from models import WeightFormat, quantized

# The latest copy of each target in use, with its format and layers, so that repeated requests do
# not quantize it again.
_copies = weakref.WeakKeyDictionary[Model, tuple[WeightFormat, LayerIndices, Model]]()


def check(target: Model, weights: str) -> None:
    """Raises ValueError unless the blocks of `target` can be copied in the format `weights`."""
    problem = None
    if target.weights:
        problem = f"the target has weights={str(target.weights)!r} already"
    elif target.offload:
        problem = "the target is offloaded"
    elif target.layout.stages > 1:
        problem = f"the target has {target.layout.stages} stages"
    if problem:
        raise ValueError(
            f"the drafter's weights {weights!r} quantize a target on the device, and "
            f"{problem}: omit the drafter's weights, or use a small model"
        )
    WeightFormat.parse(weights).check(target.config.matrix_inputs())


def of(target: Model, weights: str, layers: LayerIndices = None) -> Model:
    """Returns blocks of `target` in the format `weights`, as a model without embeddings.

    Norms and biases are the target's arrays. A target without parameters, or with shapes as
    parameters, has such a copy.

    Args:
      target: the model whose blocks are quantized.
      weights: the format.
      layers: the layers whose blocks are copied, as in `layer_skipping`.
    """
    weight_format = WeightFormat.parse(weights)
    if target in _copies and _copies[target][:2] == (weight_format, layers):
        return _copies[target][2]
    _copies.pop(target, None)  # frees its memory before the other copy needs it
    original = layer_skipping.of_model(target, layers)
    module = original.module.clone(weights=models.blocks_in(original.config, weight_format))
    params = None if original.params is None else _quantized(original, module)
    name = f"{target.name} {weight_format}".strip()
    copy = Model(module, params, name=name, layout=BlocksOnly())
    _copies[target] = weight_format, layers, copy
    return copy


def join(blocks: Model, target: Model) -> Model:
    """Returns the model of quantized blocks, with the target's embeddings and final norm."""
    unquantized = models.split_blocks(target.params)[0]["params"]
    params = {"params": unquantized | blocks.params["params"]}
    return dataclasses.replace(blocks, params=params, layout=Resident())


def _quantized(target: Model, module: nn.Module) -> Any:
    shapes = nn.meta.unbox(BlocksOnly().abstract_params(module))
    blocks = models.blocks_of(target.params)["params"]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(blocks)):
        return shapes
    params = quantized.quantize_params(blocks, shapes["params"], module.weights, _quantize)
    return {"params": params}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(weight: jax.Array, weight_format: WeightFormat, inputs: int) -> dict[str, jax.Array]:
    return quantized.quantize(weight, weight_format, inputs, jnp)
