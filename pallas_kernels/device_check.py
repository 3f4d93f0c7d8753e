"""Decides whether an accelerator's kernel is right on a device, so that it can be the default.

Kernels are checked on the device on first use, with a few small calls (`attention_check`), and the
verdict is stored by device and versions in `$MAGICJAX_CACHE/kernels`. A kernel that failed, or the
check of which did not finish because the process was killed, is replaced by XLA, with a warning. An
error of the check, such as too little memory, replaces it in this process only.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import threading
from collections.abc import Callable

import jax
import jaxlib

from pallas_kernels import attention_check
from pallas_kernels.cpu import build

logger = logging.getLogger("magicjax")
_lock = threading.Lock()
_verdicts: dict[tuple[str, str, int, str], bool] = {}  # of this process

PASSED, RUNNING = "ok", "running in process "  # the contents of a file with a verdict


def default_device() -> jax.Device:
    """Returns JAX's default device: that of `jax.default_device`, or the first one."""
    configured = jax.config.jax_default_device
    if isinstance(configured, str):
        return jax.local_devices(backend=configured)[0]
    return configured or jax.local_devices()[0]


def is_right(backend: str, attend: Callable, dtype: str, head_dim: int, device: jax.Device) -> bool:
    """Returns whether a kernel agrees with the reference; one thread checks, and the others wait.

    Args:
      backend: its name.
      attend: the kernel.
      dtype, head_dim: dtype and head size of the queries.
      device: that runs the check. Devices of one kind share a verdict.
    """
    with _lock:
        key = backend, dtype, head_dim, device.device_kind
        if key not in _verdicts:
            _verdicts[key] = _is_right(backend, attend, dtype, head_dim, device)
        return _verdicts[key]


def _is_right(
    backend: str, attend: Callable, dtype: str, head_dim: int, device: jax.Device
) -> bool:
    path = _path_of_verdict(backend, dtype, head_dim, device)
    verdict = _read(path)
    if verdict.startswith(RUNNING):
        finished = not _is_alive(int(verdict.removeprefix(RUNNING)))
        verdict = "its self-check did not finish" if finished else ""
    if not verdict:
        _write(path, f"{RUNNING}{os.getpid()}")
        try:
            with jax.default_device(device):
                verdict = attention_check.mismatch(attend, dtype, head_dim) or PASSED
            _write(path, verdict)
        except Exception as error:  # of a compiler or driver: any class
            verdict = f"its self-check failed: {type(error).__name__}: {str(error)[:500]}"
            _forget(path)
        except BaseException:  # interrupted
            _forget(path)
            raise
    if verdict != PASSED:
        again = "" if path is None else f"; delete {path} to try again"
        logger.warning("attention runs in XLA, not in the kernel %r: %s%s", backend, verdict, again)
    return verdict == PASSED


def _path_of_verdict(
    backend: str, dtype: str, head_dim: int, device: jax.Device
) -> pathlib.Path | None:
    """Returns the path of a verdict, which depends on all that may change it; None: no folder."""
    versions = jax.__version__, jaxlib.__version__, device.client.platform_version
    folder = pathlib.Path(__file__).parent
    sources = sorted([*folder.glob("*.py"), *folder.glob("tpu/*.py"), *folder.glob("mosaic_gpu/*")])
    contents = [path.read_bytes() for path in sources if path.is_file()]
    # The machine is in the key, because machines that share a folder do not share processes.
    key = backend, dtype, head_dim, device.device_kind, platform.node(), versions, contents
    name = f"{backend}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.checked"
    try:
        return build.cache_folder() / "kernels" / name
    except build.UnavailableError:  # no home folder
        return None


def _read(path: pathlib.Path | None) -> str:
    """Returns a stored verdict; "" if there is none that can be read."""
    if path is not None:
        with contextlib.suppress(OSError):
            return path.read_text()
    return ""


def _write(path: pathlib.Path | None, verdict: str) -> None:
    if path is not None:
        with contextlib.suppress(OSError):  # without it every process checks
            path.parent.mkdir(parents=True, exist_ok=True)
        build.write(path, verdict)


def _forget(path: pathlib.Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_alive(process: int) -> bool:
    """Returns whether another process of this machine is running."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
