"""The installed JAX has none of the known bugs that change results on a CPU."""

import os
import subprocess
import sys

# https://github.com/jax-ml/jax/issues/39103: jaxlib 0.10.2 returns wrong squares of large arrays.
SQUARED_NORMS = """
import jax
import jax.numpy as jnp

rows = jnp.zeros((2**15 + 1, 3)).at[:, 0].set(jnp.arange(2**15 + 1))
norms = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)
assert norms[-1] == 2**30, norms[-1]
"""


def test_a_product_with_a_reduction_is_compiled_correctly():
    # With optimizations, which quick tests disable.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", SQUARED_NORMS], env=environment, check=True)
