"""Compiles the C++ kernels on first use, checks them, and registers them with XLA.

The library is in `$MAGICJAX_CACHE/kernels`, by default ~/.cache/magicjax/kernels. Its name is a
digest of everything that it depends on, so a change compiles another one, and machines with
different processors can share the folder. Beside it is the verdict of `self_check`.

`python -m pallas_kernels.cpu` does the same ahead of time.
"""

import atexit
import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading

import jax
import jaxlib

logger = logging.getLogger("magicjax")

SWITCH = "MAGICJAX_CPU_KERNELS"
FOLDER = pathlib.Path(__file__).parent  # of the sources and headers
ATTENTION_CHECK = FOLDER.with_name("attention_check.py")
TARGETS = {
    "magicjax_linear": "Linear",
    "magicjax_packed_linear": "PackedLinear",
    "magicjax_packed_rows": "PackedRows",
    "magicjax_tree_attention": "TreeAttention",
}
COMPILERS = ("g++", "clang++", "c++")
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
# No fused multiply-adds but those in the source: sums have the same bits with every compiler.
FLAGS = ("-O3", "-std=c++17", "-fPIC", NATIVE, "-ffp-contract=off", "-fno-math-errno", "-pthread")

SELF_CHECK = ("-m", "pallas_kernels.cpu.self_check")
CHECKING = "MAGICJAX_CPU_KERNELS_CHECKING"  # set in the process that checks
PASSED = "ok"  # the content of a file with a verdict
_lock = threading.Lock()


class UnavailableError(Exception):
    """Says why there are no kernels."""


class _NoCompilerError(UnavailableError):
    pass


def is_available() -> bool:
    """Returns whether the kernels can be called; the first call compiles and registers them."""
    return unavailable_reason() is None


def is_default() -> bool:
    """Returns whether JAX's default device is a CPU that has the kernels."""
    return jax.default_backend() == "cpu" and is_available()


def unavailable_reason() -> str | None:
    """Returns why the kernels cannot be called, None if they can.

    Raises:
      ValueError: MAGICJAX_CPU_KERNELS is neither "on" nor "off".
    """
    if reason := _switched_off():
        return reason
    with _lock:  # one thread compiles, and the others wait
        error = _library_or_error()[1]
        return None if error is None else _warn(str(error))


def library() -> ctypes.CDLL | None:
    """Returns the library, None if the kernels cannot be called."""
    return _library_or_error()[0] if is_available() else None


def vector_width() -> int:
    """Returns the number of floats in a vector of the kernels; 1 if they cannot be called."""
    opened = library()
    return opened.magicjax_vector_width() if opened else 1


def _switched_off() -> str | None:
    """Returns the setting that excludes the kernels, None if there is none."""
    switch = os.environ.get(SWITCH) or "on"
    if switch not in ("on", "off"):
        raise ValueError(f"{SWITCH}={switch!r} is unknown: use 'on' or 'off'")
    if switch == "off":
        return f"{SWITCH}=off"
    platforms = jax.config.jax_platforms
    if platforms and "cpu" not in platforms.split(","):
        return f"JAX_PLATFORMS={platforms} does not include cpu"
    return None


@functools.cache
def _warn(reason: str) -> str:
    """Logs the reason once, and returns it."""
    logger.warning(
        "CPU kernels are off, and models run on XLA's slower products: %s (%s=off hides this "
        "message)",
        reason,
        SWITCH,
    )
    return reason


@functools.cache
def _library_or_error() -> tuple[ctypes.CDLL | None, UnavailableError | None]:
    """Returns the registered library, or why there is none."""
    try:
        opened = _checked_library()
    except UnavailableError as error:
        return None, error
    except OSError as error:  # of the cache folder
        return None, UnavailableError(str(error))
    for target, symbol in TARGETS.items():
        capsule = jax.ffi.pycapsule(getattr(opened, symbol))
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return opened, None


def _checked_library() -> ctypes.CDLL:
    """Returns the library of this machine after it has passed the self-check."""
    compiler = _compiler()
    path = _library_path(compiler)
    verdict = _verdict(path).read_text() if _verdict(path).is_file() else ""
    if verdict not in ("", PASSED):
        raise UnavailableError(f"{verdict}; delete {_verdict(path)} to try again")
    path, opened = _open(compiler, path)
    if not verdict and CHECKING not in os.environ:
        _check(path)
    return opened


def _open(compiler: list[str], path: pathlib.Path) -> tuple[pathlib.Path, ctypes.CDLL]:
    """Returns the path and the library, which is compiled if it is missing or cannot be loaded."""
    for compiling in (not path.is_file(), True):
        if compiling:
            path = _compile(compiler, path)
        try:
            opened = ctypes.CDLL(str(path))
            for symbol in TARGETS.values():
                getattr(opened, symbol)
            return path, opened
        except (OSError, AttributeError) as error:
            failure = f"the library cannot be loaded: {error}"
    write(_verdict(path), failure)
    raise UnavailableError(failure)


