"""The devices that workloads can be counted or compiled for without being present.

A GPU is described by a file in XLA's format. libtpu knows TPUs by the name of a topology. A CPU has
a size of memory only: nothing is compiled for it.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from magicjax.suggest import did_you_mean
from pallas_kernels.attention import MOSAIC
from pallas_kernels.mosaic_gpu import mosaic
from pallas_kernels.tpu import attention as tpu_attention
from sharding import MeshSize, make_mesh

GPUS = {path.stem: path for path in (pathlib.Path(__file__).with_name("devices")).glob("*.txtpb")}
CPU = re.compile(r"cpu:([1-9]\d*)")  # with so many GiB of memory
MAJOR = re.compile(r"cuda_compute_capability\s*\{\s*major:\s*(\d+)\b")


class Tpu(NamedTuple):
    """A generation of TPUs.

    Attributes:
      prefix: the first part of libtpu's topology names.
      shapes: shapes of slices, by the number of JAX devices; a chip of tpu7x is two.
      memory: bytes of a JAX device.
    """

    prefix: str
    shapes: Mapping[int, str]
    memory: int


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
TPUS = {
    "v5e": Tpu("v5e", _FLAT, 16 << 30),
    "v5p": Tpu("v5p", _CUBES, 95 << 30),
    "v6e": Tpu("v6e", _FLAT, 32 << 30),
    "tpu7x": Tpu("tpu7x", {2 * devices: shape for devices, shape in _CUBES.items()}, 96 << 30),
}
# Without a TPU, libtpu reads these variables instead of querying the metadata server. Without the
# first, a second process that compiles at the same time is an error.
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def is_tpu(device: str) -> bool:
    """Returns whether a device is one of `TPUS`."""
    return device.lower() in TPUS


def is_cpu(device: str) -> bool:
    """Returns whether a device is a CPU with its memory in GiB, such as `cpu:16`."""
    return CPU.fullmatch(device.lower()) is not None


def description(device: str) -> str:
    """Returns XLA's description of a GPU: one of `GPUS`, or a file in the same format.

    Raises:
      ValueError: the device is unknown, a TPU or a CPU.
    """
    if device.lower() in GPUS:
        return GPUS[device.lower()].read_text()
    if device.endswith(".txtpb") and pathlib.Path(device).is_file():
        return pathlib.Path(device).read_text()
    known = sorted([*GPUS, *TPUS])
    raise ValueError(
        f"device={device} is unknown: use {', '.join(known)}, cpu:16 for a CPU with 16 GiB, or the "
        f"path of a description, NAME.txtpb{did_you_mean(device, known)}"
    )


def memory_bytes(device: str) -> int:
    """Returns the bytes of a device's memory.

    Raises:
      ValueError: the device is unknown, or its description has no memory size.
    """
    if is_tpu(device):
        return TPUS[device.lower()].memory
    if cpu := CPU.fullmatch(device.lower()):
        return int(cpu[1]) << 30
    match = re.search(r"device_memory_size: (\d+)", description(device))
    if match is None:
        raise ValueError(f"device={device} has no device_memory_size: add it to its description")
    return int(match[1])


def unsupported_reason(backend: str, device: str) -> str | None:
    """Returns why a device does not run a backend, None if it does.

    Raises:
      ValueError: the device is unknown.
    """
    if backend == "tpu":
        return None if is_tpu(device) else f"backend=tpu needs a TPU, not {device}"
    if kernel := MOSAIC.get(backend):
        major = None if is_tpu(device) or is_cpu(device) else MAJOR.search(description(device))
        if major is None or int(major[1]) != kernel.major:
            return f"backend={backend} needs {kernel.devices}, not {device}"
    return None


def best_backend(device: str, dtype: jnp.dtype, head_dim: int) -> str:
    """Returns the attention backend that is the default on a device, if it is right there."""
    if is_cpu(device):
        return "cpu"
    kernels = {
        name: mosaic.unsupported_reason(kernel, dtype, head_dim) for name, kernel in MOSAIC.items()
    }
    kernels["tpu"] = tpu_attention.unsupported_reason(dtype)
    for backend, reason in kernels.items():
        if not reason and not unsupported_reason(backend, device):
            return backend
    return "xla"


def topology_mesh(device: str, size: MeshSize) -> Mesh:
    """Returns a mesh of devices, which need not be present.

    Raises:
      ValueError: the compiler for the devices is not installed, or the mesh has too many.
    """
    count = size.devices
    if is_tpu(device):
        tpu = TPUS[device.lower()]
        sufficient = [devices for devices in tpu.shapes if devices >= count]
        if not sufficient:
            raise ValueError(
                f"a mesh of {count} {device} is not supported: use at most {max(tpu.shapes)}"
            )
        topology_options = {
            "platform": "tpu",
            "topology_name": f"{tpu.prefix}:{tpu.shapes[min(sufficient)]}",
        }
    else:
        topology_options = {"platform": "cuda", "topology": f"1x1x{count}"}
        topology_options["target_config"] = description(device)
    try:
        topology = topologies.get_topology_desc(**topology_options)
    except (NotImplementedError, RuntimeError, ImportError) as error:  # no plugin for the platform
        raise ValueError(
            f"the compiler for {device} is not available: {error}; `magicjax fit` downloads it"
        ) from error
    return make_mesh(*size, devices=topology.devices[:count])
