"""Compiles the loop for GPUs that are not here, and reads what became of it.

`make ahead ARGS="--target llama-3.1-8b --batch 16 --context 32768"` prints the memory, the copies
of caches (there must be none), and for every kernel its registers, spills and shared memory. It
needs no GPU and no NVIDIA library, only the wheels of the extra `aot`.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from magicjax import cache, decode, draft_cache
from magicjax.cli import make_drafter
from magicjax.drafters import SmallModel
from magicjax.generation import skeleton
from magicjax.model import Model
from magicjax.request import Request, prepare
from magicjax.tree import parse_tree
from pallas_kernels import choose_backend

DEVICES = {path.stem: path for path in (pathlib.Path(__file__).parent / "devices").glob("*.txtpb")}
REPORT = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


def abstract_model(source: str, dtype: str) -> Model:
    """Returns a model whose parameters are shapes: nothing is allocated."""
    module = models.build(skeleton(source).config, dtype)
    return Model(module, nn.meta.unbox(models.abstract_params(module)), name=source)


def request_of(options: argparse.Namespace) -> Request:
    """Returns the request of the whole batch, every prompt of the full context."""
    load = functools.partial(abstract_model, dtype=options.dtype)
    drafter = make_drafter(options.drafter, load) if options.drafter else None
    rows = np.zeros((options.batch, options.context - options.max_new_tokens), np.int32)
    request = prepare(
        load(options.target),
        list(rows),
        drafter=drafter,
        tree=parse_tree(options.tree) if drafter else None,
        max_new_tokens=options.max_new_tokens,
        eos_token_id=[],
        backend="xla",  # this machine's own; the device's is set below
    )
    drafts = [drafter.model] if isinstance(drafter, SmallModel) else []
    for model in (request.target, *drafts):
        choose_backend(options.backend, model.dtype, model.config.head_dim)
    settings = dataclasses.replace(request.settings, backend=options.backend)
    return dataclasses.replace(request, settings=settings)


def state_of(request: Request) -> decode.DecodeState:
    """Returns the shapes of the state behind the prompts."""
    prefill = functools.partial(decode.prefill, request.prefill_settings)
    start = functools.partial(decode.start, request.settings)
    prefilled = jax.eval_shape(prefill, *request.prefill_arguments)
    return jax.eval_shape(start, *request.start_arguments(*prefilled))


def mesh_of(device: str, gpus: int) -> Mesh:
    """Returns a mesh of GPUs that are not here; rows are divided among them.

    Raises:
      ValueError: the CUDA compiler is not installed.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{gpus}", target_config=DEVICES[device].read_text()
        )
    except NotImplementedError as error:
        raise ValueError(
            "the CUDA compiler is not installed here: run `make ahead`, which makes an environment "
            "that has it"
        ) from error
    return Mesh(np.array(topology.devices), ("data",))


def compile_ahead(program: str, request: Request, mesh: Mesh) -> jax.stages.Compiled:
    """Returns the program `prefill`, or `decode`, all rounds; devices have rows of their own."""
    function: Callable
    arguments: tuple
    if program == "prefill":
        function = functools.partial(decode.prefill, request.prefill_settings)
        arguments = request.prefill_arguments
    else:
        function = functools.partial(decode.decode, request.settings)
        arguments = request.target, request.drafter, state_of(request)
    donated = () if program == "prefill" else (2,)
    batch = request.tokens.shape[0]
    specs = tuple(_specs(argument, batch) for argument in arguments)
    made = jax.eval_shape(function, *arguments)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=_specs(made, batch), check_vma=False
    )
    placed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        arguments,
        specs,
    )
    return jax.jit(mapped, donate_argnums=donated).lower(*placed).compile()


def _specs(argument: Any, batch: int) -> Any:
    """Returns how an argument is divided: what has an axis of rows by rows, weights not at all."""
    if argument is None or isinstance(argument, Model) or hasattr(argument, "propose"):
        return jax.tree.map(lambda x: PartitionSpec(), argument)
    specs = jax.tree.map(
        lambda x: PartitionSpec("data") if x.shape[:1] == (batch,) else PartitionSpec(), argument
    )
    if isinstance(argument, decode.DecodeState):  # whose sizes may happen to be that of the batch
        specs = specs.replace(eos=PartitionSpec(), ranks=PartitionSpec())
    return specs


