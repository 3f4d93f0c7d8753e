"""Pipeline parallelism: stages of devices run a model's layers on micro-batches at the same time.

In step t, stage s runs micro-batch t - s. With M micro-batches and S stages, every stage is idle in
S - 1 of M + S - 1 steps (GPipe, arXiv 1811.06965). In each step a stage sends the output of its
last layer to the next stage. Devices of a stage with replicated activations each send a part and
all-gather what they receive, so that everything crosses between stages, which may be on different
hosts, once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from sharding import collectives
from sharding.mesh import DATA, STAGE

# run(x [rows, ...], index of its first row; None: x is the whole batch) -> (the next stage's input,
# of x's shape; what to keep, arrays whose first axis is the rows)
Run = Callable[[Array, Int[Array, ""] | None], tuple[Array, Any]]


def stage_index() -> Int[Array, ""]:
    """Returns the index of this device's stage."""
    return lax.axis_index(STAGE)


def pipelined(
    run: Run, x: Array, micro_batches: int, axis_names: collectives.AxisNames = ()
) -> tuple[Array, Any]:
    """Returns this stage's output for the whole batch, and its auxiliary outputs.

    Only the last stage's output is the model's (`broadcast_from`).

    Args:
      run: this stage's layers; may use collectives within its stage.
      x: [B, ...], the first stage's input; other stages do not read it.
      micro_batches: M, which divides B.
      axis_names: mesh axes along which x is replicated and its last axis can be divided.
    """
    stages: int = lax.psum(1, STAGE)
    stage = stage_index()
    rows = x.shape[0] // micro_batches
    to_next = [(s, s + 1) for s in range(stages - 1)]

    def work(inputs, first, previous):
        del previous
        return run(inputs, None if micro_batches == 1 else first)

    def idle(inputs, first, previous):
        del inputs, first
        return previous

    def work_or_idle(busy, *operands):
        return lax.cond(busy, work, idle, *operands)

    def work_always(busy, inputs, first, previous):
        new = work(inputs, first, previous)
        return jax.tree.map(lambda new, old: jnp.where(busy, new, old), new, previous)

    shapes = jax.eval_shape(work, x[:rows], jnp.int32(0), None)

    def step(carry, t):
        sent, results = carry
        shard = lax.ppermute(collectives.local_slice(sent, (), axis_names), STAGE, to_next)
        received = collectives.all_gather(shard, axis_names)
        micro_batch = t - stage
        first = (jnp.clip(micro_batch, 0, micro_batches - 1) * rows).astype(jnp.int32)
        inputs = jnp.where(stage == 0, lax.dynamic_slice_in_dim(x, first, rows), received)
        busy = (micro_batch >= 0) & (micro_batch < micro_batches)
        # An idle stage writes back what it reads, so that a finished result stays. On a GPU `cond`
        # would synchronize with the host: there an idle stage computes and discards the result.
        previous = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, rows), results)
        new = lax.platform_dependent(
            busy, inputs, first, previous, cpu=work_or_idle, default=work_always
        )
        results = jax.tree.map(
            lambda x, update: lax.dynamic_update_slice_in_dim(x, update, first, 0), results, new
        )
        return (new[0], results), None

    zeros = jax.tree.map(
        lambda shape: jnp.zeros((micro_batches * rows, *shape.shape[1:]), shape.dtype), shapes
    )
    steps = jnp.arange(micro_batches + stages - 1, dtype=jnp.int32)
    (_, results), _ = lax.scan(step, (jnp.zeros_like(x[:rows]), zeros), steps)
    return results


def any_data_group(x: Bool[Array, ""]) -> Bool[Array, ""]:
    """Returns whether x holds in any group of rows.

    A collective permute between stages involves all devices, so that all groups must run the same
    number of steps.
    """
    return lax.pmax(x.astype(jnp.int32), DATA) > 0


def broadcast_from_first(tree: Any) -> Any:
    """Returns the first stage's int32 arrays on every stage; numpy arrays are constants and stay.

    All stages compute decisions from the same numbers, but from all-reduces over different devices,
    whose rounding may differ.
    """
    leaves, treedef = jax.tree.flatten(tree)
    traced = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    joined = jnp.concatenate([leaf.ravel() for leaf in traced])
    joined = lax.psum(jnp.where(stage_index() == 0, joined, 0), STAGE)
    arrays = iter(jnp.split(joined, np.cumsum([leaf.size for leaf in traced])[:-1]))
    received = [
        next(arrays).reshape(leaf.shape) if isinstance(leaf, jax.Array) else leaf for leaf in leaves
    ]
    return jax.tree.unflatten(treedef, received)


def broadcast_from(stage: int, x: Array, axis_names: collectives.AxisNames = ()) -> Array:
    """Returns the x of a stage on every stage; `axis_names` as in `pipelined`."""
    shard = collectives.local_slice(x, (), axis_names)
    shard = jnp.where(stage_index() == stage, shard, jnp.zeros_like(shard))
    return collectives.all_gather(lax.psum(shard, STAGE), axis_names)
