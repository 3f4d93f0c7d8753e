"""Compiles the loop ahead of time for absent GPUs or TPUs and reports on the compiled programs.

`magicjax fit` runs it in a process that has XLA's CUDA compiler or libtpu. No driver is needed.
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

from magicjax import placement
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.preparation import place, validated_request
from magicjax.decoding.request import Request, RequestOptions
from magicjax.drafters.spec import make_drafter
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.loading import abstract_model
from magicjax.model import Model
from magicjax.parallel import offloading
from magicjax.parallel.layouts import Offloaded
from magicjax.prediction import hlo
from magicjax.prediction.aot import targets
from magicjax.sampling_params import SamplingParams
from pallas_kernels import choose_backend
from sharding import STAGE, AnyMesh, MeshSize

PROGRAMS = ("prefill", "init", "decode")
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


@dataclasses.dataclass(frozen=True)
class AotWorkload:
    """A workload, in the terms of the command line.

    Attributes:
      target, drafter, tree, dtype: options of `magicjax generate`; drafter "": plain decoding; tree
        "": the default.
      offload: whether the target's blocks are in host memory.
      weights: the format of the target's matrices, see `magicjax.load`; None: as stored.
      draft_shards: devices over which a draft model is sharded; None: all of `model`.
      batch: rows on all devices.
      context: tokens per row, including new ones.
      max_tokens: new tokens per row.
      device: a name in `targets.GPUS` or `targets.TPUS`, the path of a GPU's description, or a CPU
        with its memory, `cpu:16`.
      data, model, stage: sizes of the mesh.
      micro_batches: number of micro-batches on a mesh with stages; None: the fastest number.
      backend: attention backend; None: the default on the device.
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
    max_tokens: int = 128
    dtype: str = "bfloat16"
    backend: str | None = None
    draft_shards: int | None = None
    offload: bool = False
    weights: str | None = None
    kv_dtype: str | None = None

    @property
    def mesh_size(self) -> MeshSize:
        return MeshSize(self.data, self.model, self.stage)


def _with_param_shapes(
    source: str,
    dtype: str,
    shards: int | None = None,
    offload: bool = False,
    packed: bool = False,
    **options: Any,
) -> Model:
    """Returns an abstract model with the shapes of its parameters."""
    model = abstract_model(source, dtype, packed=packed, shards=shards, offload=offload, **options)
    params = nn.meta.unbox(model.layout.abstract_params(model.module))
    return dataclasses.replace(model, params=params)


def abstract_request(workload: AotWorkload, mesh: AnyMesh) -> Request:
    """Returns the request of the whole batch, with sharded shapes as arrays.

    Raises:
      ValueError: the workload is invalid, or its sizes do not divide over the mesh.
    """
    _check(workload)
    packed = targets.is_cpu(workload.device)
    model = functools.partial(_with_param_shapes, dtype=workload.dtype, packed=packed)
    small = functools.partial(model, shards=workload.draft_shards)
    drafter = make_drafter(workload.drafter, small) if workload.drafter else None
    if workload.draft_shards is not None and not placement.models_of(drafter):
        raise ValueError(
            f"draft_shards={workload.draft_shards} applies to draft models, and "
            f"drafter={workload.drafter!r} has none: omit draft_shards"
        )

    def shape(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    rows = np.zeros((workload.batch, workload.context - workload.max_tokens), np.int32)
    options = RequestOptions(
        drafter=drafter,
        tree=workload.tree or None,
        eos_token_id=[],
        backend="xla",  # for this machine; set for the device below
        mesh=mesh,
    )
    stored: Any = dict(stages=workload.stage, offload=workload.offload, weights=workload.weights)
    stored |= dict(kv_dtype=workload.kv_dtype)
    target = model(workload.target, **stored)
    params = SamplingParams(max_tokens=workload.max_tokens)
    request = validated_request(target, list(rows), params, options)
    request = place(request, workload.micro_batches, put=shape)
    settings = dataclasses.replace(request.settings, backend=_backend(workload, request))
    return dataclasses.replace(request, settings=settings)


def _backend(workload: AotWorkload, request: Request) -> str:
    """Returns the attention backend of all models.

    Raises:
      ValueError: the device or a model does not support the one that the workload names.
    """
    sizes = [
        (model.dtype, size)
        for model in (request.target, *placement.models_of(request.drafter))
        for size in model.kv_head_dims
    ]
    if workload.backend is None:
        best = {targets.best_backend(workload.device, *size) for size in sizes}
        return best.pop() if len(best) == 1 else "xla"
    for size in sizes:
        choose_backend(workload.backend, *size)
    if reason := targets.unsupported_reason(workload.backend, workload.device):
        raise ValueError(f"{reason}: use backend=xla")
    return workload.backend


def _check(workload: AotWorkload) -> None:
    if workload.batch < 1:
        raise ValueError(f"batch={workload.batch} must be at least 1")
    if workload.tree and not workload.drafter:
        raise ValueError(f"tree={workload.tree} needs a drafter: add one, or omit tree")
    if workload.context <= workload.max_tokens:
        raise ValueError(
            f"context={workload.context} must be larger than max_tokens={workload.max_tokens}"
        )
    targets.memory_bytes(workload.device)  # raises for an unknown device
    if targets.is_cpu(workload.device) and (workload.offload or workload.mesh_size.devices > 1):
        raise ValueError(
            f"device={workload.device} is one device, whose memory is the host's: omit offload "
            "and mesh"
        )
    if workload.offload and targets.is_tpu(workload.device):
        raise ValueError(
            "offload=True cannot be compiled for a TPU that is not attached: use quantized "
            "weights, or a larger mesh"
        )


def compile_ahead(program: str, request: Request) -> jax.stages.Compiled:
    """Compiles one of `PROGRAMS` for the devices of a request's mesh."""
    settings: Any = request.prefill_settings
    arguments: tuple = request.target, request.rows
    if program != "prefill":
        prefilled = program_cache.result_shapes("prefill", settings, arguments)
        settings = request.settings
        arguments = request.target, request.drafter, *prefilled, request.rows
    if program == "decode":
        state = program_cache.result_shapes("init", settings, arguments)
        arguments = request.target, request.drafter, state, state.rounds
    options = offloading.xla_options("gpu", arguments)
    assert request.settings.mesh is not None  # `abstract_request` sets it
    device = request.settings.mesh.devices.flat[0]
    with jax.default_device(device):  # for whose architecture Mosaic GPU lowers kernels
        lowered = program_cache.jitted(program, settings, arguments).lower(*arguments)
    return lowered.compile(options)


def cache_sizes(request: Request) -> dict[str, set[int]]:
    """Returns the number of elements of a layer's keys on one device, by cache."""
    caches = all_caches(Decoder(request).state_shapes())
    names = ["target", *(f"draft {i}" for i in range(1, len(caches)))]
    return {
        name: {int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(cache.k)}
        for name, cache in zip(names, caches, strict=True)
    }


def matrix_sizes(request: Request) -> set[int]:
    """Returns the numbers of elements of quantized matrices, of target and drafts, on a device."""

    def sizes(tree: Any, first_axis: int = 0) -> set[int]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            int(np.prod(x.sharding.shard_shape(x.shape)[first_axis:]))
            for path, x in leaves
            if path[-1].key == "weight" and x.dtype.itemsize == 1
        }

    counts = set[int]()
    for model in (request.target, *placement.models_of(request.drafter)):
        layout = model.layout  # offloaded matrices are stacked by layer
        counts |= sizes(layout.blocks, 1) if isinstance(layout, Offloaded) else sizes(model.params)
    return counts


