"""The attention that queries pay to each slot of a cache: the same tests for every backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import EMPTY_LSE, prefix_mass, quantize
from pallas_kernels.benchmarks.shapes import Shape, random_inputs
from pallas_kernels.xla import BLOCK, FEW_ROWS, LARGE
from tests.pallas_kernels.attention_cases import relative_error
from tests.quick import quick

# As for attention: sums in float32 err by less than 1e-5 of themselves. Inputs in bf16 are exact in
# float32, where their scores are summed, so that only the order of the sums differs.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-5, "float64": 1e-12}

SMALL = Shape(4, 5, 1, 2, 3, 8, 6)
SHAPES = (
    Shape(4, 1, 1, 2, 1, 64, 40),  # one row
    Shape(4, 5, 1, 1, 5, 64, 33),
    Shape(4, 3, 1, 2, 8, 64, 47),
    Shape(4, 20, 1, 1, 4, 64, 70),  # many rows, less than a block of slots
    Shape(2, 13, 1, 2, 4, 64, 2 * BLOCK + 300),  # many rows, blocks, and a tail
    Shape(3, 1, 1, 1, 1, 64, LARGE * BLOCK + 7),  # few rows, a branch on how much is seen
    Shape(3, 2, 1, 1, 5, 64, LARGE * BLOCK + 7),
)
CASES = [
    *((shape, "float32") for shape in SHAPES),
    *((shape, "bfloat16") for shape in (SHAPES[0], *SHAPES[-3:-1])),
]

every_backend = pytest.mark.parametrize("backend", ["reference", "xla"])
fast_backends = pytest.mark.parametrize("backend", ["xla"])


def make_inputs(shape: Shape, dtype, fill: float = 1.0) -> dict:
    """Returns q, k_prefix, seen and lse, an lse above that of the slots by 0 to 2.

    The first query of the first row sees nothing, the last one of the last row the most.
    """
    drawn = jax.tree.map(np.asarray, random_inputs(shape, dtype))
    rng = np.random.default_rng(1)
    seen = rng.integers(0, int(fill * shape.slots) + 1, (shape.batch, shape.nodes))
    seen[0, 0], seen[-1, -1] = 0, int(fill * shape.slots)
    inputs = {"q": drawn["q"], "k_prefix": drawn["k_prefix"], "seen": seen.astype(np.int32)}
    lse = log_sum_exp(**inputs)
    lse = lse + 2 * rng.random(lse.shape)
    return inputs | {"lse": lse.astype(jnp.promote_types(dtype, jnp.float32))}


def log_sum_exp(q, k_prefix, seen) -> np.ndarray:
    """Returns [B, T, H] over the slots seen, in float64."""
    q, k_prefix = (np.asarray(x, np.float64) for x in (q, k_prefix))
    keys = np.repeat(k_prefix, q.shape[2] // k_prefix.shape[1], axis=1)
    scores = np.einsum("bthd,bhsd->bths", q, keys, optimize=True) / np.sqrt(q.shape[3])
    hidden = np.arange(keys.shape[2]) >= np.asarray(seen)[:, :, None, None]
    return np.logaddexp.reduce(np.where(hidden, EMPTY_LSE, scores), axis=-1)


@functools.cache
def compiled(backend: str):
    """Returns one jitted function per backend, so that tests of one shape share a compilation."""
    return jax.jit(lambda inputs: prefix_mass(**inputs, backend=backend))


def oracle(q, k_prefix, seen, lse=None, *, head_of=None, scale=None, extra=0) -> np.ndarray:
    """Returns the mass by explicit loops in numpy's float64, independent of the package.

    head_of, scale, extra (slots seen beyond `seen`) replace a rule by a wrong one.
    """
    q, k_prefix = (np.asarray(x, np.float64) for x in (q, k_prefix))
    batch, nodes, heads, size = q.shape
    kv_heads, slots = k_prefix.shape[1:3]
    head_of = head_of or (lambda head: head // (heads // kv_heads))
    scale = scale or 1 / np.sqrt(size)
    mass = np.zeros(k_prefix.shape[:3])
    for b in range(batch):
        for t in range(nodes):
            live = min(int(seen[b, t]) + extra, slots)
            for h in range(heads if live > 0 else 0):
                kv = head_of(h)
                scores = np.array([np.dot(q[b, t, h], k_prefix[b, kv, s]) for s in range(live)])
                scores = scores * scale
                total = np.log(np.exp(scores).sum()) if lse is None else float(lse[b, t, h])
                mass[b, kv, :live] += np.exp(scores - total)
    return mass


@every_backend
@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("has_lse", [True, False], ids=["lse given", "lse computed"])
def test_equals_loops_over_queries_and_slots(backend, group, has_lse, float64):
    inputs = make_inputs(Shape(3, 4, 1, 2, group, 8, 6), jnp.float64)
    inputs |= {} if has_lse else {"lse": None}
    mass = compiled(backend)(inputs)
    assert mass.dtype == jnp.float64
    assert relative_error(mass, oracle(**inputs)) < TOLERANCE["float64"]


@pytest.mark.parametrize(
    "wrong",
    [{"head_of": lambda head: head % 2}, {"scale": 1.0}, {"extra": 1}, {"extra": -1}],
    ids=["heads interleaved", "no scale", "one slot more", "one slot fewer"],
)
def test_a_wrong_rule_is_detected(wrong):
    inputs = make_inputs(SMALL, jnp.float32)
    inputs["lse"] = np.maximum(inputs["lse"], 0)  # EMPTY_LSE would make a slot too many infinite
    mass = compiled("reference")(inputs)
    assert relative_error(mass, oracle(**inputs, **wrong)) > 100 * TOLERANCE["float32"]


@fast_backends
@pytest.mark.parametrize(("shape", "dtype"), quick(CASES, *CASES[1:6:2], CASES[-2]), ids=str)
def test_equals_the_reference(backend, shape, dtype):
    for fill in (1.0, 0.3):
        inputs = make_inputs(shape, jnp.dtype(dtype), fill)
        for lse in (inputs["lse"], None):
            inputs["lse"] = lse
            mass = compiled(backend)(inputs)
            assert mass.dtype == jnp.float32
            assert relative_error(mass, compiled("reference")(inputs)) < TOLERANCE[dtype]


@every_backend
@pytest.mark.parametrize("has_lse", [True, False], ids=["lse given", "lse computed"])
@pytest.mark.parametrize("shape", quick(SHAPES, *SHAPES[1:6:2]), ids=str)
def test_unseen_slots_do_not_matter_and_get_zero(backend, shape, has_lse):
    inputs = make_inputs(shape, jnp.float32, fill=0.7)
    inputs |= {} if has_lse else {"lse": None}
    dead = np.arange(shape.slots) >= np.asarray(inputs["seen"]).max(1)[:, None]
    dead = np.broadcast_to(dead[:, None], inputs["k_prefix"].shape[:3])
    nan = np.float32(np.nan)
    poisoned = inputs | {"k_prefix": np.where(dead[..., None], nan, inputs["k_prefix"])}
    if has_lse:  # the log-sum-exp of a query that sees no slot does not matter either
        blind = (inputs["seen"] == 0)[..., None]
        poisoned["lse"] = np.where(blind, -np.float32(np.inf), inputs["lse"])
    mass = compiled(backend)(poisoned)
    np.testing.assert_array_equal(mass, compiled(backend)(inputs))
    assert dead.any() and (np.asarray(mass)[dead] == 0).all()


@every_backend
@pytest.mark.parametrize("nodes", [1, FEW_ROWS + 1])
def test_queries_that_see_no_slot_give_zeros(backend, nodes):
    inputs = make_inputs(Shape(2, nodes, 1, 1, 1, 8, 6), jnp.float32)
    inputs["seen"] = np.zeros_like(inputs["seen"])
    for lse in (np.full_like(inputs["lse"], EMPTY_LSE), None):
        mass = compiled(backend)(inputs | {"lse": lse})
        np.testing.assert_array_equal(mass, np.zeros((2, 1, 6), np.float32))


@every_backend
def test_a_cache_may_have_no_slots(backend):
    inputs = make_inputs(SMALL, jnp.float32)
    inputs["k_prefix"] = inputs["k_prefix"][:, :, :0]
    assert compiled(backend)(inputs).shape == (4, 2, 0)


@fast_backends
def test_runs_inside_shard_map(backend):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    specs = {"q": spec("data", None, "model"), "k_prefix": spec("data", "model")}
    specs |= {"seen": spec("data"), "lse": spec("data", None, "model")}
    for nodes, slots in ((64, 6), (5, LARGE * BLOCK)):  # with an lse, and without
        inputs = make_inputs(Shape(2, nodes, 1, 1, 1, 8, slots), jnp.float32)
        if slots > BLOCK:
            del inputs["lse"]
        mapped = jax.jit(
            jax.shard_map(
                lambda inputs: prefix_mass(**inputs, backend=backend),
                mesh=mesh,
                in_specs=({name: specs[name] for name in inputs},),
                out_specs=spec("data", "model"),
            )
        )
        assert relative_error(mapped(inputs), compiled(backend)(inputs)) < 1e-6


BAD = {
    "no batch axis": ({"q": (5, 6, 8)}, r"q has shape \(5, 6, 8\).*B, T, H, D"),
    "stacked caches": ({"k_prefix": (3, 4, 2, 6, 8)}, r"k_prefix has shape .*one layer"),
    "heads do not divide": ({"q": (4, 5, 5, 8)}, r"H=5 .*K=2.*multiple"),
    "other head size": ({"q": (4, 5, 6, 16)}, r"k_prefix has shape .*16"),
    "a length for each row": ({"seen": (4,)}, r"seen has shape \(4,\).*\[B, T\] = \(4, 5\)"),
    "heads first": ({"lse": (4, 6, 5)}, r"lse has shape .*\[B, T, H\] = \(4, 5, 6\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_shape_is_refused_before_compilation(case):
    inputs = make_inputs(SMALL, jnp.float32)
    changes, message = BAD[case]
    changed = {name: np.zeros(size, inputs[name].dtype) for name, size in changes.items()}
    with pytest.raises(ValueError, match=message):
        prefix_mass(**(inputs | changed))


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("q", jnp.int32, "q is int32.*floating"),
        ("k_prefix", jnp.bfloat16, "k_prefix is bfloat16 and q is float32.*cast"),
        ("seen", jnp.float32, "seen is float32.*integer"),
        ("lse", jnp.bfloat16, "lse is bfloat16.*must be float32.*return_lse"),
    ],
)
def test_a_wrong_dtype_is_refused_before_compilation(name, dtype, message):
    inputs = make_inputs(SMALL, jnp.float32)
    with pytest.raises(ValueError, match=message):
        prefix_mass(**(inputs | {name: inputs[name].astype(dtype)}))


def test_quantized_keys_and_unknown_backends_are_refused():
    inputs = make_inputs(SMALL, jnp.float32)
    with pytest.raises(ValueError, match=r"k_prefix is Quantized.*dequantize\(k_prefix"):
        prefix_mass(**(inputs | {"k_prefix": quantize(inputs["k_prefix"], 8)}))
    with pytest.raises(ValueError, match=r"'cuda'.*reference.*xla"):
        prefix_mass(**inputs, backend="cuda")
