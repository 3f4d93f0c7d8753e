"""The mesh: `stage` divides the target by layers, `data` the rows of a batch, `model` each layer.

A factored mesh has one axis for each prime factor of `model`, the first varying slowest. A model
with fewer shards (a small draft), and KV heads that are fewer than the devices, are divided over
the first of these axes and replicated along the others. 8 devices can hold 8 parts of a target, 2
KV heads four times each, and a draft of 4 parts twice.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

STAGE, DATA, MODEL = "stage", "data", "model"
AXES = (STAGE, DATA, MODEL)  # the first varies slowest: stages are farthest apart
AnyMesh = Mesh | AbstractMesh  # an abstract mesh suffices for shapes


class MeshSize(NamedTuple):
    """The number of devices along each axis, in the order of `make_mesh`'s arguments."""

    data: int = 1
    model: int = 1
    stage: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.model * self.stage

    def __str__(self) -> str:
        stages = f"{STAGE}={self.stage}," if self.stage != 1 else ""
        return f"{stages}{DATA}={self.data},{MODEL}={self.model}"


def make_mesh(
    data: int = 1,
    model: int = 1,
    stage: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns a mesh of stage * data * model devices with axes of these names.

    Devices along `model` communicate in every layer, those along `stage` once in every pass, and
    those along `data` never. With several processes, `stage` and then `data` therefore cross
    process boundaries: devices are taken process by process.

    Args:
      data: number of device groups, each with its own rows and a whole target.
      model: number of devices that divide the target's heads, MLP and vocabulary.
      stage: number of pipeline stages, which divide the target's layers.
      devices: the devices; None: the first ones.

    Raises:
      TypeError: a size is not an integer.
      ValueError: a number below 1, or more devices than are available.
    """
    size = MeshSize(data, model, stage)
    for axis, count in size._asdict().items():
        if type(count) is not int:
            raise TypeError(f"{axis}={count!r}: it must be a whole number of devices")
    if min(size) < 1:
        raise ValueError(f"mesh {size}: every number must be at least 1")
    available = list(jax.devices() if devices is None else devices)
    if size.devices > len(available):
        raise ValueError(
            f"mesh {size} needs {size.devices} devices, and there are {len(available)}: use fewer, "
            "or on a CPU start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size.devices}"
        )
    chosen = np.array(available[: size.devices]).reshape(stage, data, model)
    return Mesh(chosen, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parse_mesh(text: str) -> MeshSize:
    """Returns the size of a mesh in the form `stage=2,data=2,model=2`; omitted axes are 1.

    Raises:
      ValueError: the text has another form.
    """
    matches = [re.fullmatch(r"(\w+)=(\d+)", axis) for axis in text.split(",")]
    names = [match[1] for match in matches if match]
    if len(names) < len(matches) or len(set(names)) < len(names) or set(names) - set(AXES):
        raise ValueError(
            f"{text!r} is not a valid mesh: use stage=2,data=2,model=2, or some of these"
        )
    size = MeshSize(**{match[1]: int(match[2]) for match in matches if match})
    if min(size) < 1:
        raise ValueError(f"mesh {text}: every number must be at least 1")
    return size


def abstract_mesh(data: int = 1, model: int = 1, stage: int = 1) -> AbstractMesh:
    """Returns a factored mesh without devices, for shapes."""
    sizes = (stage, data, *prime_factors(model))
    return AbstractMesh(sizes, _names(len(sizes)), axis_types=(AxisType.Auto,) * len(sizes))


def _names(count: int) -> tuple[str, ...]:
    return (STAGE, DATA, *(f"{MODEL}_{i}" for i in range(count - 2)))


@functools.cache
def factored(mesh: AnyMesh) -> Any:
    """Returns the mesh with one axis per prime factor of `model`: model_0, model_1, …

    Raises:
      TypeError: the argument is not a mesh.
      ValueError: the mesh has axes other than `stage`, `data`, `model`, and is not factored.
    """
    if not isinstance(mesh, AnyMesh):
        raise TypeError(
            f"mesh={mesh!r} is not a mesh: make one with magicjax.make_mesh(data, model)"
        )
    automatic = all(axis_type == AxisType.Auto for axis_type in mesh.axis_types)
    if automatic and mesh.axis_names == _names(len(mesh.axis_names)):
        return mesh
    if not set(mesh.axis_names) <= set(AXES):
        raise ValueError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names))}: it must have "
            f"{', '.join(AXES)} or some of them, as those of magicjax.make_mesh"
        )
    order = [mesh.axis_names.index(name) for name in AXES if name in mesh.axis_names]
    devices = mesh.devices.transpose(order)
    factors = prime_factors(mesh.shape.get(MODEL, 1))
    names = _names(2 + len(factors))
    devices = devices.reshape(mesh.shape.get(STAGE, 1), mesh.shape.get(DATA, 1), *factors)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def model_axes(mesh: AnyMesh) -> dict[str, int]:
    """Returns the factored axes of `model` with their sizes, in order."""
    return {str(name): size for name, size in mesh.shape.items() if name not in (STAGE, DATA)}


def first_axes(mesh: AnyMesh, count: int) -> tuple[str, ...]:
    """Returns the first factored axes of `model` with a product of `count`.

    Raises:
      ValueError: there are no such axes; the message lists the valid counts.
    """
    axes = model_axes(mesh)
    products = np.cumprod([1, *axes.values()]).tolist()
    if count not in products:
        raise ValueError(
            f"model={math.prod(axes.values())} devices cannot hold {count} parts: use one of "
            f"{', '.join(map(str, products))}"
        )
    return tuple(axes)[: products.index(count)]


def prime_factors(n: int) -> list[int]:
    """Returns the prime factors of n, ascending."""
    factors, factor = [], 2
    while n > 1:
        while n % factor == 0:
            factors.append(factor)
            n //= factor
        factor += 1
    return factors
