"""Compiles the loop for GPUs that are not here, and reads what became of it.

`magicjax fit` runs it in a process that has the CUDA compiler; it needs no GPU and no NVIDIA
library.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

import models
from magicjax import placement
from magicjax.aot import hlo
from magicjax.decoding import program_cache
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request, prepare
from magicjax.decoding.runner import state_shapes
from magicjax.drafters.spec import make_drafter
from magicjax.generation import skeleton
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.model import Model
from magicjax.parallel import offloading
from magicjax.trees.token_tree import parse_tree
from pallas_kernels import choose_backend
from sharding import STAGE, AnyMesh, MeshSize, make_mesh

DEVICES = {
    path.stem: path for path in (pathlib.Path(__file__).parents[1] / "devices").glob("*.txtpb")
}
PROGRAMS = ("prefill", "start", "decode")
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is to be run, as the command line says it.

    Attributes:
      target, drafter, tree, dtype: as for `magicjax generate`; drafter "": plain decoding; tree
        "": the default.
      kv_dtype: of the draft's sparse cache; None: the model's own.
      offload: the target's blocks are in host memory, as for `magicjax.load`.
      draft_shards: devices that a small draft is divided over; None: all of `model`.
      batch: rows, of all devices together.
      context: tokens of a row, new ones included.
      max_new_tokens: how many of them are new.
      device: a name in `devices/`, or the path of a description.
      data, model, stage: of the mesh.
      micro_batches: of a mesh with stages; None: as many as are fastest.
      backend: of the attention; None: mosaic on Hopper, else xla.
    """

    target: str
    drafter: str
    tree: str
    batch: int
    context: int
    device: str
    data: int = 1
    model: int = 1
    stage: int = 1
    micro_batches: int | None = None
    max_new_tokens: int = 128
    dtype: str = "bfloat16"
    backend: str | None = None
    draft_shards: int | None = None
    kv_dtype: str | None = None
    offload: bool | str = False

    @property
    def mesh_size(self) -> MeshSize:
        return MeshSize(self.data, self.model, self.stage)

    @property
    def attention(self) -> str:
        """The backend that is used."""
        return self.backend or ("mosaic" if is_hopper(self.device) else "xla")


def description(device: str) -> str:
    """Returns what XLA must know of a device: one of `DEVICES`, or a file like theirs.

    XLA's own descriptions of GPUs, which have the same fields, are a place to start from.

    Raises:
      ValueError: no such device.
    """
    if device in DEVICES:
        return DEVICES[device].read_text()
    if device.endswith(".txtpb") and pathlib.Path(device).is_file():
        return pathlib.Path(device).read_text()
    raise ValueError(
        f"device={device} is unknown: use {', '.join(sorted(DEVICES))}, or the path of a "
        "description like theirs, NAME.txtpb"
    )


def is_hopper(device: str) -> bool:
    """Returns whether a device can run the mosaic backend."""
    return bool(re.search(r"cuda_compute_capability\s*\{\s*major:\s*9\b", description(device)))


def memory_of(device: str) -> int:
    """Returns the bytes of a device's memory.

    Raises:
      ValueError: its description does not say.
    """
    found = re.search(r"device_memory_size: (\d+)", description(device))
    if found is None:
        raise ValueError(f"device={device} says no device_memory_size: add it to its description")
    return int(found[1])


def abstract_model(
    source: str, dtype: str, shards: int | None = None, offload: bool | str = False
) -> Model:
    """Returns a model whose parameters are shapes: nothing is allocated."""
    module, blocks = models.build(skeleton(source).config, dtype), None
    params = nn.meta.unbox(models.abstract_params(module))
    if offload:
        params, _ = models.split_blocks(params)
        blocks = offloading.shapes(module, offloading.wants_int8(offload))
    return Model(module, params, name=source, shards=shards, blocks=blocks)


