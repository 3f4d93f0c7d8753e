"""How fast this device moves memory: the floor that every decoding step is held against.

Decoding moves bytes and computes little, so a time means something only beside the time that the
same bytes take to be moved at all. On a CPU that is the time of reading them: a cache that is only
read must not be held against writes, which are dearer there. GPUs are commonly judged by a copy,
bytes read plus bytes written, and both are given.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.benchmarks.timing import calls_in_a_row, fastest_seconds

MEBIBYTE = 2**20
ARRAYS = 4
# What is read must be far larger than any cache on the way, and on an accelerator long enough to
# hide the start of a program.
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
    """Returns the products that a query's scores are made of: batched rows times a vector."""
    rows = x.reshape(16, -1, WIDTH)
    return jnp.einsum("bsd,bd->bs", rows, jnp.ones((16, WIDTH), x.dtype))


KERNELS = {
    "sum": _sum,
    "maximum": _maximum,
    "row sums": _row_sums,
    "matrix-vector": _matrix_vector,
}


# Each reads its argument and writes as much.
COPIES = {"copy": jnp.copy, "negation": jnp.negative}


def _moved(
    kernels: Mapping[str, Callable[[Array], Array]], passes: int, size: int | None, rounds: int
) -> dict[str, float]:
    """Returns the bytes per second of kernels that go over memory so many times."""
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
    seconds = fastest_seconds(calls, rounds=rounds, calls=calls_in_a_row())
    return {name: passes * 4 * ARRAYS * count / time for name, time in seconds.items()}


def read_bandwidths(size: int | None = None, *, rounds: int = 7) -> dict[str, float]:
    """Returns the bytes per second at which each of several simple kernels reads memory.

    Args:
      size: bytes read by a call; None for enough to overflow the caches of this platform.
      rounds: how often each kernel is timed; the shortest time counts.

    Raises:
      ValueError: size is too small to hold a whole number of rows.
    """
    return _moved(KERNELS, 1, size, rounds)


def copy_bandwidths(size: int | None = None, *, rounds: int = 7) -> dict[str, float]:
    """Returns the bytes per second, read plus written, at which memory is copied in several ways.

    Arguments and errors are those of `read_bandwidths`.
    """
    return _moved(COPIES, 2, size, rounds)


def host_bandwidth(size: int | None = None, *, rounds: int = 7) -> float | None:
    """Returns the bytes per second of copies from pinned host memory to the device, piece by piece.

    None: the device cannot read such memory. Arguments are those of `read_bandwidths`.
    """
    device = jax.local_devices()[0]
    if HOST not in (memory.kind for memory in device.addressable_memories()):
        return None
    if size is None:
        size = DEFAULT_BYTES.get(jax.default_backend(), DEFAULT_BYTES_ELSEWHERE)
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST)
    array = jax.device_put(np.ones((PIECES, size // 4 // PIECES), np.float32), place)

    @jax.jit
    def fetch(pieces):
        def body(i, old):
            del old  # each piece lands where the one before lay
            piece = jax.lax.dynamic_index_in_dim(pieces, i, 0, keepdims=False)
            return jax.device_put(piece, jax.memory.Space.Device)

        return jax.lax.fori_loop(0, PIECES, body, jnp.zeros(pieces.shape[1], pieces.dtype))

    seconds = fastest_seconds({"fetch": functools.partial(fetch, array)}, rounds=rounds)
    return array.nbytes / seconds["fetch"]


def read_bandwidth(size: int | None = None, *, rounds: int = 7) -> float:
    """Returns the bytes per second that this device reads, by the fastest of several kernels.

    Arguments and errors are those of `read_bandwidths`.
    """
    return max(read_bandwidths(size, rounds=rounds).values())


def copy_bandwidth(size: int | None = None, *, rounds: int = 7) -> float:
    """Returns the bytes per second, read plus written, of the fastest way to copy memory.

    Arguments and errors are those of `read_bandwidths`.
    """
    return max(copy_bandwidths(size, rounds=rounds).values())
