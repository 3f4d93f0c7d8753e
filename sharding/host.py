"""Arrays in host memory, which are streamed to the device step by step.

While a step computes, the next step's part is copied, so the device holds at most the parts of two
steps.
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
        memory_kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in memory_kinds:
            raise ValueError(
                f"offload needs memory of kind {HOST}, and {device} has "
                f"{', '.join(memory_kinds) or 'none'}: load the model without offload, or use a "
                "GPU or CPU"
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
    run: Callable[[Array, int, Any], tuple[Array, Any]],
    carry: Array,
    parts: Sequence[tuple[Any, int]],
) -> tuple[Array, tuple]:
    """Returns the last carry, and each step's outputs.

    Args:
      run: one step: (carry, step, its part on the device) -> (carry, outputs). The new carry must
        depend on the whole part.
      carry: the first step's input, floating point.
      parts: of each step, arrays [n, ...] in host memory, and which of the n it has.
    """

    def fetch(step, after):
        # Without this dependence XLA may fetch earlier, or once for all enclosing loops, and keep a
        # third part on the device.
        stacked, index = parts[step]
        index = index + _zero_after(after)
        part = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), stacked
        )
        return jax.device_put(part, jax.memory.Space.Device)

    outputs, part = list[Any](), fetch(0, carry)
    for step in range(len(parts)):
        next_part = fetch(step + 1, carry) if step + 1 < len(parts) else None  # beside this step
        carry, step_outputs = run(carry, step, part)
        outputs.append(step_outputs)
        part = next_part
    return carry, tuple(outputs)


def _zero_after(x: Array) -> Int[Array, ""]:
    """Returns a zero that depends on x, which is floating point, so that XLA cannot fold it."""
    first = x.ravel()[0]
    return (jnp.isnan(first) & jnp.isinf(first)).astype(jnp.int32)
