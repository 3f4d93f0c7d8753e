"""`python -m pallas_kernels.cpu` compiles and checks the kernels now."""

import sys

from pallas_kernels.cpu.build import main

sys.exit(main())
