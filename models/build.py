"""From a config to a module and its parameters, for every family alike."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.llama import Block, Llama, LlamaConfig
from models.opt import Opt, OptBlock, OptConfig

# place(logical axes, one name or None for each axis) -> where the parameter should lie
Place = Callable[[tuple[str | None, ...]], jax.sharding.Sharding]
Config = LlamaConfig | OptConfig
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


def init_boxed(module: nn.Module, key: jax.Array) -> dict[str, Any]:
    """Returns random parameters, each boxed with the names of its logical axes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return module.init(key, tokens, tokens, lambda layer, q, k, v: (q, None))


def init_params(module: nn.Module, seed: int = 0, place: Place | None = None) -> dict[str, Any]:
    """Returns random parameters as plain arrays, ready for `apply`.

    Args:
      module: whose.
      seed: of the random numbers.
      place: where each lies, by the logical names of its axes; None: on the default device.
    """
    if place is not None:
        shardings = jax.tree.map(
            lambda box: place(box.names), abstract_params(module), is_leaf=_boxed
        )
        init = jax.jit(lambda key: nn.meta.unbox(init_boxed(module, key)), out_shardings=shardings)
        return init(jax.random.key(seed))
    # Not under jit: that would compile every layer's initialisers again (12 tiny layers take 20 s
    # instead of 3), where eager calls compile each shape once.
    return nn.meta.unbox(init_boxed(module, jax.random.key(seed)))


def _boxed(x: Any) -> bool:
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
