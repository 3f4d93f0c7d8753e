"""Compiles each program once for each (settings, shapes), counts it, and says how long it took."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax

from magicjax import placement
from magicjax.decoding import loop
from magicjax.drafters import prompt_lookup
from magicjax.parallel import offloading

logger = logging.getLogger("magicjax")

Settings = loop.Settings | loop.PrefillSettings | prompt_lookup.Search
_PROGRAMS: dict[str, tuple[Callable, dict]] = {
    "prefill": (loop.prefill, {}),
    "start": (loop.start, {"donate_argnums": 2}),
    "decode": (loop.decode, {"donate_argnums": 2}),
    "step": (loop.step, {"donate_argnums": 2}),
    "look-up": (prompt_lookup.accepted, {}),
}
# XLA prefers vectors of 256 bits; where a CPU has 512, they read a cache up to a quarter faster.
_OPTIONS = {"cpu": {"xla_cpu_prefer_vector_width": 512}}
# On a CPU a program holds some 185 maps of memory, and Linux allows a process 65,530 of them: XLA
# crashes where one more is refused. So a long grid keeps the newest only.
KEPT = 200
_compiled: dict[Any, jax.stages.Compiled] = {}  # the least recently used first
_count = 0


def program(name: str, settings: Settings, *arguments: Any) -> tuple[jax.stages.Compiled, float]:
    """Returns (the compiled program, seconds spent compiling it: 0 if it was there already).

    Args:
      name: prefill, start, decode or step (`magicjax.decoding.loop`), or look-up; start takes over
      the
        memory of the cache, decode and step that of their state: it must not be used again.
      settings: static.
      arguments: as they will be passed, arrays or their shapes.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    shapes = tuple((x.shape, str(x.dtype), getattr(x, "sharding", None)) for x in leaves)
    key = (name, settings, treedef, shapes)
    if key in _compiled:
        _compiled[key] = _compiled.pop(key)
        return _compiled[key], 0.0
    begin = time.perf_counter()
    lowered = jitted(name, settings, arguments).lower(*arguments)
    compiled = _compiled[key] = lowered.compile(options_of(jax.default_backend(), arguments))
    seconds = time.perf_counter() - begin
    global _count
    _count += 1
    logger.info("compiled %s (program %d) in %.1f s", name, _count, seconds)
    if len(_compiled) > KEPT:
        del _compiled[next(iter(_compiled))]
    return compiled, seconds


def options_of(platform: str, arguments: tuple) -> dict[str, Any]:
    """Returns XLA's options for a program with these arguments, of which those that stream weights
    need some of their own.
    """
    options = offloading.xla_options(platform, arguments)
    if options:
        logger.info("offload: compiled with %s", options)
    return _OPTIONS.get(platform, {}) | options


def jitted(name: str, settings: Settings, arguments: tuple) -> Any:
    """Returns the program of that name before it is lowered; see `program`."""
    function, options = _PROGRAMS[name]
    # A function of its own, so that nothing in JAX holds the program when it is dropped.
    run: Callable = functools.partial(function, settings)
    if settings.mesh is not None:
        run = placement.on_mesh(
            run, settings.mesh, arguments, result_shapes(name, settings, arguments)
        )
    return jax.jit(run, **options)


def result_shapes(name: str, settings: Settings, arguments: tuple) -> Any:
    """Returns what a program gives back, as shapes (for a mesh with shardings); nothing runs."""
    if name in ("decode", "step"):
        return arguments[2]  # a round gives back a state like the one it took
    run = functools.partial(_PROGRAMS[name][0], settings)
    if settings.mesh is None:
        return jax.eval_shape(run, *arguments)
    return placement.result_shapes(run, settings.mesh, arguments)


def count() -> int:
    """Returns how many programs this process has compiled."""
    return _count
