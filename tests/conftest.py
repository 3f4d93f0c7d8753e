"""Common settings of all tests: one device, fixed seeds, float32 unless a test uses float64."""

import os
import pathlib
import random
import shutil
import time

# Tests compare float32 results exactly on a CPU; JAX_PLATFORMS=cuda,cpu uses a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "8")  # XLA threads, enough for interpreted kernels
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's matrices are small
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a misspelt path looks like a model of the Hub

# Most of the time is compilation. Programs compiled by other workers, subprocesses and earlier runs
# are read from a cache, even the smallest ones.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    pathlib.Path(__file__).parent.parent / ".pytest_cache" / "programs"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import numpy as np
import pytest

from tests.eight_devices import Eight, limit_memory_maps

PROGRAMS = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
LARGEST = 1e9  # maximum bytes of the cache when a run starts
jax.config.update("jax_enable_x64", False)

# An example may compile, so time limits for one example are meaningless.
hypothesis.settings.register_profile(
    "local", deadline=None, max_examples=25, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("local"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutation", help="make this wrong change of `tests/mutations.py` to the core"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Empties a program cache that is too large, and disables optimizations for quick tests."""
    if config.option.mutation:
        from tests import mutations

        mutations.apply(config.option.mutation)
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sum(path.stat().st_size for path in PROGRAMS.glob("*")) > LARGEST:
        shutil.rmtree(PROGRAMS)
    # Half of the compile time is LLVM optimization of code that runs once. Slow tests compute more
    # and keep it; `XLA_FLAGS= make test` keeps it for quick tests too.
    if config.option.markexpr == "not slow" and os.environ["JAX_PLATFORMS"] == "cpu":
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        os.environ.setdefault("XLA_FLAGS", flags)


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.default_backend()}"


def pytest_terminal_summary(terminalreporter):
    """Prints the number of rows that exactness tests compared, and of ties."""
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "when")]
    counted = [p for r in reports if r.when == "teardown" for p in r.user_properties]
    rows, ties = (sum(n for name, n in counted if name == kind) for kind in ("rows", "ties"))
    if rows:
        terminalreporter.write_line(f"{rows} rows compared, {ties} differ at a tie in float32")


@pytest.fixture(autouse=True)
def _seed_and_check_float64():
    """Seeds the global generators, and fails a test that leaves float64 enabled."""
    random.seed(0)
    np.random.seed(0)
    begin = time.monotonic()
    yield
    if time.monotonic() - begin > 0.2:  # less is too short to compile much, and counting takes time
        limit_memory_maps()
    left_on = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    assert not left_on, "this test left float64 enabled: use the fixture `float64`"


@pytest.fixture(autouse=True, scope="module")
def _clear_compiled_programs():
    """Drops compiled programs after each file: thousands of them in one process exhaust memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def float64(_seed_and_check_float64):
    """Enables float64 for one test, so that rounding decides no ties."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="session")
def eight():
    """A process with eight devices that runs functions of the tests."""
    process = Eight()
    yield process
    process.close()