def _compiler() -> list[str]:
    """Returns the command of $CXX, or of the first compiler found."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]):
            return chosen
        raise _NoCompilerError(f"CXX={os.environ['CXX']} is not found: install it, or unset CXX")
    if compiler := next(filter(None, map(shutil.which, COMPILERS)), None):
        return [compiler]
    raise _NoCompilerError("no C++ compiler found: install g++ or clang++")


def digest(*parts: object, suffixes: tuple[str, ...] = (".cc", ".h")) -> str:
    """Returns a digest of the parts, and of the files of this folder with the suffixes."""
    files = sorted(file for file in FOLDER.iterdir() if file.suffix in suffixes)
    contents = [(file.name, file.read_bytes()) for file in files]
    return hashlib.sha256(repr((parts, contents)).encode()).hexdigest()[:16]


def _library_path(compiler: list[str]) -> pathlib.Path:
    """Returns the path of the library that this machine compiles."""
    version = _run([*compiler, "--version"])
    name = digest(FLAGS, compiler, version, jaxlib.__version__, processor())
    return cache_folder() / "kernels" / f"{name}.so"


def _verdict(library: pathlib.Path) -> pathlib.Path:
    """Returns the path of the verdict on a library, which a change of the check invalidates."""
    checks = digest(ATTENTION_CHECK.read_bytes(), suffixes=(".py",))
    return library.with_name(f"{library.stem}-{checks}.checked")


def processor() -> str:
    """Returns the model of the first processor and its instruction sets."""
    described = f"{platform.system()} {platform.machine()} {platform.processor()}"
    try:
        first = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:  # not Linux
        return described
    fields = ("model name", "flags", "Features", "CPU ")  # the last two on Arm
    return "\n".join([described, *(x for x in first.splitlines() if x.startswith(fields))])


def cache_folder() -> pathlib.Path:
    """Returns `$MAGICJAX_CACHE`, by default magicjax/ in the user's cache folder."""
    if folder := os.environ.get("MAGICJAX_CACHE"):
        return pathlib.Path(folder).absolute()
    try:
        user = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise UnavailableError(f"{error}: set MAGICJAX_CACHE to a folder") from None
    return pathlib.Path(user).absolute() / "magicjax"


def _compile(compiler: list[str], path: pathlib.Path) -> pathlib.Path:
    """Compiles the library; returns its path, which is temporary if the folder is not writable.

    The library is renamed when it is complete. Processes that compile it at once write equal files.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(
            dir=path.parent, prefix=".", ignore_cleanup_errors=True
        )
    except OSError as error:
        logger.warning(
            "every process compiles the CPU kernels: %s; set MAGICJAX_CACHE to a writable folder",
            error,
        )
        root = pathlib.Path(tempfile.mkdtemp(prefix="magicjax-"))
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        return _compile(compiler, root / "kernels" / path.name)
    logger.info("compiling CPU kernels (once, about 20 s)")
    sources = sorted(FOLDER.glob("*.cc"))
    with folder as partial, concurrent.futures.ThreadPoolExecutor() as pool:
        objects = [f"{partial}/{source.stem}.o" for source in sources]
        command = [*compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), "-c"]
        list(pool.map(lambda s, o: _run([*command, str(s), "-o", o]), sources, objects))
        _run([*compiler, "-shared", "-pthread", *objects, "-o", f"{partial}/{path.name}"])
        pathlib.Path(partial, path.name).replace(path)
    return path


def _run(command: list[str]) -> str:
    """Returns the output of a compiler; raises with the first lines of its message."""
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise UnavailableError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    message = "\n".join(lines[first : first + 3]) or f"it exited with code {done.returncode}"
    raise UnavailableError(f"the compiler {command[0]} failed: {message}")


def _check(path: pathlib.Path) -> None:
    """Runs the self-check in a process, which can crash, and has its own settings of JAX."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    environment |= {CHECKING: "1", "JAX_PLATFORMS": "cpu"}
    environment["MAGICJAX_CACHE"] = str(path.parent.parent)
    try:
        done = subprocess.run(
            [sys.executable, *SELF_CHECK],
            env=environment,
            cwd=FOLDER.parent.parent,
            capture_output=True,
            timeout=300,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the self-check did not finish: {error}") from None
    if done.returncode == 0:
        return write(_verdict(path), PASSED)
    mismatch = done.stdout.decode(errors="replace").strip()
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    failure = f"the self-check failed: {mismatch or last or 'no message'}"
    if mismatch:  # a crash can have other causes, so it is not remembered
        write(_verdict(path), failure)
        raise UnavailableError(failure)
    raise UnavailableError(f"{failure} (exit code {done.returncode})")


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file, if the folder is writable; other processes see all of it or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.write_text(text)
        partial.replace(path)


def main() -> int:
    """Compiles and checks the kernels, and prints the result; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    reason = _switched_off()
    opened, error = (None, None) if reason else _library_or_error()
    print(f"CPU kernels are {f'ready: {opened._name}' if opened else f'off: {reason or error}'}")
    return 1 if error and not isinstance(error, _NoCompilerError) else 0
