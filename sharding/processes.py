"""Several processes that run one program on the devices of all."""

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from sharding.mesh import parse_mesh

_TIMEOUT_S = 30  # after which the loss of a process ends the others
# Words in the runtime's errors when another process does not answer.
_LOSSES = ("Gloo", "NCCL", "Connection", "UNAVAILABLE", "DEADLINE_EXCEEDED")


def join(
    coordinator: str | None,
    count: int | None,
    rank: int | None,
    meshes: Iterable[str],
    run: Any,
) -> None:
    """Starts JAX's distributed runtime, and checks that all processes run the same.

    Args:
      coordinator: HOST:PORT of rank 0. JAX detects omitted arguments, such as under SLURM.
      count: the number of processes.
      rank: rank of this process, from 0.
      meshes: the run's meshes, as text, "" for one device.
      run: what must be equal in all processes; its representation is compared.

    Raises:
      ValueError: JAX cannot start, a mesh does not have all devices, or `run` differs.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            rank,
            heartbeat_timeout_seconds=_TIMEOUT_S,
            shutdown_timeout_seconds=_TIMEOUT_S,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"JAX cannot join the processes ({error}): outside SLURM and Open MPI, pass "
            "--coordinator, --processes and --rank"
        ) from error
    for mesh in meshes:
        size = parse_mesh(mesh).devices if mesh else 1
        if size != jax.device_count():
            raise ValueError(
                f"mesh {mesh or 'not set'}: {size} devices, and the {jax.process_count()} "
                f"processes have {jax.device_count()}: use a mesh of all devices"
            )
    digest = np.frombuffer(hashlib.sha256(repr(run).encode()).digest(), np.uint8)
    try:
        multihost_utils.assert_equal(digest)
    except AssertionError as error:
        raise ValueError(
            "the processes have different options, files or versions: start all of them with the "
            "same command"
        ) from error


def is_loss(error: Exception) -> bool:
    """Returns whether an error may be due to the loss of another process."""
    return jax.process_count() > 1 and any(word in str(error) for word in _LOSSES)
