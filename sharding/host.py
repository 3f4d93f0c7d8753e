"""Arrays in host memory, and a scan that has one step's part of them on the device, and the next.

What is streamed is stacked: the first axis of every array is the step. While a step computes, the
next one's part is on its way, so the device holds two steps' parts at most.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

HOST = "pinned_host"


def check_host(devices: Sequence[Any] | None = None) -> None:
    """Raises ValueError unless every device can read pinned host memory; None: the default one."""
    for device in jax.local_devices()[:1] if devices is None else devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise ValueError(
                f"offload needs memory of the kind {HOST}, and {device} has "
                f"{', '.join(kinds) or 'none'}: load the model without offload, or use a GPU or CPU"
            )


def in_host_memory(sharding: jax.sharding.Sharding | None = None) -> jax.sharding.Sharding:
    """Returns the place in host memory beside one on devices; None: beside the default device."""
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    found = sharding.with_memory_kind(HOST)
    if found.memory_kind != HOST:  # JAX forgets it where devices are only described
        assert isinstance(sharding, NamedSharding)
        found = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)
    return found


def stream(
    run: Callable[[Array, Any, Any], tuple[Array, Any]],
    carry: Array,
    stacked: Any,
    steps: int,
) -> tuple[Array, tuple]:
    """Returns (the last carry, what each step kept), as `run(carry, step, part)` gives them.

    All steps but the last one or two are one `scan`, two steps a turn, in which `step` is traced:
    so a part is fetched into the very place of the one before the last, and never copied again. Of
    the last steps it is an int.

    Args:
      run: one step: (carry, step, its part on the device) -> (carry, what it kept), of the same
        shapes in each. All of the part must go into the carry.
      carry: what the first step gets, floating.
      stacked: arrays [steps, ...] in host memory.
      steps: how many, at least 1.
    """

    def fetch(step, after):
        # Were nothing to come before, XLA might fetch early, or once for all loops around, and
        # keep a third part on the device.
        step = step + _zero_after(after)
        parts = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, step, 0, keepdims=False), stacked
        )
        return jax.device_put(parts, jax.memory.Space.Device)

    def two(carry_and_part, step):
        carry, part = carry_and_part
        other = fetch(step + 1, carry)  # nothing of this step waits for it
        carry, first = run(carry, step, part)
        part = fetch(step + 2, carry)  # where the step's own part is done with
        carry, second = run(carry, step + 1, other)
        return (carry, part), (first, second)

    turns, kept = (steps - 1) // 2, list[Any]()
    part = fetch(0, carry)
    if turns:
        (carry, part), pairs = jax.lax.scan(two, (carry, part), 2 * jnp.arange(turns))
        leaves, treedef = jax.tree.flatten(pairs)
        for turn in range(turns):
            kept += jax.tree.unflatten(treedef, [x[turn] for x in leaves])
    for step in range(2 * turns, steps):
        other = fetch(step + 1, carry) if step + 1 < steps else None
        carry, of_step = run(carry, step, part)
        kept.append(of_step)
        part = other
    return carry, tuple(kept)


def _zero_after(x: Array) -> Int[Array, ""]:
    """Returns 0, in a way that makes it depend on x, floating: no number is infinite and none."""
    first = x.ravel()[0]
    return (jnp.isnan(first) & jnp.isinf(first)).astype(jnp.int32)
