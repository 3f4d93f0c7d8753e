"""Arrays in host memory, and a scan that streams them to the device step by step.

Streamed arrays are stacked by step along their first axis. While a step computes, the next step's
part is copied, so the device holds at most the parts of two steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

HOST = "pinned_host"


def check_devices(devices: Sequence[Any] | None = None) -> None:
    """Raises ValueError unless the devices can read pinned host memory; None: the default one."""
    for device in jax.local_devices()[:1] if devices is None else devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise ValueError(
                f"offload needs memory of kind {HOST}, and {device} has "
                f"{', '.join(kinds) or 'none'}: load the model without offload, or use a GPU or CPU"
            )


def in_host_memory(sharding: jax.sharding.Sharding | None = None) -> jax.sharding.Sharding:
    """Returns the sharding with memory kind `HOST`; None: of the default device."""
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    pinned = sharding.with_memory_kind(HOST)
    if pinned.memory_kind != HOST:  # JAX drops the kind for devices of a topology description
        assert isinstance(sharding, NamedSharding)
        pinned = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)
    return pinned


def stream(
    run: Callable[[Array, Any, Any], tuple[Array, Any]],
    carry: Array,
    stacked: Any,
    steps: int,
) -> tuple[Array, tuple]:
    """Returns the last carry, and each step's outputs.

    All steps but the last one or two run in a `scan`, two per iteration, with a traced `step`: a
    part is copied into the buffer of the part before the previous one, without another copy. In the
    last steps `step` is an int.

    Args:
      run: one step: (carry, step, its part on the device) -> (carry, outputs), with the same
        shapes in all steps. The new carry must depend on the whole part.
      carry: the first step's input, floating point.
      stacked: arrays [steps, ...] in host memory.
      steps: number of steps, at least 1.
    """

    def fetch(step, after):
        # Without this dependence XLA may fetch earlier, or once for all enclosing loops, and keep a
        # third part on the device.
        step = step + _zero_after(after)
        parts = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, step, 0, keepdims=False), stacked
        )
        return jax.device_put(parts, jax.memory.Space.Device)

    def run_two(carry_and_part, step):
        carry, part = carry_and_part
        next_part = fetch(step + 1, carry)  # overlaps with this step
        carry, first = run(carry, step, part)
        part = fetch(step + 2, carry)  # into the buffer of `part`
        carry, second = run(carry, step + 1, next_part)
        return (carry, part), (first, second)

    pairs, outputs = (steps - 1) // 2, list[Any]()
    part = fetch(0, carry)
    if pairs:
        (carry, part), of_pairs = jax.lax.scan(run_two, (carry, part), 2 * jnp.arange(pairs))
        for i in range(pairs):
            outputs += jax.tree.map(lambda x, i=i: x[i], of_pairs)
    for step in range(2 * pairs, steps):
        next_part = fetch(step + 1, carry) if step + 1 < steps else None
        carry, of_step = run(carry, step, part)
        outputs.append(of_step)
        part = next_part
    return carry, tuple(outputs)


def _zero_after(x: Array) -> Int[Array, ""]:
    """Returns a zero that depends on x, which is floating point, so that XLA cannot fold it."""
    first = x.ravel()[0]
    return (jnp.isnan(first) & jnp.isinf(first)).astype(jnp.int32)
