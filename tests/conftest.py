"""What every test stands on: one device, fixed seeds, float32 unless a test asks for float64."""

import os
import pathlib
import random
import shutil

# Tests compare float32 results exactly, on a CPU; JAX_PLATFORMS=cuda,cpu asks for the device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "8")  # threads of XLA's, enough for kernels to be interpreted

# Most of the time goes into compiling: what another worker, a process that a test starts, or an
# earlier run has compiled is read, down to the smallest operation: that takes a sixth of the time.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    pathlib.Path(__file__).parent.parent / ".pytest_cache" / "programs"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import numpy as np
import pytest

from tests.eight_devices import Eight

PROGRAMS = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
LARGEST = 1e9  # bytes that the folder may have when a run starts
jax.config.update("jax_enable_x64", False)

# An example may compile, so time limits for one example mean nothing.
hypothesis.settings.register_profile(
    "local",
    deadline=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("local"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Begins anew with a folder of programs that has grown too large, and has quick ones made."""
    first = not hasattr(config, "workerinput")  # and not one of several workers
    if first and sum(path.stat().st_size for path in PROGRAMS.glob("*")) > LARGEST:
        shutil.rmtree(PROGRAMS)
    # Half of the time to compile goes into LLVM's optimizations of code that runs once. The slow
    # tests compute more, and have them; `XLA_FLAGS= make test` runs the quick ones with them too.
    if config.option.markexpr == "not slow" and os.environ["JAX_PLATFORMS"] == "cpu":
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.default_backend()}"


def pytest_terminal_summary(terminalreporter):
    """Prints how many rows the exactness tests compared, and how many parted at a tie."""
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "when")]
    counted = [p for r in reports if r.when == "teardown" for p in r.user_properties]
    rows, ties = (sum(n for name, n in counted if name == kind) for kind in ("rows", "ties"))
    if rows:
        terminalreporter.write_line(f"{rows} rows compared, {ties} parted at a tie of float32")


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    """Seeds the global generators, and fails a test that leaves float64 on for the others."""
    random.seed(0)
    np.random.seed(0)
    yield
    left_on = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    assert not left_on, "this test left float64 on: use the fixture `float64`"


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_end_with_their_file():
    """Drops compiled programs after each file: thousands of them in one process exhaust memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def float64(_same_start_for_every_test):
    """Turns float64 on for one test: there rounding decides no tie."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def eight():
    """A process with eight devices, which runs functions of the tests."""
    process = Eight()
    yield process
    process.close()
