"""`python -m tests.fuzz`: see `tests.fuzz.fuzzing`."""

import os
import sys

# Before JAX is imported. Compilation is most of the time, and half of it is LLVM's optimization.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
)

from tests.fuzz import fuzzing

if __name__ == "__main__":
    sys.exit(fuzzing.main())