def copied_caches(program: jax.stages.Compiled, request: Request, gpus: int) -> dict[str, int]:
    """Returns how many operations copy an array as large as one layer's keys, by cache."""
    state = state_of(request)
    drafts = filter(_is_cache, jax.tree.leaves(state.drafter, is_leaf=_is_cache))
    caches = {"target": state.cache} | {f"draft {i}": c for i, c in enumerate(drafts, 1)}
    sizes = {name: jax.tree.leaves(c.k)[0].size // gpus for name, c in caches.items()}
    copied = list(_copied_sizes(program.as_text() or ""))
    return {name: copied.count(size) for name, size in sizes.items()}


def _is_cache(x: Any) -> bool:
    return isinstance(x, cache.KVCache | draft_cache.DraftCache)


def _copied_sizes(text: str) -> Iterator[int]:
    """Yields the sizes of arrays that are copied; zeros that fill a new one are no copy."""
    for match in re.finditer(r"= \(?\w+\[([\d,]+)\][^=\n]* copy(?:-start)?\((?!%broadcast)", text):
        yield int(np.prod([int(n) for n in match[1].split(",")]))


def kernels(folder: pathlib.Path) -> list[dict[str, int]]:
    """Returns registers, spilled bytes and shared memory of each kernel that was dumped."""
    found = []
    for report in sorted(folder.glob("*.ptxas")):
        text = report.read_text(errors="replace")
        resources = report.with_suffix(".resources.txt")
        shared = SHARED.search(resources.read_text()) if resources.exists() else None
        found.append(
            {
                "registers": max((int(n) for n in REPORT.findall(text)), default=0),
                "spilled bytes": sum(int(a) + int(b) for a, b in SPILLS.findall(text)),
                "shared bytes": int(shared[1]) if shared else 0,
            }
        )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m magicjax.ahead",
        description="Compiles the loop for GPUs that are not here, and reads what became of it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="llama-3.1-8b", help="preset or model directory")
    parser.add_argument("--drafter", default="self:streaming:512", help="empty: plain decoding")
    parser.add_argument("--tree", default="chain:4")
    parser.add_argument("--batch", type=int, default=16, help="rows on each GPU together")
    parser.add_argument("--context", type=int, default=32768, help="prompt and new tokens")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--backend", choices=("mosaic", "xla"), default="mosaic")
    parser.add_argument("--program", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200")
    parser.add_argument("--gpus", type=int, default=1, help="rows are divided among them")
    return parser


def main() -> int:
    """Returns 0, or 1 if a kernel spills or a cache is copied."""
    parser = _parser()
    options = parser.parse_args()
    if options.batch % options.gpus:
        parser.error(f"--batch {options.batch} must be a multiple of --gpus {options.gpus}")
    if options.context <= options.max_new_tokens:
        parser.error(
            f"--context {options.context} must hold more than --max-new-tokens "
            f"{options.max_new_tokens}"
        )
    hopper = "cuda_compute_capability { major: 9 " in DEVICES[options.device].read_text()
    if options.backend == "mosaic" and not hopper:
        parser.error(f"--backend mosaic is for Hopper, not {options.device}: use --backend xla")
    with tempfile.TemporaryDirectory() as folder:
        # Read by the compiler when the first kernel is lowered.
        dump = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        os.environ.update(dump | {"MOSAIC_GPU_DUMP_PTX": "1"})
        try:
            request = request_of(options)
            mesh = mesh_of(options.device, options.gpus)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        begin = time.perf_counter()
        program = compile_ahead(options.program, request, mesh)
        seconds = time.perf_counter() - begin
        found = kernels(pathlib.Path(folder))
    memory, (of_target, of_draft) = program.memory_analysis(), request.kv_bytes
    assert memory is not None  # every GPU compiler gives one
    gb = 1e9 * options.gpus
    what = f"{options.program} for {options.gpus} x {options.device}"
    print(f"{what}: compiled in {seconds:.1f} s; on each device")
    print(f"  arguments      {memory.argument_size_in_bytes / 1e9:8.3f} GB")
    print(f"  results        {memory.output_size_in_bytes / 1e9:8.3f} GB")
    print(f"  temporaries    {memory.temp_size_in_bytes / 1e9:8.3f} GB")
    print(f"  cache, target  {of_target / gb:8.3f} GB")
    print(f"  cache, draft   {of_draft / gb:8.3f} GB")
    copies = copied_caches(program, request, options.gpus)
    print("  copies of a cache: " + ", ".join(f"{name} {n}" for name, n in copies.items()))
    for kernel in found:
        print("  kernel: " + ", ".join(f"{name} {value}" for name, value in kernel.items()))
    return int(any(copies.values()) or any(kernel["spilled bytes"] for kernel in found))


if __name__ == "__main__":
    raise SystemExit(main())
