"""Measures the memory bandwidth of this device, the floor of every decoding step.

Decoding is bound by memory, so its time is compared with the time to move the same bytes. On a CPU,
where writes are slower than reads, the reference is reading. GPUs are commonly rated by a copy,
bytes read plus bytes written. Both are measured.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.benchmarks.timing import fastest_seconds, queued_calls

MEBIBYTE = 2**20
ARRAYS = 4
# Far larger than any processor cache, and on an accelerator large enough to hide launch overhead.
DEFAULT_BYTES = {"cpu": 256 * MEBIBYTE}
DEFAULT_BYTES_ELSEWHERE = 4096 * MEBIBYTE
WIDTH = 64
HOST, PIECES = "pinned_host", 16


def _sum(x: Array) -> Array:
    return x.sum()


def _maximum(x: Array) -> Array:
    return x.max()


def _row_sums(x: Array) -> Array:
    return x.reshape(-1, WIDTH * WIDTH).sum(1)


def _matrix_vector(x: Array) -> Array:
    """Returns batched matrix-vector products, as in the scores of one query."""
    rows = x.reshape(16, -1, WIDTH)
    return jnp.einsum("bsd,bd->bs", rows, jnp.ones((16, WIDTH), x.dtype))


KERNELS = {
    "sum": _sum,
    "maximum": _maximum,
    "row sums": _row_sums,
    "matrix-vector": _matrix_vector,
}


# Each reads its argument and writes as many bytes.
COPIES = {"copy": jnp.copy, "negation": jnp.negative}


def _bandwidths(
    kernels: Mapping[str, Callable[[Array], Array]], passes: int, size: int | None, repeats: int
) -> dict[str, float]:
    """Returns the bytes per second of kernels that move each byte `passes` times."""
    if size is None:
        size = DEFAULT_BYTES.get(jax.default_backend(), DEFAULT_BYTES_ELSEWHERE)
    count = size // (4 * ARRAYS)  # float32 elements of one array
    unit = 16 * WIDTH * WIDTH
    if count < unit:
        raise ValueError(f"size={size} bytes is too small: it must be at least {4 * ARRAYS * unit}")
    count -= count % unit
    arrays = [jnp.full(count, i, jnp.float32) for i in range(ARRAYS)]
    programs = {
        name: jax.jit(lambda arrays, kernel=kernel: [kernel(x) for x in arrays])
        for name, kernel in kernels.items()
    }
    calls = {name: functools.partial(program, arrays) for name, program in programs.items()}
    seconds = fastest_seconds(calls, repeats=repeats, calls=queued_calls())
    return {name: passes * 4 * ARRAYS * count / time for name, time in seconds.items()}


def read_bandwidths(size: int | None = None, *, repeats: int = 7) -> dict[str, float]:
    """Returns the bytes per second of several kernels that read memory, by name.

    Args:
      size: bytes read per call; None: enough to exceed the processor's caches.
      repeats: timings of each kernel; the shortest counts.

    Raises:
      ValueError: size is too small.
    """
    return _bandwidths(KERNELS, 1, size, repeats)


def copy_bandwidths(size: int | None = None, *, repeats: int = 7) -> dict[str, float]:
    """Returns the bytes per second, read plus written, of several kernels that copy memory.

    Arguments and errors are those of `read_bandwidths`.
    """
    return _bandwidths(COPIES, 2, size, repeats)


def host_bandwidth(size: int | None = None, *, repeats: int = 7) -> float | None:
    """Returns the bytes per second of copies from pinned host memory to the device.

    Returns None if the device has no pinned host memory. Arguments are those of `read_bandwidths`.
    """
    device = jax.local_devices()[0]
    if HOST not in (memory.kind for memory in device.addressable_memories()):
        return None
    if size is None:
        size = DEFAULT_BYTES.get(jax.default_backend(), DEFAULT_BYTES_ELSEWHERE)
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST)
    array = jax.device_put(np.ones((PIECES, size // 4 // PIECES), np.float32), sharding)

    @jax.jit
    def fetch(pieces):
        def body(i, previous):
            del previous  # each piece overwrites the previous one
            piece = jax.lax.dynamic_index_in_dim(pieces, i, 0, keepdims=False)
            return jax.device_put(piece, jax.memory.Space.Device)

        return jax.lax.fori_loop(0, PIECES, body, jnp.zeros(pieces.shape[1], pieces.dtype))

    seconds = fastest_seconds({"fetch": functools.partial(fetch, array)}, repeats=repeats)
    return array.nbytes / seconds["fetch"]


def read_bandwidth(size: int | None = None, *, repeats: int = 7) -> float:
    """Returns the bytes per second of the fastest kernel that reads memory.

    Arguments and errors are those of `read_bandwidths`.
    """
    return max(read_bandwidths(size, repeats=repeats).values())


def copy_bandwidth(size: int | None = None, *, repeats: int = 7) -> float:
    """Returns the bytes per second, read plus written, of the fastest kernel that copies memory.

    Arguments and errors are those of `read_bandwidths`.
    """
    return max(copy_bandwidths(size, repeats=repeats).values())
