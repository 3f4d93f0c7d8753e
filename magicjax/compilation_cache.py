"""Compiled programs on disk, so that the next process does not compile them again.

They are in JAX's persistent compilation cache, by default in `$MAGICJAX_CACHE/programs`.
"""

import functools
import logging
import os
import tempfile

import jax

from magicjax.files import cache_folder
from pallas_kernels.cpu import build

logger = logging.getLogger("magicjax")

SWITCH = "MAGICJAX_PROGRAM_CACHE"
# JAX's settings, their defaults, which are replaced, and values. JAX removes the least recently
# used programs beyond the size, and stores none that compiles faster than the time.
SETTINGS = (
    ("jax_compilation_cache_max_size", -1, 2_000_000_000),
    ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.1),
)


@functools.cache
def enable() -> None:
    """Selects the folder of JAX's persistent compilation cache, unless the user has selected one.

    Each processor and each version of the CPU kernels has its own folder, in addition to what JAX's
    keys include: the program, its options, and the versions and the topology of the device.

    Raises:
      ValueError: MAGICJAX_PROGRAM_CACHE is neither "on" nor "off".
    """
    switch = os.environ.get(SWITCH) or "on"
    if switch not in ("on", "off"):
        raise ValueError(f"{SWITCH}={switch!r} is unknown: use 'on' or 'off'")
    if switch == "off" or jax.config.jax_compilation_cache_dir:
        return
    try:
        folder = cache_folder() / "programs" / build.digest(build.processor())
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: without a home directory
        logger.warning(
            "every process compiles its programs: %s; set MAGICJAX_CACHE to a writable folder, or "
            "%s=off to hide this message",
            error,
            SWITCH,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, default, value in SETTINGS:
        if getattr(jax.config, name) == default:
            jax.config.update(name, value)
