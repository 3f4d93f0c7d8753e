"""What a cell will take, roughly, before anything of it runs: memory, and time.

The cost model's plain steps over the rates of this machine, and a constant for starting and
compiling. It is good enough to tell a coffee from a night.
"""

import dataclasses
import functools
from typing import Literal

from experiments.schema import grid
from experiments.schema.method import LOOK_UP
from magicjax import cost_model
from magicjax.cost_model import Device, Machine, Sizes
from magicjax.generation import skeleton
from pallas_kernels.benchmarks import bandwidth
from sharding import MeshSize, parse_mesh

START_S = 20.0  # imports, weights, compiling, of each cell
CPU_FLOPS = 5e10
LINK = 1e10  # bytes a second, of a CPU's devices and of its copies
GPU = cost_model.find_device("h100")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of a cell.

    Attributes:
      memory_gb: weights and caches, of all devices together.
      seconds: from its start to its end.
    """

    memory_gb: float
    seconds: float


def of(cell: grid.Cell, on_gpu: bool) -> Estimate:
    """Returns what a cell will take; `on_gpu`: where it will run."""
    target = _sizes(cell.target, cell.dtype, cell.offloaded)
    mesh = parse_mesh(cell.mesh) if cell.mesh else MeshSize()
    device = dataclasses.replace(GPU, dtype=cell.dtype) if on_gpu else _cpu(cell.dtype)
    links = {"link": device.link or LINK, "host_link": device.host_link or LINK}
    machine = Machine(dataclasses.replace(device, **links), mesh.data, mesh.model)
    slots = cell.context + cell.new_tokens
    models = [_sizes(path, cell.dtype) for path in cell.models if path != LOOK_UP]
    bits = {"": None, "int8": 8, "int4": 4}[cell.cache.kv_dtype]
    kept = 0.0
    for sizes in models:
        kept += _weights(sizes)
        kept += cell.batch * (cell.cache.kv_budget or slots) * sizes.draft_kv_bytes(bits)
    if cell.draft == "self":
        kept += cell.batch * cell.cache.kv_budget * target.draft_kv_bytes(bits)
    step = sum(cost_model.plain_step(target, machine, cell.batch, cell.context).values())
    pass_flops = 2 * (target.attention + target.mlp) * cell.batch * cell.context
    prefill = pass_flops / (device.matrix_rate * mesh.data * mesh.model)
    ways = 1 if cell.draft == "none" else 2  # plain decoding runs beside it
    runs = ways * (cell.repeats + 1) + cell.phases
    if cell.draft == "none" and cell.candidates > 1:
        runs += cell.candidates  # to choose the prompts of a group
    seconds = START_S + runs * (prefill + cell.new_tokens * step)
    kept += _weights(target) + cell.batch * slots * target.kv_bytes
    return Estimate(kept / 1e9, seconds)


@functools.cache
def _sizes(source: str, dtype: str, offload: bool | Literal["int8"] = False) -> Sizes:
    return cost_model.sizes_of(skeleton(source).config, dtype, source, offload)


def _weights(sizes: Sizes) -> float:
    return sizes.weight_bytes + sizes.itemsize * sizes.tables


@functools.cache
def _cpu(dtype: str) -> Device:
    return Device(
        "cpu", bandwidth.read_bandwidth(), CPU_FLOPS, 1e12, None, dtype=dtype, fetches_beside=False
    )
