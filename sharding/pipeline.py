"""A pipeline: stages of devices, each with a part of a model's layers, that work at the same time.

A batch goes through the stages in micro-batches: in turn t, stage s has micro-batch t - s. So of M
micro-batches and S stages every stage is idle in S - 1 of M + S - 1 turns (GPipe, arXiv
1811.06965). From a stage to the next goes what a micro-batch's last layer there gave, once a turn.
Devices of a stage that have the same send a part each, and join what they get: between stages,
which may be between hosts, everything goes once.
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

# run(x [rows, ...], its first row in the batch; None: it is the whole) -> (what goes to the next
# stage, of x's shape; what is kept, arrays whose first axis is the rows)
Run = Callable[[Array, Int[Array, ""] | None], tuple[Array, Any]]


def place() -> Int[Array, ""]:
    """Returns which stage this device belongs to, from 0."""
    return lax.axis_index(STAGE)


def idle_share(stages: int, micro_batches: int) -> float:
    """Returns the share of the turns in which a stage has nothing to do."""
    return (stages - 1) / (micro_batches + stages - 1)


def pipelined(
    run: Run, x: Array, micro_batches: int, over: collectives.Over = ()
) -> tuple[Array, Any]:
    """Returns (this stage's output of the whole batch, what it kept of it).

    The output is the model's on the last stage alone (`from_last`).

    Args:
      run: this stage's layers; it may speak with devices of its own stage.
      x: [B, ...], what the first stage gets; of the others it is not read.
      micro_batches: M, which divides B.
      over: the axes along which devices of a stage have the same x, and divide its last axis.
    """
    stages: int = lax.psum(1, STAGE)
    stage = place()
    rows = x.shape[0] // micro_batches
    onward = [(s, s + 1) for s in range(stages - 1)]

    def work(own, first, held):
        del held
        return run(own, None if micro_batches == 1 else first)

    def rest(own, first, held):
        del own, first
        return held

    def work_or_rest(busy, *given):
        return lax.cond(busy, work, rest, *given)

    def work_anyway(busy, own, first, held):
        new = work(own, first, held)
        return jax.tree.map(lambda found, held: jnp.where(busy, found, held), new, held)

    shapes = jax.eval_shape(work, x[:rows], jnp.int32(0), None)

    def turn(carry, t):
        before, found = carry
        part = lax.ppermute(collectives.narrowed(before, (), over), STAGE, onward)
        came = collectives.joined(part, over)
        micro = t - stage
        first = (jnp.clip(micro, 0, micro_batches - 1) * rows).astype(jnp.int32)
        own = jnp.where(stage == 0, lax.dynamic_slice_in_dim(x, first, rows), came)
        busy = (micro >= 0) & (micro < micro_batches)
        # Who rests puts back what it holds: a micro-batch's result stays where it is. A GPU's host
        # would have to read who does: it works in vain instead, beside those that must.
        held = jax.tree.map(lambda whole: lax.dynamic_slice_in_dim(whole, first, rows), found)
        new = lax.platform_dependent(busy, own, first, held, cpu=work_or_rest, default=work_anyway)
        found = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, first, 0),
            found,
            new,
        )
        return (new[0], found), None

    nothing = jax.tree.map(
        lambda shape: jnp.zeros((micro_batches * rows, *shape.shape[1:]), shape.dtype), shapes
    )
    turns = jnp.arange(micro_batches + stages - 1, dtype=jnp.int32)
    (_, found), _ = lax.scan(turn, (jnp.zeros_like(x[:rows]), nothing), turns)
    return found


def anywhere(x: Bool[Array, ""]) -> Bool[Array, ""]:
    """Returns whether it holds in any group of rows.

    What goes from stage to stage does so in one step of all devices, which must take as many.
    """
    return lax.pmax(x.astype(jnp.int32), DATA) > 0


def of_first(tree: Any) -> Any:
    """Returns, on every stage, the first one's int32 arrays: what one stage decided, all do.

    All stages decide by the same numbers, but each has them from sums over its own devices, which
    need not round alike.
    """
    leaves, treedef = jax.tree.flatten(tree)
    joined = jnp.concatenate([leaf.ravel() for leaf in leaves])
    joined = lax.psum(jnp.where(place() == 0, joined, 0), STAGE)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = [x.reshape(leaf.shape) for x, leaf in zip(jnp.split(joined, ends), leaves, strict=True)]
    return jax.tree.unflatten(treedef, parts)


def from_last(x: Array, over: collectives.Over = ()) -> Array:
    """Returns, on every stage, what the last one has; `over` as in `pipelined`."""
    last, part = lax.psum(1, STAGE) - 1, collectives.narrowed(x, (), over)
    part = jnp.where(place() == last, part, jnp.zeros_like(part))
    return collectives.joined(lax.psum(part, STAGE), over)
