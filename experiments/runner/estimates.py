"""Estimates memory and time of a cell before it runs.

The time is that of prefills and of the cost model's plain steps at the rates of this machine, plus
a constant for starting and compiling: an order of magnitude.
"""

import dataclasses
import functools

from experiments.runner.preflight import unloaded
from experiments.schema import grid
from magicjax.decoding import footprint
from magicjax.drafters import spec
from magicjax.prediction import cost_model
from magicjax.prediction.cost_model import Device, Machine, Sizes
from magicjax.prediction.planner.candidates import model_sizes
from pallas_kernels.benchmarks import bandwidth
from sharding import MeshSize, parse_mesh

START_S = 20.0  # of each cell: imports, weights, compiling
CPU_FLOPS = 1.6e11  # of prefill in float32 on two cores with AVX-512
LINK = 1e10  # bytes per second between the devices of a CPU, and of its copies
GPU = cost_model.find_device("h100")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of a cell.

    Attributes:
      memory_gb: weights and caches on all devices; offloaded weights are not on a device.
      seconds: from start to end.
    """

    memory_gb: float
    seconds: float


def of(cell: grid.Cell, on_gpu: bool, chooses: bool) -> Estimate:
    """Returns the estimate of a cell on a GPU or a CPU.

    `chooses` is whether the cell chooses the prompts of its group.
    """
    load = functools.partial(unloaded, dtype=cell.dtype, packed=cell.packed)
    target = load(cell.target, **cell.storage)
    rows, capacity = cell.batch, cell.context + cell.new_tokens
    num_bytes = footprint.of_models(target, None, rows, capacity).resident
    for draft in cell.drafts:
        drafter = spec.make_one(draft, load).for_target(target)
        num_bytes += footprint.of_models(target, drafter, rows, capacity).draft
    sizes = model_sizes(target, cell.dtype)
    return Estimate(num_bytes / 1e9, _seconds(cell, sizes, on_gpu, chooses))


def _seconds(cell: grid.Cell, target: Sizes, on_gpu: bool, chooses: bool) -> float:
    mesh = parse_mesh(cell.mesh) if cell.mesh else MeshSize()
    device = dataclasses.replace(GPU, dtype=cell.dtype) if on_gpu else _cpu(cell.dtype)
    links = {"link": device.link or LINK, "host_link": device.host_link or LINK}
    machine = Machine(dataclasses.replace(device, **links), mesh.data, mesh.model)
    step = sum(cost_model.plain_step(target, machine, cell.batch, cell.context).values())
    parts = cost_model.pass_parts(target, machine, cell.batch, cell.context, slots=0)
    flops = sum(part.flops for name, part in parts.items() if name != "logits")
    prefill, decode = flops / device.matrix_rate, cell.new_tokens * step
    methods = 1 if cell.draft == "none" else 2  # plain decoding runs beside the cell
    if cell.slots:  # until the last arrival, or longer if the engine is too slow
        busy = cell.num_requests / cell.slots * (prefill + decode)
        arriving = cell.num_requests / cell.rate
        return START_S + methods * max(1, cell.repeats) * max(busy, arriving)
    runs = methods * (cell.repeats + 1)
    shared = cell.repeats > 0 and cell.draft != "auto"  # one prefill for all runs of a batch
    batch = (1 if shared else runs) * prefill + runs * decode
    if chooses and cell.candidates > 1:
        batch += cell.candidates * (prefill + decode)
    traced = decode if cell.phases and cell.repeats else 0.0
    return START_S + cell.num_requests // cell.batch * batch + traced


@functools.cache
def _cpu(dtype: str) -> Device:
    rate = bandwidth.read_bandwidth()
    return Device("cpu", rate, CPU_FLOPS, 1e12, None, dtype=dtype, overlaps_fetch=False)
