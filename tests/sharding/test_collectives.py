"""Selections along one device's axis; those along a divided one are in `magicjax/mesh_cases.py`."""

import jax.numpy as jnp
import numpy as np
import pytest

from sharding import collectives
from tests.quick import quick


@pytest.mark.parametrize("size", quick([1, 7, 48, 4096, 5000, 5003], 48, 5003))
def test_argmax_and_top_k_take_the_first_of_equal_elements(size):
    rng = np.random.default_rng(size)
    x = rng.integers(0, 5, (3, 5, size)).astype(np.float32)  # many equal ones
    x[0] = rng.standard_normal((5, size))
    x[1, :2] = -np.inf
    np.testing.assert_array_equal(collectives.argmax(jnp.asarray(x), ()), x.argmax(-1))
    for count in {0, 1, min(3, size), min(40, size), size}:
        best, at = collectives.top_k(jnp.asarray(x), count, ())
        expected = np.argsort(-x, -1, kind="stable")[..., :count]
        np.testing.assert_array_equal(at, expected)
        np.testing.assert_array_equal(best, np.take_along_axis(x, expected, -1))


def test_a_count_beyond_the_axis_is_all_of_it():
    best, at = collectives.top_k(jnp.arange(4.0), 9, ())
    np.testing.assert_array_equal(at, [3, 2, 1, 0])
    assert best.shape == (4,)
