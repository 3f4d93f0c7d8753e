"""Builds a module and its parameters from a config."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.decoder import Block, Transformer, layer_kinds, layer_module, of_layers
from models.decoder_config import DecoderConfig
from models.eagle import EagleConfig, EagleHead
from models.gated_delta import DeltaNetInputs
from models.layers import in_every_layer
from models.mtp import MtpConfig, MtpHead
from models.quantized import BLOCK, MatrixFormats, WeightFormat, quantize_params

# sharding_of(logical axes, one name or None per axis) -> the sharding of the parameter
ShardingFn = Callable[[tuple[str | None, ...]], jax.sharding.Sharding]


def build(
    config: DecoderConfig,
    dtype: Any = jnp.float32,
    weights: MatrixFormats | WeightFormat | None = None,
) -> Transformer | EagleHead:
    """Returns the module of `config`.

    Args:
      config: a config of this package; other objects raise TypeError.
      dtype: dtype of parameters and activations.
      weights: the format of each matrix, or of all of blocks, whose groups must divide their inputs
        (ValueError); None: not quantized.
    """
    if not isinstance(config, DecoderConfig):
        raise TypeError(f"{type(config).__name__} is not a model config: it must be DecoderConfig")
    if isinstance(config, EagleConfig):
        if weights:
            raise ValueError(
                f"weights={weights} is not supported for a learned head: pass weights='none'"
            )
        kind = MtpHead if isinstance(config, MtpConfig) else EagleHead
        return kind(config, jnp.dtype(dtype))
    formats = weights if isinstance(weights, MatrixFormats) else blocks_in(config, weights)
    formats.check(config.matrix_inputs())
    return Transformer(config, jnp.dtype(dtype), weights=formats)


def blocks_in(config: DecoderConfig, form: WeightFormat | str | None) -> MatrixFormats:
    """Returns the formats of a model whose blocks' matrices have all the same; None: none have."""
    layers = range(config.num_layers) if form is not None else ()
    inputs = {layer: config.matrix_inputs(layer=layer) for layer in layers}
    names = (f"{BLOCK}{layer}/{name}" for layer in layers for name in inputs[layer])
    return MatrixFormats(tuple((name, str(form)) for name in names))


def block_params(module: nn.Module, layer: int = 0) -> dict[str, Any]:
    """Returns the shapes and dtypes of a layer's parameters, boxed as in `abstract_params`."""
    return jax.tree.map(lambda x: x, _block_shapes(layer_module(module, layer)))  # a copy


def quantize_block(block: dict[str, Any], module: nn.Module, layer: int = 0) -> dict[str, Any]:
    """Returns the parameters of `layer` with matrices quantized as in the module, on the host.

    Matrices that are quantized already remain.
    """
    formats = module.weights.within(f"{BLOCK}{layer}")
    return quantize_params(block, nn.meta.unbox(block_params(module, layer)), formats)


@functools.lru_cache(maxsize=256)  # by the block: each layer of a model can be of its own kind
def _block_shapes(block: Block) -> dict[str, Any]:
    return jax.eval_shape(lambda key: _init_block(block, key), jax.random.key(0))


def _init_block(block: Block, key: jax.Array) -> dict[str, Any]:
    x = jnp.zeros((1, 1, block.config.hidden_size), block.dtype)
    positions, size = jnp.zeros((1, 1), jnp.int32), block.config.layer_input_size
    per_layer_input = None if size is None else jnp.zeros((1, 1, size), block.dtype)
    return block.init(key, x, positions, _no_attention, 0, per_layer_input)["params"]


def init_blocks(module: nn.Module, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields random parameters of each layer as host arrays, first to last.

    They have the distribution of `init_params`, but different values.
    """
    init = jax.jit(lambda block, key: nn.meta.unbox(_init_block(block, key)), static_argnums=0)
    for layer in range(module.config.num_layers):
        key = jax.random.fold_in(jax.random.key(seed), layer)
        yield jax.device_get(init(layer_module(module, layer), key))


def split_blocks(params: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the variables without the blocks' parameters, and those of each block."""
    inner = params["params"]
    count = sum(name.startswith(BLOCK) for name in inner)
    others = {name: value for name, value in inner.items() if not name.startswith(BLOCK)}
    return {"params": others}, [inner[f"{BLOCK}{layer}"] for layer in range(count)]


def blocks_of(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the variables of the blocks alone."""
    inner = params["params"]
    return {"params": {name: value for name, value in inner.items() if name.startswith(BLOCK)}}


def init_boxed(module: nn.Module, key: jax.Array) -> dict[str, Any]:
    """Returns random parameters, each boxed with its logical axes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return module.init(key, tokens, tokens, in_every_layer(_no_attention))


def _no_attention(q, *others, **options):
    if isinstance(q, DeltaNetInputs):
        return q.heads(q.x)[2], None
    return q, None


def init_params(
    module: nn.Module, seed: int = 0, sharding_of: ShardingFn | None = None, *, blocks: bool = True
) -> dict[str, Any]:
    """Returns random parameters as plain arrays, ready for `apply`.

    Args:
      module: the module that is initialized.
      seed: seed of the random weights.
      sharding_of: the sharding of a parameter, by its logical axes; None: the default device.
      blocks: False: omit the blocks' parameters (`init_blocks` returns them).
    """
    if sharding_of is not None or not blocks:

        def init(key):
            params = init_boxed(module, key)
            return params if blocks else split_blocks(params)[0]

        shapes = jax.eval_shape(init, jax.random.key(0))
        shardings = sharding_of and jax.tree.map(
            lambda box: sharding_of(box.names), shapes, is_leaf=is_boxed
        )
        made = jax.jit(lambda key: nn.meta.unbox(init(key)), out_shardings=shardings)
        return made(jax.random.key(seed))
    # Eager calls compile each shape once; `jit` would compile every layer's initializers (20 s
    # instead of 3 s for 12 tiny layers).
    return nn.meta.unbox(init_boxed(module, jax.random.key(seed)))


def is_boxed(x: Any) -> bool:
    """Returns whether x is a parameter boxed with its logical axes."""
    return isinstance(x, nn.LogicallyPartitioned)


def abstract_params(module: nn.Module) -> dict[str, Any]:
    """Returns the shapes and dtypes of the parameters, boxed with their logical axes.

    Every leaf is a `flax.linen.LogicallyPartitioned` with `.value` (a `jax.ShapeDtypeStruct`) and
    `.names` (one entry per axis, None for an axis that is never divided). Nothing is allocated.
    """
    # Blocks of a kind in the same formats have equal shapes: one is traced, 80 would take seconds.
    one_layer = of_layers(module, (0,))
    shapes = jax.eval_shape(lambda key: init_boxed(one_layer, key), jax.random.key(0))
    others, (first,) = split_blocks(shapes)
    for kind in layer_kinds(module):
        block = block_params(module, kind[0]) if kind[0] else first
        others["params"] |= {f"{BLOCK}{layer}": block for layer in kind}
    return others


def cast_params(params: Any, dtype: Any) -> Any:
    """Returns the parameters in a floating-point dtype; integers keep theirs."""

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, params)


def count_params(config: DecoderConfig) -> int:
    """Returns the number of parameters of `config`; a tied output matrix counts once."""
    shapes = nn.meta.unbox(abstract_params(build(config)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
