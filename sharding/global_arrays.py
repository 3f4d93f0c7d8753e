"""Arrays of a mesh whose devices can be those of several processes."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def fetch(tree: Any) -> Any:
    """Returns arrays as NumPy arrays, also those on devices of other processes.

    All processes must call it. The transfers run at the same time.
    """
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            x.copy_to_host_async()

    def fetch_one(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(fetch_one, tree)


def put(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Returns arrays with a sharding, of which each process transfers its own part.

    All processes must call it with the same arrays.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _put_shard(x, sharding), tree)


def _put_shard(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data, impl = np.asarray(jax.random.key_data(x)), jax.random.key_impl(x)
        return jax.random.wrap_key_data(_put_shard(data, sharding), impl=impl)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def broadcast_from_rank0(value: Any) -> Any:
    """Returns the JSON value of rank 0. All processes must call it."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    padded = np.resize(text, size)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)))