def all_caches(state: DecodeState) -> list[KVCache | DraftCache]:
    """Returns the target's cache, then those of drafters."""

    def is_cache(x: Any) -> bool:
        return isinstance(x, KVCache | DraftCache)

    leaves = jax.tree.leaves(state.drafter, is_leaf=is_cache)
    return [state.cache, *filter(is_cache, leaves)]


def report(
    program: str, request: Request, sizes: dict[str, set[int]], folder: pathlib.Path
) -> dict[str, Any]:
    """Compiles a program and returns its memory, collectives, cache copies and kernels.

    Collectives within a stage and between stages are counted separately.

    Args:
      program: one of `PROGRAMS`.
      request: with sharded shapes as arrays.
      sizes: its `cache_sizes`.
      folder: to which the compiler dumps kernels; existing files are ignored.
    """
    before = set(folder.iterdir())
    begin = time.perf_counter()
    compiled = compile_ahead(program, request)
    seconds = time.perf_counter() - begin
    dumped = sorted(set(folder.iterdir()) - before)
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None  # every GPU compiler returns it
    copied, mesh = list(hlo.copied_sizes(text)), request.settings.mesh
    assert mesh is not None  # `abstract_request` sets it
    group = mesh.size // mesh.shape[STAGE] if mesh.shape[STAGE] > 1 else None
    counted: dict[str, Any] = {}
    if program == "decode" and (matrices := matrix_sizes(request)):
        counted["dequantized matrices"] = hlo.dequantized(text, matrices)
    return counted | {
        "seconds to compile": seconds,
        "argument bytes": memory.argument_size_in_bytes,
        "new result bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
        "argument bytes in host memory": memory.host_argument_size_in_bytes,
        "temporary bytes in host memory": memory.host_temp_size_in_bytes,
        "copies of a cache": {
            name: sum(copied.count(size) for size in elements) for name, elements in sizes.items()
        },
        "collectives": [dataclasses.asdict(c) for c in hlo.collectives(text, group)],
        "kernels": kernels(dumped),
        "shared bytes of kernels": shared_bytes(dumped),
    }


def kernels(dumped: Sequence[pathlib.Path]) -> list[dict[str, int]]:
    """Returns the registers and spilled bytes of each dumped kernel."""
    texts = [path.read_text(errors="replace") for path in dumped if path.suffix == ".ptxas"]
    return [
        {
            "registers": max((int(n) for n in REGISTERS.findall(text)), default=0),
            "spilled bytes": sum(int(a) + int(b) for a, b in SPILLS.findall(text)),
        }
        for text in texts
    ]


def shared_bytes(dumped: Sequence[pathlib.Path]) -> list[int]:
    """Returns the distinct sizes of shared memory of the dumped kernels.

    Kernels are lowered more often than compiled, so these files do not correspond to `kernels`.
    """
    texts = [path.read_text() for path in dumped if path.name.endswith(".resources.txt")]
    return sorted({int(match[1]) for match in map(SHARED.search, texts) if match})


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the reports of a workload's programs to a JSON file."""
    parser = argparse.ArgumentParser(
        prog="python -m magicjax.prediction.aot.aot_compile", description=__doc__
    )
    parser.add_argument("workload", help="the fields of an AotWorkload, as JSON")
    parser.add_argument("out", help="the JSON file to write")
    options = parser.parse_args(arguments)
    workload = AotWorkload(**json.loads(options.workload))
    mesh = targets.topology_mesh(workload.device, workload.mesh_size)
    request = abstract_request(workload, mesh)
    with tempfile.TemporaryDirectory() as folder:
        # The compiler reads these when it lowers the first kernel.
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
        sizes = cache_sizes(request)
        reports = {name: report(name, request, sizes, pathlib.Path(folder)) for name in PROGRAMS}
    pathlib.Path(options.out).write_text(json.dumps(reports), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
