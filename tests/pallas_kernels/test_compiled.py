"""Compiled programs read caches in place, and only live blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from pallas_kernels import prefix_mass, quantize, tree_attention
from pallas_kernels.benchmarks.shapes import Shape
from pallas_kernels.xla import BLOCK, LARGE
from tests.pallas_kernels.attention_cases import compiled, make_inputs

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="reads programs that XLA compiles for a CPU"
)

SLOTS = LARGE * BLOCK + 64
NUMBER = r"(?:f|bf|s|u)\d+"


def moves_of_a_cache(program: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the lines of a compiled program that write as many elements as a cache has."""
    size = int(np.prod(shape))
    lines = []
    for line in program.splitlines():
        match = re.search(rf"= {NUMBER}\[([\d,]+)\]\S* (\S+?)\(", line)
        if match is None or match[2] not in ("copy", "transpose", "convert", "fusion", "slice"):
            continue
        if int(np.prod([int(n) for n in match[1].split(",")])) == size:
            lines.append(line.strip())
    return lines


@functools.cache
def program_of(nodes: int, dtype: str):
    """Returns (compiled program, inputs) of the fast path for T = N nodes."""
    inputs = make_inputs(Shape(2, nodes, nodes, 2, 1, 64, SLOTS), jnp.dtype(dtype))
    return compiled("xla").lower(inputs).compile(), inputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("nodes", [1, 5, 64])
def test_no_cache_is_copied(nodes, dtype):
    program, inputs = program_of(nodes, dtype)
    cache = inputs["k_prefix"]
    assert moves_of_a_cache(program.as_text(), cache.shape) == []
    # Scores, and copies of blocks; a cache converted to float32 would be this much.
    assert program.memory_analysis().temp_size_in_bytes < 4 * cache.size


def test_a_copied_cache_is_detected():
    inputs = make_inputs(Shape(2, 5, 5, 2, 1, 64, SLOTS), jnp.float32)
    program = compiled("reference").lower(inputs).compile()
    shape = inputs["k_prefix"].shape
    joined = (*shape[:2], SLOTS + 5, shape[3])  # the reference appends the new tokens
    assert moves_of_a_cache(program.as_text(), joined)


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_loop_that_commits_to_the_cache_keeps_it_in_place(nodes):
    shape = Shape(2, nodes, nodes, 2, 1, 64, SLOTS)
    inputs = make_inputs(shape, jnp.float32, "chain")

    def step(_, carry):
        k, v, lengths, q = carry
        new = inputs["k_new"] + q  # depends on the step before, as a real key does
        out = tree_attention(q, k, v, lengths, new, new, inputs["mask"])
        # Ties the commit to the attention that reads the old cache, or XLA may copy the cache. A
        # product with zero is a tie in every version; the barrier is one in newer ones.
        new = new + 0.0 * out.sum()

        def write(cache, entries, at):
            return lax.dynamic_update_slice_in_dim(cache, entries.swapaxes(0, 1), at, axis=1)

        commit = jax.vmap(write)
        return commit(k, new, lengths), commit(v, new, lengths), lengths + 1, out

    def loop(k, v, lengths, q):
        return lax.fori_loop(0, 3, step, (k, v, lengths, q))

    arguments = (inputs["k_prefix"], inputs["v_prefix"], jnp.asarray([5, 9]), inputs["q"])
    program = jax.jit(loop, donate_argnums=(0, 1)).lower(*arguments).compile()
    copies = [
        line
        for line in moves_of_a_cache(program.as_text(), inputs["k_prefix"].shape)
        if " copy(" in line
    ]
    assert copies == []
    assert program.memory_analysis().temp_size_in_bytes < inputs["k_prefix"].nbytes


@functools.cache
def mass_program(backend: str, nodes: int, dtype: str, has_lse: bool):
    """Returns a compiled program of `prefix_mass` for T nodes, with an lse or without."""
    shape = (2, nodes, 2, 64)
    lse = jax.ShapeDtypeStruct(shape[:3], jnp.float32) if has_lse else None
    keys = jax.ShapeDtypeStruct((2, 2, SLOTS, 64), dtype)
    seen = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    mass = jax.jit(functools.partial(prefix_mass, backend=backend))
    return mass.lower(jax.ShapeDtypeStruct(shape, dtype), keys, seen, lse).compile()


lse_or_none = pytest.mark.parametrize("has_lse", [True, False], ids=["lse given", "lse computed"])


@lse_or_none
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("nodes", [1, 64])
def test_the_mass_copies_no_cache(nodes, dtype, has_lse):
    program = mass_program("xla", nodes, dtype, has_lse)
    assert moves_of_a_cache(program.as_text(), (2, 2, SLOTS, 64)) == []


def lowered_sizes(platform: str, function, *arguments) -> set[int]:
    """Returns the sizes of the float32 arrays of a program that is lowered for a platform."""
    module = export.export(jax.jit(function), platforms=[platform])(*arguments).mlir_module()
    shapes = re.findall(r"tensor<([\dx]+)xf32>", module)
    return {int(np.prod([int(n) for n in shape.split("x")])) for shape in shapes}


def decoding(nodes: int) -> tuple:
    """Returns shapes for `tree_attention`: batch 16, a context of 32,768, few rows for a head."""
    heads, slots, size, shape = 8, 32768, 128, jax.ShapeDtypeStruct
    q = shape((16, nodes, 4 * heads, size), jnp.bfloat16)
    cache = shape((16, heads, slots, size), jnp.bfloat16)
    new = shape((16, nodes, heads, size), jnp.bfloat16)
    return q, cache, cache, shape((16,), jnp.int32), new, new, shape((nodes, nodes), jnp.bool_)


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("operation", ["attention", "mass"])
def test_only_programs_for_a_cpu_materialize_all_scores(operation, nodes):
    """The platform that a program is lowered for decides; both are lowered on a CPU."""
    arguments = decoding(nodes)
    function = functools.partial(tree_attention, backend="xla")
    if operation == "mass":
        arguments = (*arguments[:2], jax.ShapeDtypeStruct((16, nodes), jnp.int32))
        function = prefix_mass
    rows, caches, slots = 4 * nodes, 16 * 8, 32768
    scores, block = caches * rows * slots, caches * rows * BLOCK
    on_cpu, on_gpu = (lowered_sizes(p, function, *arguments) for p in ("cpu", "cuda"))
    assert scores in on_cpu
    assert block in on_gpu and max(on_gpu) <= max(block, caches * slots)  # the mass of each slot


@pytest.mark.parametrize("bits", [8, 4])
def test_a_large_quantized_cache_is_never_dequantized_as_a_whole(bits):
    inputs = make_inputs(Shape(2, 2, 2, 1, 1, 64, 2 * SLOTS), jnp.float32)
    whole = inputs["k_prefix"].nbytes
    inputs |= {name: quantize(inputs[name], bits) for name in ("k_prefix", "v_prefix")}
    program = compiled("xla").lower(inputs).compile()
    assert program.memory_analysis().temp_size_in_bytes < whole // 2
