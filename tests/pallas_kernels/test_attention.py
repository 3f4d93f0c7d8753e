"""Tree attention: the same tests for every backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import BACKENDS, EMPTY_LSE, choose_backend, merge, quantize, tree_attention
from pallas_kernels.benchmarks.shapes import Shape
from pallas_kernels.xla import BLOCK, LARGE
from tests.pallas_kernels.attention_cases import (
    CPU,
    MASKS,
    compiled,
    compiled_of_rows,
    make_inputs,
    oracle,
    relative_error,
    seen_by_nobody,
    some_rows,
)
from tests.quick import quick

# A sum of n random terms in float32 has a relative error of about sqrt(n) * 6e-8: 4e-6 for the
# 4,100 keys of the longest shape. bf16 keeps 8 bits: probabilities and the result have relative
# errors of at most 2^-9 = 2e-3.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float64": 1e-12}

# The number of rows (T * G) per key/value head decides the code path.
SHAPES = (
    Shape(4, 1, 1, 2, 1, 64, 40),  # plain decoding
    Shape(4, 5, 5, 2, 1, 64, 40),  # verification of a chain
    Shape(4, 1, 5, 1, 5, 64, 33),  # a chain's draft level: more new tokens than queries
    Shape(4, 5, 16, 1, 4, 128, 70),  # a tree's draft level
    Shape(4, 16, 16, 2, 1, 64, 1),  # a cache of one slot
    Shape(4, 33, 33, 2, 1, 128, 50),  # verification of a tree
    Shape(4, 1, 33, 2, 8, 64, 47),
    Shape(4, 64, 64, 1, 8, 64, 48),  # many rows, less than one block of slots
    Shape(6, 16, 16, 1, 4, 64, 2 * BLOCK + 300),  # many rows, blocks, and a tail
    Shape(6, 1, 1, 1, 1, 64, 2 * BLOCK + 300),
    Shape(6, 5, 5, 1, 1, 64, LARGE * BLOCK + 7),  # few rows, a branch on the fill of the cache
)
CASES = [*((shape, "float32") for shape in SHAPES), *((shape, "bfloat16") for shape in SHAPES[::2])]
# One of each code path: more new tokens than queries, one slot, many rows, blocks.
QUICK = [(SHAPES[i], "float32") for i in (3, 4, 7, 10)] + [(SHAPES[8], "bfloat16")]
quick_cases = pytest.mark.parametrize(("shape", "dtype"), quick(CASES, *QUICK), ids=str)

SMALL = Shape(4, 5, 7, 2, 3, 8, 6)

every_backend = pytest.mark.parametrize("backend", ["reference", "xla", CPU, "tpu_interpreted"])
fast_backends = pytest.mark.parametrize("backend", ["xla", CPU, "tpu_interpreted"])
# A TPU has no float64, and its kernel no derivative.
on_a_host = pytest.mark.parametrize("backend", ["xla", CPU])


@pytest.mark.parametrize("backend", ["reference", "xla", CPU])
@pytest.mark.parametrize("kind", MASKS)
def test_equals_loops_over_queries_and_keys(backend, kind, float64):
    inputs = make_inputs(SMALL, jnp.float64, kind)
    out, lse = compiled(backend)(inputs)
    assert out.dtype == lse.dtype == jnp.float64
    expected_out, expected_lse = oracle(**inputs)
    assert relative_error(out, expected_out) < 1e-12
    seen = ~seen_by_nobody(inputs)
    assert relative_error(np.asarray(lse)[seen], expected_lse[seen]) < 1e-12


@pytest.mark.parametrize(
    "wrong",
    [{"head_of": lambda head: head % 2}, {"scale": 1.0}, {"extra": 1}, {"extra": -1}],
    ids=["heads interleaved", "no scale", "one slot more", "one slot fewer"],
)
def test_a_wrong_rule_is_detected(wrong):
    inputs = make_inputs(SMALL, jnp.float32)
    out, _ = compiled("reference")(inputs)
    wrong_out, _ = oracle(**inputs, **wrong)
    assert relative_error(out, wrong_out) > 100 * TOLERANCE["float32"]


@fast_backends
@quick_cases
def test_equals_the_reference(backend, shape, dtype):
    for kind in MASKS:
        inputs = make_inputs(shape, jnp.dtype(dtype), kind)
        out, lse = compiled(backend)(inputs)
        expected_out, expected_lse = compiled("reference")(inputs)
        assert out.dtype == inputs["q"].dtype and lse.dtype == jnp.float32
        assert relative_error(out, expected_out) < TOLERANCE[dtype], kind
        seen = ~seen_by_nobody(inputs)
        np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=TOLERANCE[dtype])


@on_a_host
@pytest.mark.parametrize("shape", quick(SHAPES[-3:], SHAPES[-3], SHAPES[-1]), ids=str)
def test_equals_the_reference_to_rounding_in_float64(backend, shape, float64):
    inputs = make_inputs(shape, jnp.float64)
    out, _ = compiled(backend)(inputs)
    expected, _ = compiled("reference")(inputs)
    assert relative_error(out, expected) < TOLERANCE["float64"]


@every_backend
@quick_cases
def test_dead_slots_do_not_matter(backend, shape, dtype):
    inputs = make_inputs(shape, jnp.dtype(dtype))
    dead = np.arange(shape.slots) >= inputs["lengths"][:, None]
    dead = dead[:, None, :, None]
    nan, huge = (np.asarray(x, inputs["q"].dtype) for x in (np.nan, 3e38))
    poisoned = inputs | {
        "k_prefix": np.where(dead, nan, inputs["k_prefix"]),
        "v_prefix": np.where(dead, huge, inputs["v_prefix"]),
    }
    for clean, dirty in zip(compiled(backend)(inputs), compiled(backend)(poisoned), strict=True):
        np.testing.assert_array_equal(clean, dirty)


@every_backend
def test_a_query_that_sees_no_key_gets_zeros(backend):
    inputs = make_inputs(SMALL, jnp.float32)
    nothing = seen_by_nobody(inputs)
    assert nothing.any() and not nothing.all()
    out, lse = compiled(backend)(inputs)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    assert (np.asarray(out)[nothing] == 0).all()
    np.testing.assert_array_equal(np.asarray(lse)[nothing], np.float32(EMPTY_LSE))
    assert (np.asarray(lse)[~nothing] > -100).all()


@every_backend
def test_scores_of_any_size_give_finite_results(backend):
    inputs = make_inputs(SMALL, jnp.float32)
    inputs["q"] = inputs["q"] * 1e6
    out, lse = compiled(backend)(inputs)
    expected, _ = oracle(**inputs)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    assert relative_error(out, expected) < 1e-5


LONG = Shape(4, 2, 4, 2, 3, 8, BLOCK + 100)
ROWS = [(SMALL, None), (SMALL, 8), (LONG, None), (LONG, 8)]


@every_backend
@pytest.mark.parametrize(("shape", "bits"), quick(ROWS, (SMALL, 8)), ids=str)
def test_first_row_selects_rows_of_a_larger_cache(backend, shape, bits):
    inputs = make_inputs(shape, jnp.float32)
    if bits:
        inputs |= {name: quantize(inputs[name], bits) for name in ("k_prefix", "v_prefix")}
    out, lse = compiled(backend)(inputs)
    for first, count in ((0, 2), (1, 2), (2, 2)):  # of one shape
        rows = compiled_of_rows(backend)(some_rows(inputs, first, count), first)
        for part, whole in zip(rows, (out, lse), strict=True):
            whole = whole[first : first + count]
            assert relative_error(part, whole) < TOLERANCE["float32"], (first, count)
        wrong, _ = compiled_of_rows(backend)(some_rows(inputs, first, count), (first + 1) % 3)
        assert relative_error(wrong, out[first : first + count]) > 100 * TOLERANCE["float32"]


def test_a_cache_of_fewer_rows_than_queries_is_refused():
    inputs = make_inputs(SMALL, jnp.float32)
    inputs["k_prefix"] = inputs["k_prefix"][:2]
    with pytest.raises(ValueError, match=r"k_prefix has shape \(2, "):
        tree_attention(**inputs, first_row=0)


@every_backend
def test_a_shared_mask_is_the_same_as_one_for_each_row(backend):
    inputs = make_inputs(SMALL, jnp.float32, "expansion")
    shared = inputs | {"mask": inputs["mask"][0]}
    for a, b in zip(compiled(backend)(inputs), compiled(backend)(shared), strict=True):
        np.testing.assert_array_equal(a, b)


@every_backend
def test_an_empty_cache_may_have_no_slots(backend):
    inputs = make_inputs(SMALL, jnp.float32)
    inputs["lengths"] = np.zeros_like(inputs["lengths"])
    expected, _ = compiled(backend)(inputs)
    out, _ = compiled(backend)(
        inputs | {name: inputs[name][:, :, :0] for name in ("k_prefix", "v_prefix")}
    )
    assert relative_error(out, expected) < TOLERANCE["float32"]


@fast_backends
@settings(max_examples=30)
@given(data=st.data())
def test_parts_merged_by_their_log_sum_exp_are_the_whole(backend, data):
    inputs = make_inputs(SMALL, jnp.float32, seed=data.draw(st.integers(0, 3)))
    bits = st.lists(st.booleans(), min_size=7, max_size=7)
    row = np.array([data.draw(bits) for _ in range(SMALL.nodes)])
    lengths = [data.draw(st.integers(0, SMALL.slots)) for _ in range(SMALL.batch)]
    lengths = np.array(lengths, np.int32)
    inputs["lengths"] = lengths
    whole = compiled(backend)(inputs)
    first = compiled(backend)(inputs | {"mask": inputs["mask"] & row})
    second = compiled(backend)(
        inputs | {"mask": inputs["mask"] & ~row, "lengths": np.zeros_like(lengths)}
    )
    out, lse = merge(*first, *second)
    assert relative_error(out, whole[0]) < TOLERANCE["float32"]
    np.testing.assert_allclose(lse, whole[1], atol=1e-5)
    for merged, expected in zip(merge(*second, *first), (out, lse), strict=True):
        np.testing.assert_allclose(merged, expected, atol=1e-6)


@every_backend
def test_a_prompt_in_chunks_equals_the_prompt_at_once(backend):
    chunk, chunks = 64, 3
    shape = Shape(1, chunk * chunks, chunk * chunks, 2, 1, 64, chunk * chunks)
    whole = make_inputs(shape, jnp.float32, "chain")
    whole["lengths"] = np.zeros(1, np.int32)
    expected, _ = compiled("reference")(whole)

    cache = {name: np.zeros_like(whole[f"{name}_prefix"]) for name in "kv"}
    outputs = []
    for start in range(0, chunk * chunks, chunk):
        piece = slice(start, start + chunk)
        new = {name: whole[f"{name}_new"][:, piece] for name in "kv"}
        inputs = {
            "q": whole["q"][:, piece],
            "k_prefix": cache["k"],
            "v_prefix": cache["v"],
            "lengths": np.array([start], np.int32),
            "k_new": new["k"],
            "v_new": new["v"],
            "mask": np.tri(chunk, dtype=bool),
        }
        outputs.append(np.asarray(compiled(backend)(inputs)[0]))
        for name in "kv":
            cache[name] = cache[name].copy()
            cache[name][:, :, piece] = new[name].swapaxes(1, 2)
    assert relative_error(np.concatenate(outputs, axis=1), expected) < TOLERANCE["float32"]


@on_a_host
def test_gradients_and_vmap(backend):
    inputs = make_inputs(SMALL, jnp.float32)
    floating = {name: inputs.pop(name) for name in ("q", "k_prefix", "v_prefix", "k_new", "v_new")}

    def loss(floating, backend):
        return (tree_attention(**floating, **inputs, backend=backend) ** 2).sum()

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, backend=name)))(floating)
        for name in (backend, "reference")
    )
    for name, gradient in found.items():
        assert relative_error(gradient, expected[name]) < TOLERANCE["float32"], name
    twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), floating)
    losses = jax.jit(jax.vmap(lambda x: loss(x, backend)))(twice)
    assert (
        relative_error(losses[0], jax.jit(loss, static_argnums=1)(floating, backend))
        < TOLERANCE["float32"]
    )


@fast_backends
def test_runs_inside_shard_map(backend):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    tokens, cache = spec("data", None, "model"), spec("data", "model")
    specs = {"q": tokens, "k_new": tokens, "v_new": tokens}
    specs |= {"k_prefix": cache, "v_prefix": cache, "lengths": spec("data"), "mask": spec("data")}
    for nodes, slots in ((64, 6), (5, LARGE * BLOCK)):
        inputs = make_inputs(Shape(2, nodes, nodes, 1, 1, 8, slots), jnp.float32)
        mapped = jax.jit(
            jax.shard_map(
                lambda inputs: tree_attention(**inputs, backend=backend),
                mesh=mesh,
                in_specs=(specs,),
                out_specs=tokens,
                check_vma=backend != "tpu_interpreted",  # a Pallas call does not say what varies
            )
        )
        assert relative_error(mapped(inputs), compiled(backend)(inputs)[0]) < 1e-6


def test_backend_by_name_and_by_platform():
    assert choose_backend("reference") == "reference"
    assert choose_backend() in BACKENDS
    with pytest.raises(ValueError, match=r"'cuda'.*reference.*xla"):
        choose_backend("cuda")


BAD = {
    "no batch axis": ({"q": (5, 6, 8)}, r"q has shape \(5, 6, 8\).*B, T, H, D"),
    "stacked caches": ({"k_prefix": (3, 4, 2, 6, 8)}, r"k_prefix has shape .*one layer"),
    "heads do not divide": ({"q": (4, 5, 5, 8)}, r"H=5 .*K=2.*multiple"),
    "other head size": ({"q": (4, 5, 6, 16)}, r"k_prefix has shape .*16"),
    "caches differ": ({"v_prefix": (4, 2, 7, 8)}, r"v_prefix has shape .*\(4, 2, 6, 8\)"),
    "scalar length": ({"lengths": ()}, r"lengths has shape \(\).*\[B\] = \(4,\)"),
    "new heads first": ({"k_new": (4, 2, 7, 8)}, r"k_new has shape .*\[B, N, K, D\]"),
    "new values shorter": ({"v_new": (4, 6, 2, 8)}, r"v_new has shape .*\(4, 7, 2, 8\)"),
    "no new tokens": ({"k_new": (4, 0, 2, 8), "v_new": (4, 0, 2, 8)}, r"N=0"),
    "mask transposed": ({"mask": (7, 5)}, r"mask has shape \(7, 5\).*\(5, 7\).*\(4, 5, 7\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_shape_is_refused_before_compilation(case):
    inputs = make_inputs(SMALL, jnp.float32)
    changes, message = BAD[case]
    changed = {name: np.zeros(size, inputs[name].dtype) for name, size in changes.items()}
    with pytest.raises(ValueError, match=message):
        tree_attention(**(inputs | changed))


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("q", jnp.int32, "q is int32.*floating"),
        ("v_prefix", jnp.bfloat16, "v_prefix is bfloat16 and q is float32.*cast"),
        ("lengths", jnp.float32, "lengths is float32.*integer"),
        ("mask", jnp.int32, "mask is int32.*bool"),
    ],
)
def test_a_wrong_dtype_is_refused_before_compilation(name, dtype, message):
    inputs = make_inputs(SMALL, jnp.float32)
    with pytest.raises(ValueError, match=message):
        tree_attention(**(inputs | {name: inputs[name].astype(dtype)}))
