"""Compiles each program once per settings and argument shapes; counts and times compilations."""

import functools
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from magicjax import compilation_cache, placement
from magicjax.decoding import grammar_rounds, loop, slots
from magicjax.parallel import offloading
from magicjax.settings import PrefillSettings, Settings

logger = logging.getLogger("magicjax")

AnySettings = Settings | PrefillSettings
_PROGRAMS: dict[str, tuple[Callable, dict]] = {
    "prefill": (loop.prefill, {"donate_argnums": (2, 3)}),
    "prompt_logprobs": (loop.prompt_logprobs, {}),
    "init": (loop.init_state, {"donate_argnums": (2, 5)}),
    "decode": (loop.decode, {"donate_argnums": 2}),
    "decode_until_row_ends": (slots.decode_until_row_ends, {"donate_argnums": 2}),
    "insert": (slots.insert, {"donate_argnums": 2}),
    "extract": (slots.extract, {}),
    "propose": (grammar_rounds.propose, {}),
    "score": (grammar_rounds.score, {}),
    "verify": (grammar_rounds.verify, {"donate_argnums": 2}),
}
# XLA prefers 256-bit vectors; with 512 bits, a CPU that has them reads a cache up to 25% faster.
_OPTIONS = {"cpu": {"xla_cpu_prefer_vector_width": 512}}
# On a CPU a program holds 185 to 300 memory maps, one for eight devices about 950. Linux allows a
# process 65,530, and XLA crashes beyond that, so the cache evicts the least recently used programs.
MAX_MEMORY_MAPS = 40_000
MAX_PROGRAMS = 200  # also where memory maps are unknown
_compiled: dict[Any, jax.stages.Compiled] = {}  # least recently used first
_count, _seconds = 0, 0.0


def program(name: str, settings: AnySettings, *arguments: Any) -> jax.stages.Compiled:
    """Returns the compiled program.

    Args:
      name: a function of `magicjax.decoding.loop`, `slots` or `grammar_rounds`: see `_PROGRAMS`.
        prefill and init donate their cache, prefill also inputs of layers, init the drafter's
        previous state, and decode, insert and verify the state of all rows: none may be used
        afterwards.
      settings: static.
      arguments: arrays or their shapes.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    shapes = tuple(
        (x.shape, x.dtype, _canonical_sharding(getattr(x, "sharding", None))) for x in leaves
    )
    key = (name, settings, treedef, shapes)
    if compiled := _compiled.pop(key, None):
        _compiled[key] = compiled  # the most recently used one is last
        return compiled
    compilation_cache.enable()
    start = time.perf_counter()
    traced = jitted(name, settings, arguments).trace(*arguments)
    trace_end = time.perf_counter()
    lowered = traced.lower()
    lower_end = time.perf_counter()
    compiled = _compiled[key] = lowered.compile(options_of(jax.default_backend(), arguments))
    end = time.perf_counter()
    global _count, _seconds
    _count, _seconds = _count + 1, _seconds + end - start
    logger.info(
        "compiled %s (program %d): traced in %.2f s, lowered in %.2f s, compiled or read in %.2f s",
        name,
        _count,
        trace_end - start,
        lower_end - trace_end,
        end - lower_end,
    )
    while len(_compiled) > 1 and (len(_compiled) > MAX_PROGRAMS or memory_maps() > MAX_MEMORY_MAPS):
        del _compiled[next(iter(_compiled))]
    return compiled


def _canonical_sharding(sharding: Any) -> Any:
    """Returns a sharding without what divides nothing: axes of one device, and trailing None.

    Programs return arrays with either form, and compiled programs take both.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes, spec = sharding.mesh.shape, []
    for entry in sharding.spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        spec.append(tuple(name for name in names if name is not None and sizes[name] > 1))
    while spec and not spec[-1]:
        spec.pop()
    return sharding.mesh, tuple(spec), sharding.memory_kind


def memory_maps() -> int:
    """Returns the number of memory maps of this process; 0 on systems without /proc."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def options_of(platform: str, arguments: tuple) -> dict[str, Any]:
    """Returns XLA's options for a program with these arguments."""
    options = offloading.xla_options(platform, arguments)
    if options:
        logger.info("offload: compiling with %s", options)
    return _OPTIONS.get(platform, {}) | options


def jitted(name: str, settings: AnySettings, arguments: tuple) -> Any:
    """Returns the jitted program of that name; see `program`."""
    function, options = _PROGRAMS[name]
    # A new function, so that no cache of JAX keeps the program alive after eviction.
    run: Callable = functools.partial(function, settings)
    if settings.mesh is None:
        return jax.jit(run, **options)
    results = result_shapes(name, settings, arguments)
    run = placement.on_mesh(run, settings.mesh, arguments, results)
    # Explicit, because XLA replicates arrays without elements.
    return jax.jit(run, out_shardings=jax.tree.map(lambda x: x.sharding, results), **options)


def result_shapes(name: str, settings: AnySettings, arguments: tuple) -> Any:
    """Returns the shapes of a program's results, with shardings for a mesh; runs nothing."""
    if name in ("decode", "decode_until_row_ends", "insert", "verify"):
        return arguments[2]  # the state, whose shapes a round preserves
    run = functools.partial(_PROGRAMS[name][0], settings)
    if settings.mesh is None:
        return jax.eval_shape(run, *arguments)
    return placement.result_shapes(run, settings.mesh, arguments, settings.replicated_rows)


def totals() -> tuple[int, float]:
    """Returns the number of programs that this process has compiled, and the seconds it took."""
    return _count, _seconds


def clear() -> None:
    """Drops all compiled programs."""
    _compiled.clear()