def request_of(load: Workload, mesh: AnyMesh) -> Request:
    """Returns the request of the whole batch, its arrays as shapes in their places on the mesh.

    Raises:
      ValueError: what `prepare` refuses, and sizes that do not divide over the mesh.
    """
    model = functools.partial(abstract_model, dtype=load.dtype)
    small = functools.partial(model, shards=load.draft_shards)
    drafter = make_drafter(load.drafter, small, kv_dtype=load.kv_dtype) if load.drafter else None
    if load.kv_dtype and getattr(drafter, "kv_dtype", None) is None:
        raise ValueError(
            f"kv_dtype={load.kv_dtype} is of a draft's sparse cache, and drafter={load.drafter!r} "
            "has none: leave it out, or draft with self:streaming:512"
        )
    if load.batch < 1:
        raise ValueError(f"batch={load.batch} must be at least 1")
    if load.draft_shards is not None and not placement.models_of(drafter):
        raise ValueError(
            f"draft_shards={load.draft_shards} is for small models, and drafter={load.drafter!r} "
            "has none: leave it out"
        )
    if load.tree and not drafter:
        raise ValueError(f"tree={load.tree} needs a drafter: give one, or leave tree out")
    if load.context <= load.max_new_tokens:
        raise ValueError(
            f"context={load.context} must hold more than max_new_tokens={load.max_new_tokens}"
        )

    def shape(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    rows = np.zeros((load.batch, load.context - load.max_new_tokens), np.int32)
    request = prepare(
        model(load.target, offload=load.offload),
        list(rows),
        drafter=drafter,
        tree=parse_tree(load.tree) if load.tree else None,
        max_new_tokens=load.max_new_tokens,
        eos_token_id=[],
        backend="xla",  # this machine's own; the device's is set below
        mesh=mesh,
        micro_batches=load.micro_batches,
        put=shape,
    )
    for one in (request.target, *placement.models_of(drafter)):
        if load.attention == "mosaic" and not is_hopper(load.device):
            raise ValueError(f"backend=mosaic is for Hopper, not {load.device}: use backend=xla")
        choose_backend(load.attention, one.dtype, one.config.head_dim)
    settings = dataclasses.replace(request.settings, backend=load.attention)
    return dataclasses.replace(request, settings=settings)


def mesh_of(load: Workload) -> Mesh:
    """Returns a mesh of GPUs that are not here.

    Raises:
      ValueError: the CUDA compiler is not installed.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{load.mesh_size.devices}",
            target_config=description(load.device),
        )
    except NotImplementedError as error:  # what JAX raises for a platform without a plugin
        raise ValueError("the CUDA compiler is not installed here: use `magicjax fit`") from error
    return make_mesh(*load.mesh_size, devices=topology.devices)


def compile_ahead(program: str, request: Request) -> jax.stages.Compiled:
    """Returns the program `prefill`, `start`, or `decode`, all rounds."""
    settings: Any = request.prefill_settings
    arguments: tuple = request.prefill_arguments
    if program != "prefill":
        prefilled = program_cache.result_shapes("prefill", settings, arguments)
        settings = request.settings
        arguments = request.start_arguments(*prefilled)
    if program == "decode":
        state = program_cache.result_shapes("start", settings, arguments)
        arguments = request.target, request.drafter, state
    options = offloading.xla_options("gpu", arguments)
    return program_cache.jitted(program, settings, arguments).lower(*arguments).compile(options)


def cache_sizes(request: Request) -> dict[str, set[int]]:
    """Returns how many elements a device's part of one layer's keys has, by cache."""
    caches = caches_of(state_shapes(request))
    names = ["target", *(f"draft {i}" for i in range(1, len(caches)))]
    return {
        name: {int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(cache.k)}
        for name, cache in zip(names, caches, strict=True)
    }


def caches_of(state: DecodeState) -> list[KVCache | DraftCache]:
    """Returns the target's cache, then those of drafts."""
    leaves = jax.tree.leaves(state.drafter, is_leaf=_is_cache)
    return [state.cache, *filter(_is_cache, leaves)]


def _is_cache(x: Any) -> bool:
    return isinstance(x, KVCache | DraftCache)


def report(
    program: str,
    request: Request,
    sizes: dict[str, set[int]],
    folder: pathlib.Path,
    group: int | None = None,
) -> dict[str, Any]:
    """Returns what a device needs for the program, and what is in it.

    Args:
      program: of `PROGRAMS`.
      request: its arrays as shapes on a mesh.
      sizes: its `cache_sizes`.
      folder: to which the compiler dumps kernels; those that are there already are of no interest.
      group: devices of a host, between which exchanges are told apart; None: of a stage.
    """
    before = set(folder.iterdir())
    begin = time.perf_counter()
    compiled = compile_ahead(program, request)
    seconds = time.perf_counter() - begin
    dumped = sorted(set(folder.iterdir()) - before)
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None  # every GPU compiler gives one
    copied, mesh = list(hlo.copied_sizes(text)), request.settings.mesh
    assert mesh is not None  # `request_of` has placed it
    if group is None and mesh.shape[STAGE] > 1:
        group = mesh.size // mesh.shape[STAGE]
    return {
        "seconds to compile": seconds,
        "argument bytes": memory.argument_size_in_bytes,
        "new result bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
        "argument bytes in host memory": memory.host_argument_size_in_bytes,
        "temporary bytes in host memory": memory.host_temp_size_in_bytes,
        "copies of a cache": {
            name: sum(copied.count(size) for size in of_cache) for name, of_cache in sizes.items()
        },
        "largest exchange": hlo.largest_collective(text),
        "collectives": [dataclasses.asdict(c) for c in hlo.collectives(text, group)],
        "kernels": kernels(dumped),
        "shared bytes of kernels": shared_bytes(dumped),
    }


def kernels(dumped: Sequence[pathlib.Path]) -> list[dict[str, int]]:
    """Returns registers and spilled bytes of each kernel that was dumped."""
    texts = [path.read_text(errors="replace") for path in dumped if path.suffix == ".ptxas"]
    return [
        {
            "registers": max((int(n) for n in REGISTERS.findall(text)), default=0),
            "spilled bytes": sum(int(a) + int(b) for a, b in SPILLS.findall(text)),
        }
        for text in texts
    ]


def shared_bytes(dumped: Sequence[pathlib.Path]) -> list[int]:
    """Returns the sizes of shared memory that kernels which were dumped have, each once.

    Kernels are lowered more often than they are compiled, so their files are counted otherwise, and
    no size can be told to be that of a report.
    """
    texts = [path.read_text() for path in dumped if path.name.endswith(".resources.txt")]
    return sorted({int(match[1]) for match in map(SHARED.search, texts) if match})


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the reports of a workload's programs, given as JSON, to a file."""
    parser = argparse.ArgumentParser(prog="python -m magicjax.aot.aot_compile", description=__doc__)
    parser.add_argument("workload", help="a Workload's fields, as JSON")
    parser.add_argument("out", help="the JSON file to write")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--group", type=int, help="devices of a host; of a stage if not given")
    options = parser.parse_args(arguments)
    load = Workload(**json.loads(options.workload))
    request = request_of(load, mesh_of(load))
    with tempfile.TemporaryDirectory() as folder:
        # Read by the compiler when the first kernel is lowered.
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
        sizes = cache_sizes(request)
        found = {
            name: report(name, request, sizes, pathlib.Path(folder), options.group)
            for name in options.programs
        }
    pathlib.Path(options.out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
