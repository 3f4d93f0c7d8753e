"""From a config to a module and its parameters, for every family alike."""

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.llama import Block, Llama, LlamaConfig
from models.opt import Opt, OptBlock, OptConfig

# place(logical axes, one name or None for each axis) -> where the parameter should lie
Place = Callable[[tuple[str | None, ...]], jax.sharding.Sharding]
Config = LlamaConfig | OptConfig
BLOCK = "layers_"  # and a number: the name of a block's parameters
# Both offer vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads,
# head_dim, max_positions, tie_embeddings and family.


def build(config: Config, dtype: Any = jnp.float32) -> nn.Module:
    """Returns the module of `config`; `dtype` is that of its parameters and activations.

    Raises TypeError for anything but a config of this package.
    """
    if isinstance(config, LlamaConfig):
        return Llama(config, jnp.dtype(dtype))
    if isinstance(config, OptConfig):
        return Opt(config, jnp.dtype(dtype))
    raise TypeError(
        f"{type(config).__name__} is not a model config: it must be LlamaConfig or OptConfig"
    )


def layer_module(module: nn.Module) -> nn.Module:
    """Returns the module of a single layer of `module`.

    Its parameters are `params["params"]["layers_<i>"]`, and it is applied to
    (x [B,T,E], positions [B,T], attend, layer). Scans over stacked weights use it.
    """
    block = Block if isinstance(module.config, LlamaConfig) else OptBlock
    return block(module.config, module.dtype, module.split)


def block_params(module: nn.Module) -> dict[str, Any]:
    """Returns shapes and dtypes of one layer's parameters, boxed as by `abstract_params`."""
    return jax.eval_shape(lambda key: _init_block(module, key), jax.random.key(0))


def _init_block(module: nn.Module, key: jax.Array) -> dict[str, Any]:
    x = jnp.zeros((1, 1, module.config.hidden_size), module.dtype)
    positions = jnp.zeros((1, 1), jnp.int32)
    block = layer_module(module)
    return block.init(key, x, positions, lambda layer, q, k, v: (q, None), 0)["params"]


def init_blocks(module: nn.Module, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields random parameters of each layer, as arrays of the host, one layer after the other.

    They are drawn like those of `init_params`, but are not the same numbers.
    """
    init = jax.jit(lambda key: nn.meta.unbox(_init_block(module, key)))
    for layer in range(module.config.num_layers):
        yield jax.device_get(init(jax.random.fold_in(jax.random.key(seed), layer)))


def split_blocks(params: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns (the variables without the blocks' parameters, each block's, first to last)."""
    inner = params["params"]
    count = sum(name.startswith(BLOCK) for name in inner)
    rest = {name: value for name, value in inner.items() if not name.startswith(BLOCK)}
    return {"params": rest}, [inner[f"{BLOCK}{layer}"] for layer in range(count)]


def init_boxed(module: nn.Module, key: jax.Array) -> dict[str, Any]:
    """Returns random parameters, each boxed with the names of its logical axes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return module.init(key, tokens, tokens, lambda layer, q, k, v: (q, None))


def init_params(
    module: nn.Module, seed: int = 0, place: Place | None = None, *, blocks: bool = True
) -> dict[str, Any]:
    """Returns random parameters as plain arrays, ready for `apply`.

    Args:
      module: whose.
      seed: of the random numbers.
      place: where each lies, by the logical names of its axes; None: on the default device.
      blocks: False: leave them out, and do not make them either (`init_blocks` does).
    """
    if place is not None or not blocks:

        def init(key):
            params = init_boxed(module, key)
            return params if blocks else split_blocks(params)[0]

        shapes = jax.eval_shape(init, jax.random.key(0))
        shardings = place and jax.tree.map(lambda box: place(box.names), shapes, is_leaf=is_boxed)
        made = jax.jit(lambda key: nn.meta.unbox(init(key)), out_shardings=shardings)
        return made(jax.random.key(seed))
    # Not under jit: that would compile every layer's initialisers again (12 tiny layers take 20 s
    # instead of 3), where eager calls compile each shape once.
    return nn.meta.unbox(init_boxed(module, jax.random.key(seed)))


def is_boxed(x: Any) -> bool:
    """Returns whether it is a parameter in a box with the names of its axes."""
    return isinstance(x, nn.LogicallyPartitioned)


def abstract_params(module: nn.Module) -> dict[str, Any]:
    """Returns the parameters' shapes and dtypes, boxed with their logical axes; allocates nothing.

    Every leaf is a `flax.linen.LogicallyPartitioned` with `.value` (a `jax.ShapeDtypeStruct`) and
    `.names` (an entry for each axis, None where the axis is never split).
    """
    return jax.eval_shape(lambda key: init_boxed(module, key), jax.random.key(0))


def count_params(config: Config) -> int:
    """Returns the number of parameters of `config`; a tied output matrix counts once."""
    shapes = nn.meta.unbox(abstract_params(build(config)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
