"""The library of CPU kernels: compiled once, checked, and off with a reason if anything fails.

A small source stands for the kernels.
"""

import concurrent.futures
import functools
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import xla
from pallas_kernels.cpu import build, self_check

ROOT = pathlib.Path(build.__file__).parent.parent.parent
COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)
SOURCE = """
extern "C" int answer() { return 42; }
extern "C" int magicjax_vector_width() { return 8; }
"""
# A handler that doubles float32 numbers.
HANDLER = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
static ffi::Error twice(Floats x, ffi::Result<Floats> y) {
  for (size_t i = 0; i < x.element_count(); i++) y->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Twice, twice, ffi::Ffi::Bind().Arg<Floats>().Ret<Floats>());
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


class StandIn:
    """Sources, a cache folder and a compiler of one test."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        self.sources = folder / "package" / "cpu" / "sources"
        self.cache = folder / "cache" / "kernels"
        self.log = folder / "log"
        self.sources.mkdir(parents=True)
        (self.sources / "answer.cc").write_text(SOURCE)
        (self.sources / "answer.h").write_text("")
        monkeypatch.setattr(build, "FOLDER", self.sources)
        monkeypatch.setattr(build, "TARGETS", {})
        monkeypatch.setattr(build, "FLAGS", ("-O0", "-std=c++17", "-fPIC"))
        monkeypatch.setenv("MAGICJAX_CACHE", str(folder / "cache"))
        monkeypatch.delenv(build.SWITCH, raising=False)
        self.use_compiler(f'exec {COMPILER} "$@"')
        self.check_with("")
        self.new_process()

    def use_compiler(self, script: str) -> None:
        """Sets $CXX to a shell script, which logs its arguments."""
        path = self.log.with_name("compiler")
        path.write_text(f'#!/bin/sh\necho "$@" >>{self.log}\n{script}\n')
        path.chmod(0o755)
        self.monkeypatch.setenv("CXX", str(path))

    def check_with(self, program: str) -> None:
        """Sets the Python program of the self-check."""
        self.monkeypatch.setattr(build, "SELF_CHECK", ("-c", program))

    def new_process(self) -> None:
        """Forgets what a process keeps."""
        for name in ("_library_or_error", "_warn"):
            cached = functools.cache(getattr(build, name).__wrapped__)
            self.monkeypatch.setattr(build, name, cached)

    def compilations(self) -> int:
        return self.log.read_text().count("-c ") if self.log.exists() else 0

    def files(self) -> list[str]:
        return sorted(path.suffix or path.name for path in self.cache.glob("*"))

    def start(self) -> subprocess.Popen:
        """Starts a process that compiles the same sources, and prints the reason for no library."""
        program = (
            "import pathlib, sys; from pallas_kernels.cpu import build;"
            "build.FOLDER = pathlib.Path(sys.argv[1]); build.TARGETS = {};"
            f"build.FLAGS = {build.FLAGS}; build.SELF_CHECK = {build.SELF_CHECK};"
            "print(build.unavailable_reason())"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program, self.sources],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    return StandIn(tmp_path, monkeypatch)


@pytest.fixture
def warnings(caplog):
    """A function that returns the messages of warnings so far."""
    caplog.set_level(logging.INFO, "magicjax")
    return lambda: [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]


def test_the_library_is_compiled_once_and_checked(stand_in, warnings, caplog):
    assert build.is_available() and build.library().answer() == 42 and build.vector_width() == 8
    assert [x.getMessage() for x in caplog.records] == ["compiling CPU kernels (once, about 20 s)"]
    assert stand_in.compilations() == 1 and stand_in.files() == [".checked", ".so"]
    stand_in.check_with("exit(1)")  # it is not checked again
    stand_in.new_process()
    assert build.is_available() and build.library().answer() == 42
    assert stand_in.compilations() == 1 and not warnings()


def test_no_compiler(stand_in, warnings, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX")
    reason = "no C++ compiler found: install g++ or clang++"
    assert build.unavailable_reason() == build.unavailable_reason() == reason
    assert not build.is_available() and build.library() is None and build.vector_width() == 1
    (warning,) = warnings()
    assert reason in warning and "MAGICJAX_CPU_KERNELS=off" in warning
    assert build.main() == 0 and reason in capsys.readouterr().out


def test_a_compiler_in_the_environment_that_does_not_exist(stand_in, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler -m64")
    assert "CXX=/no/such/compiler -m64 is not found" in build.unavailable_reason()


def test_switched_off(stand_in, warnings, monkeypatch, capsys):
    monkeypatch.setenv(build.SWITCH, "off")
    assert build.unavailable_reason() == "MAGICJAX_CPU_KERNELS=off" and build.library() is None
    assert build.main() == 0 and "off: MAGICJAX_CPU_KERNELS=off" in capsys.readouterr().out
    assert stand_in.compilations() == 0 and not warnings()
    monkeypatch.setenv(build.SWITCH, "")  # as if it were not set
    assert build.is_available()


def test_an_invalid_switch_is_an_error(stand_in, monkeypatch):
    monkeypatch.setenv(build.SWITCH, "yes")
    with pytest.raises(ValueError, match="MAGICJAX_CPU_KERNELS='yes' .* use 'on' or 'off'"):
        build.is_available()


def test_without_a_cpu_platform_nothing_is_compiled(stand_in, warnings):
    platforms = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", "cuda")
        assert "cuda does not include cpu" in build.unavailable_reason()
    finally:
        jax.config.update("jax_platforms", platforms)
    assert stand_in.compilations() == 0 and not warnings()


def test_an_error_of_the_compiler_is_the_reason(stand_in, warnings, capsys):
    (stand_in.sources / "answer.cc").write_text('#include "answer.h"\nint x = unheard_of;\n')
    assert "unheard_of" in build.unavailable_reason()
    assert build.library() is None and len(warnings()) == 1 and "unheard_of" in warnings()[0]
    assert stand_in.files() == []
    assert build.main() == 1 and "unheard_of" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["source", "header", "flags", "version", "jaxlib", "processor"])
def test_every_dependency_changes_the_name(part, stand_in, monkeypatch):
    compiler = build._compiler()
    before = build._library_path(compiler)
    assert build._library_path(compiler) == before
    if part in ("source", "header"):
        path = stand_in.sources / {"source": "answer.cc", "header": "answer.h"}[part]
        path.write_text(path.read_text() + "// changed\n")
    elif part == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    elif part == "version":
        stand_in.use_compiler("echo 1.2.3")
    elif part == "jaxlib":
        monkeypatch.setattr(build.jaxlib, "__version__", "0.0.0")
    else:
        monkeypatch.setattr(build, "processor", lambda: "another one")
    assert build._library_path(compiler) != before


def test_processes_compile_at_once(stand_in):
    processes = [stand_in.start() for _ in range(2)]
    assert [process.communicate(timeout=100)[0] for process in processes] == ["None\n"] * 2
    assert stand_in.files() == [".checked", ".so"]
    stand_in.check_with("exit(1)")
    assert build.is_available()


def test_threads_compile_once(stand_in):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: build.is_available(), range(8)))
    assert stand_in.compilations() == 1


def test_a_killed_compilation_leaves_no_library(stand_in):
    kill = 'case "$*" in *-shared*) eval "last=\\${$#}"; echo part >"$last"; kill -9 $PPID;; esac'
    stand_in.use_compiler(f'{COMPILER} "$@"\n{kill}')
    process = stand_in.start()
    process.communicate(timeout=100)
    assert process.returncode == -9 and stand_in.compilations() == 1
    assert not list(stand_in.cache.glob("*.so"))
    stand_in.use_compiler(f'exec {COMPILER} "$@"')
    assert build.is_available()


def test_a_file_that_is_no_library_is_compiled_again(stand_in):
    path = build._library_path(build._compiler())
    build._compile(build._compiler(), path)
    path.write_bytes(b"no library")
    assert build.library().answer() == 42 and stand_in.compilations() == 2


def test_a_mismatch_is_remembered_until_the_check_changes(stand_in, warnings, capsys):
    stand_in.check_with("print('linear: relative error 1'); exit(1)")
    assert "self-check failed: linear: relative error 1" in build.unavailable_reason()
    assert build.library() is None and len(warnings()) == 1 and "linear" in warnings()[0]
    stand_in.check_with("")
    stand_in.new_process()
    assert "linear: relative error 1; delete " in build.unavailable_reason()
    assert build.main() == 1
    (stand_in.sources / "self_check.py").write_text("changed")
    stand_in.new_process()
    assert build.is_available() and stand_in.compilations() == 1


def test_a_crash_of_the_check_is_a_reason_and_not_remembered(stand_in, warnings):
    stand_in.check_with("import os; os.abort()")
    assert "exit code -6" in build.unavailable_reason() and len(warnings()) == 1
    assert stand_in.files() == [".so"]
    stand_in.check_with("")
    stand_in.new_process()
    assert build.is_available() and stand_in.files() == [".checked", ".so"]


def test_the_check_runs_on_a_cpu_with_the_same_library(stand_in, monkeypatch):
    stand_in.check_with(
        "import os, pathlib; assert os.environ['JAX_PLATFORMS'] == 'cpu';"
        "(library,) = pathlib.Path(os.environ['MAGICJAX_CACHE'], 'kernels').glob('*.so')"
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert build.is_available()
    monkeypatch.setenv("MAGICJAX_CACHE", "/dev/null/cache")
    stand_in.new_process()
    assert build.is_available()


def test_the_process_that_checks_starts_no_other(stand_in, monkeypatch):
    stand_in.check_with("exit(1)")
    monkeypatch.setenv(build.CHECKING, "1")
    assert build.is_available() and stand_in.files() == [".so"]


def test_a_folder_that_is_not_writable(stand_in, warnings, monkeypatch):
    monkeypatch.setenv("MAGICJAX_CACHE", "/dev/null/cache")
    assert build.library().answer() == 42
    assert len(warnings()) == 1 and "set MAGICJAX_CACHE to a writable folder" in warnings()[0]


@pytest.mark.slow
def test_the_first_call_can_be_in_a_trace(stand_in, float64, monkeypatch):
    (stand_in.sources / "answer.cc").write_text(HANDLER)
    monkeypatch.setattr(build, "TARGETS", {"test_build_twice": "Twice"})
    monkeypatch.setattr(build, "SELF_CHECK", ("-c", "import jax; jax.numpy.ones(2).sum()"))

    @jax.jit
    def twice(x):
        assert build.is_available()
        return jax.ffi.ffi_call("test_build_twice", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = jnp.arange(5, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.vmap(lambda _: twice(x))(x), np.tile(2 * x, (5, 1)))


def _wrong(error):
    def attend(*arguments):
        out, lse = xla.attend(*arguments)
        return error(out, lse)

    return attend


@pytest.mark.slow
def test_the_self_check_accepts_a_right_kernel(monkeypatch):
    monkeypatch.setattr(self_check.attention, "attend", xla.attend)
    assert self_check._check_attention() is None


@pytest.mark.parametrize(
    ("name", "error"),
    {
        "out": lambda out, lse: (out * 1.001, lse),
        "lse": lambda out, lse: (out, lse + 0.01),
        "out: relative error nan": lambda out, lse: (out.at[0, 0].set(jnp.nan), lse),
    }.items(),
)
def test_the_self_check_finds_a_wrong_kernel(name, error, monkeypatch):
    monkeypatch.setattr(self_check.attention, "attend", _wrong(error))
    message = self_check._check_attention()
    assert message.startswith(f"tree_attention, decoding in float32, {name}"), message


def test_the_self_check_finds_a_wrong_packed_product(monkeypatch):
    assert self_check._check_packed() is None
    right = self_check.packed.products

    def wrong(x, matrices, *options):
        (out,) = right(x, matrices, *options)
        return [out.at[0, 0].multiply(1.001)] if matrices[0].weight_format == "Q6_K" else [out]

    monkeypatch.setattr(self_check.packed, "products", wrong)
    assert self_check._check_packed() == (
        "packed, Q6_K: the products differ from those of integers"
    )
