"""The kernels for NVIDIA GPUs without a GPU: interpreted, lowered, and their configurations."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import attention_check, choose_backend, dequantize, quantize, tree_attention
from pallas_kernels.benchmarks.shapes import HOPPER_SHAPES, Shape
from pallas_kernels.benchmarks.validate import LSE_TOLERANCE, TOLERANCE
from pallas_kernels.mosaic_gpu import ampere, hopper, hopper_config, mosaic
from pallas_kernels.mosaic_gpu.hopper_config import Config
from tests.pallas_kernels.attention_cases import (
    MASKS,
    compiled,
    compiled_of_rows,
    edge_lengths,
    make_inputs,
    relative_error,
    seen_by_nobody,
    some_rows,
)
from tests.quick import quick

interpreted = pytest.mark.skipif(
    mosaic.interpreter_unsupported_reason() is not None,
    reason=str(mosaic.interpreter_unsupported_reason()),
)


def inputs_of(shape: Shape, kind: str = "random", dtype: str = "bfloat16") -> dict:
    inputs = make_inputs(shape, jnp.dtype(dtype), kind)
    return inputs | {"lengths": jnp.asarray(edge_lengths(shape, Config().block))}


def check(inputs: dict, backend: str = "mosaic_interpreted") -> jax.Array:
    """Returns the kernel's result; asserts that it is what the definition computes."""
    out, lse = jax.jit(lambda inputs: tree_attention(**inputs, return_lse=True, backend=backend))(
        inputs
    )
    expected, expected_lse = compiled("reference")(inputs)
    assert out.dtype == inputs["q"].dtype and lse.dtype == jnp.float32
    assert relative_error(out, expected) < TOLERANCE[inputs["q"].dtype.name]
    seen = ~seen_by_nobody(inputs)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=LSE_TOLERANCE)
    np.testing.assert_array_equal(lse[~seen], expected_lse[~seen])
    assert (np.asarray(out)[~seen] == 0).all()
    return out


SHAPES = [HOPPER_SHAPES[3]]  # many tokens
HOPPER_GRID = tuple(
    Shape(6, nodes, nodes, 1, group, head_dim, 165)
    for group in (1, 4, 5, 8)
    for nodes in (1, 5, 16, 33, 64)
    for head_dim in (64, 128)
)


@interpreted
@pytest.mark.parametrize("shape", quick(HOPPER_SHAPES, *SHAPES), ids=str)
def test_equals_the_reference(shape):
    check(inputs_of(shape))


AMPERE_SHAPES = [shape for shape in HOPPER_SHAPES if shape.head_dim <= 128]


@interpreted
@pytest.mark.parametrize(
    "shape", quick(AMPERE_SHAPES, AMPERE_SHAPES[3], AMPERE_SHAPES[-1]), ids=str
)
@pytest.mark.parametrize("dtype", quick(["bfloat16", "float16"], "bfloat16"))
def test_the_kernel_for_ampere_equals_the_reference(shape, dtype):
    check(inputs_of(shape, dtype=dtype), "mosaic_sm80_interpreted")


@interpreted
@pytest.mark.slow
def test_the_kernel_for_ampere_divides_the_prefix_of_a_larger_cache(monkeypatch):
    monkeypatch.setattr(mosaic, "choose_splits", lambda *sizes: 3)
    inputs = inputs_of(Shape(6, 17, 17, 1, 5, 64, 420))
    inputs |= {"lengths": jnp.asarray([0, 63, 64, 65, 400, 420], jnp.int32)}
    out = check(inputs, "mosaic_sm80_interpreted")
    rows, _ = compiled_of_rows("mosaic_sm80_interpreted")(some_rows(inputs, 1, 2), 1)
    np.testing.assert_array_equal(rows, out[1:3])


@interpreted
def test_a_block_too_few_of_the_kernel_for_ampere_is_detected(monkeypatch):
    make_part = ampere.make_part

    def short(*arguments):
        part = make_part(*arguments)
        skipped = jnp.minimum(part.prefix_blocks, 1)
        blocks = part.prefix_blocks - skipped, part.blocks - skipped
        return dataclasses.replace(part, prefix_blocks=blocks[0], blocks=blocks[1])

    monkeypatch.setattr(ampere, "make_part", short)
    with pytest.raises(AssertionError):
        check(inputs_of(AMPERE_SHAPES[3]), "mosaic_sm80_interpreted")


@interpreted
@pytest.mark.parametrize("kind", quick(MASKS[:2]))
def test_a_mask_may_be_shared_by_rows(kind):
    inputs = inputs_of(HOPPER_SHAPES[1], kind)
    check(inputs | {"mask": inputs["mask"][0]})


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", HOPPER_GRID, ids=str)
def test_equals_the_reference_on_every_shape(shape, kind):
    check(inputs_of(shape, kind))


CONFIGS = {
    "three splits": Config(splits=3),
    "as many splits as blocks": Config(splits=7, stages=2),
    "key groups": Config(key_groups=2, stages=6),
    "key groups and splits": Config(splits=2, key_groups=2),
    "two tiles": Config(row_groups=2),
    "two tiles and splits": Config(splits=3, row_groups=2, stages=2),
    "wide blocks": Config(splits=2, block=128, stages=2),
}


@interpreted
@pytest.mark.parametrize("name", quick(CONFIGS))
def test_every_config_gives_the_same_result(name, monkeypatch):
    monkeypatch.setattr(mosaic, "choose_config", lambda *sizes: CONFIGS[name])
    shape = Shape(6, 17, 17, 1, 5, 64, 420)
    inputs = inputs_of(shape)
    check(inputs | {"lengths": jnp.asarray([0, 63, 64, 65, 400, 420], jnp.int32)})


@interpreted
@pytest.mark.parametrize("bits", quick([None, 8]))
def test_first_row_selects_rows_of_a_larger_cache(bits):
    inputs = inputs_of(Shape(4, 17, 17, 1, 5, 64, 165))
    inputs = quantized(inputs) if bits else inputs
    out, _ = compiled("mosaic_interpreted")(inputs)
    rows, _ = compiled_of_rows("mosaic_interpreted")(some_rows(inputs, 1, 2), 1)
    np.testing.assert_array_equal(rows, out[1:3])


@pytest.mark.slow
@interpreted
def test_dead_slots_do_not_matter():
    inputs = inputs_of(HOPPER_SHAPES[1])
    dead = jnp.arange(inputs["k_prefix"].shape[2]) >= inputs["lengths"][:, None]
    dead = dead[:, None, :, None]
    huge = jnp.asarray(3e38, jnp.bfloat16)
    poisoned = inputs | {
        "k_prefix": jnp.where(dead, jnp.nan, inputs["k_prefix"]),
        "v_prefix": jnp.where(dead, huge, inputs["v_prefix"]),
    }
    pairs = (compiled("mosaic_interpreted")(x) for x in (inputs, poisoned))
    for clean, dirty in zip(*pairs, strict=True):
        np.testing.assert_array_equal(clean, dirty)


def quantized(inputs: dict, bits: int = 8) -> dict:
    return inputs | {name: quantize(inputs[name], bits) for name in ("k_prefix", "v_prefix")}


# 8-bit integers are exact in bf16 and scales stay in float32, so only weights (times a scale) and
# results are rounded, as without quantization. The same bound holds.
@interpreted
@pytest.mark.parametrize(
    "shape", quick([HOPPER_SHAPES[i] for i in (0, 1, 3, 5)], HOPPER_SHAPES[3]), ids=str
)
def test_8_bits_equal_the_reference_on_the_same_integers(shape):
    check(quantized(inputs_of(shape)))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("shape", HOPPER_GRID, ids=str)
def test_8_bits_equal_the_reference_on_every_shape(shape):
    check(quantized(inputs_of(shape)))


@pytest.mark.slow
@interpreted
def test_swapped_scales_are_detected(monkeypatch):
    flash = hopper.flash

    def swapped(q, k, v, *rest):
        k, v = (dataclasses.replace(x, scales=y.scales) for x, y in ((k, v), (v, k)))
        return flash(q, k, v, *rest)

    inputs = quantized(inputs_of(HOPPER_SHAPES[1]))
    monkeypatch.setattr(hopper, "flash", swapped)
    with pytest.raises(AssertionError):
        check(inputs)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("index", "dtype", "bits"), [(1, "bfloat16", 4), (1, "float16", 8), (4, "bfloat16", 8)]
)
def test_unsupported_quantized_caches_are_dequantized_first(index, dtype, bits):
    inputs = inputs_of(HOPPER_SHAPES[index], dtype=dtype)
    integers = quantized(inputs, bits)
    plain = {name: dequantize(integers[name], dtype) for name in ("k_prefix", "v_prefix")}
    pairs = (compiled("mosaic_interpreted")(x) for x in (integers, inputs | plain))
    for out, expected in zip(*pairs, strict=True):
        np.testing.assert_array_equal(out, expected)


RACING = {
    "plain decoding": (HOPPER_SHAPES[0], {"splits": 2, "key_groups": 2, "stages": 2}),
    "a chain": (HOPPER_SHAPES[1], {"key_groups": 2, "stages": 2}),
    "a tree": (HOPPER_SHAPES[3], {"row_groups": 2, "stages": 2}),
    "shared columns": (HOPPER_SHAPES[4], {"stages": 2}),
}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hopper", "ampere"])
def test_a_right_kernel_passes_the_self_check(name, monkeypatch):
    kernel = {"hopper": mosaic.attend, "ampere": mosaic.attend_sm80}[name]
    chunk = ("prompt chunk", 2, 1160, 1, 45, 1)  # the interpreter is slow
    monkeypatch.setattr(attention_check, "CASES", [*attention_check.CASES[:2], chunk])
    attend = functools.partial(kernel, interpreted=True)
    assert attention_check.mismatch(attend, jnp.bfloat16, 64) is None

    def wrong(*arguments):
        out, lse = attend(*arguments)
        return out * 1.05, lse

    message = attention_check.mismatch(wrong, jnp.bfloat16, 64)
    assert message is not None and message.startswith("tree_attention, decoding in bfloat16, out")


@interpreted
@pytest.mark.parametrize("name", quick(["hopper", "ampere"], "ampere"))
@pytest.mark.slow
def test_the_self_check_divides_a_prefix(name, monkeypatch):
    """Each split reads the first part of the prefix: equal without splits, and detected."""
    kernels = {"hopper": (hopper, mosaic.attend), "ampere": (ampere, mosaic.attend_sm80)}
    module, kernel = kernels[name]
    make_part = module.make_part

    def first_part(*arguments):
        part = make_part(*arguments)
        return dataclasses.replace(part, begin=part.begin * 0, end=part.end - part.begin)

    monkeypatch.setattr(module, "make_part", first_part)
    monkeypatch.setattr(attention_check, "CASES", attention_check.CASES[:1])
    attend = functools.partial(kernel, interpreted=True)
    message = attention_check.mismatch(attend, jnp.bfloat16, 64)
    assert message is not None and message.startswith("tree_attention, decoding in bfloat16, out")


def run_detecting_races(monkeypatch, inputs: dict, **config) -> None:
    monkeypatch.setattr(mosaic, "choose_config", lambda *sizes: Config(**config))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        check(inputs, backend="mosaic")


@interpreted
@pytest.mark.parametrize("kind", quick(RACING, "a tree"))
def test_there_are_no_races(kind, monkeypatch):
    shape, config = RACING[kind]
    run_detecting_races(monkeypatch, inputs_of(shape), **config)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("groups", quick(["key_groups", "row_groups"], "key_groups"))
def test_there_are_no_races_with_8_bits(groups, monkeypatch):
    shape = Shape(2, 70, 70, 1, 1, 64, 330)  # 70 new tokens: two blocks, and two tiles of rows
    inputs = quantized(inputs_of(shape))
    run_detecting_races(monkeypatch, inputs, stages=2, **{groups: 2})


@pytest.mark.slow
@interpreted
def test_a_producer_that_does_not_wait_is_detected(monkeypatch):
    load_blocks = hopper._load_blocks

    def hasty(*arguments):
        with monkeypatch.context() as patched:
            patched.setattr(plgpu, "barrier_wait", lambda barrier: None)
            load_blocks(*arguments)

    monkeypatch.setattr(hopper, "_load_blocks", hasty)
    with pytest.raises(jax.errors.JaxRuntimeError, match="check_write"):
        inputs = inputs_of(Shape(6, 1, 1, 1, 1, 64, 600))
        run_detecting_races(monkeypatch, inputs, key_groups=2, stages=2)


def lowered(shape: Shape, bits: int | None = None) -> str:
    """Returns the module for the CUDA compiler, lowered on any machine."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    call = jax.jit(functools.partial(tree_attention, backend="mosaic"))
    inputs = inputs_of(shape) if bits is None else quantized(inputs_of(shape), bits)
    names = ("q", "k_prefix", "v_prefix", "lengths", "k_new", "v_new", "mask")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = export.export(
            call,
            platforms=["cuda"],
            disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
        )(*(inputs[name] for name in names))
    return exported.mlir_module()


@pytest.mark.parametrize("shape", [HOPPER_SHAPES[i] for i in (0, 3, 4)], ids=str)
def test_lowers_for_cuda_without_a_gpu(shape):
    assert "mosaic_gpu" in lowered(shape)


@pytest.mark.parametrize(
    "shape", quick([HOPPER_SHAPES[i] for i in (0, 1, 3)], HOPPER_SHAPES[0]), ids=str
)
def test_only_4_bits_are_dequantized_before_the_kernel(shape):
    """With 8 bits the program has no 16-bit array of the size of the prefix."""
    slots = -(-shape.slots // 8) * 8
    prefix = f"tensor<{shape.batch}x{shape.kv_heads}x{slots}x{shape.head_dim}xbf16>"
    assert prefix not in lowered(shape, 8)
    assert prefix in lowered(shape, 4)


SIZES = [
    (heads, rows, slots, head_dim)
    for heads in (1, 8, 128, 1024)
    for rows in (1, 4, 64, 65, 512, 4096)
    for slots in (1, 64, 8192, 131072)
    for head_dim in mosaic.HOPPER.head_dims
]


def test_every_chosen_config_fits_the_device():
    for (*sizes, slots, head_dim), quantized in itertools.product(SIZES, (False, True)):
        if quantized and head_dim > hopper_config.WIDEST:
            continue
        config = hopper_config.choose_config(*sizes, slots, head_dim, 132, quantized)
        assert config.shared_bytes(head_dim, quantized) <= hopper_config.SHARED_BYTES
        assert config.groups(head_dim) < hopper_config.WARPGROUPS
        assert config.stages >= 2 and config.splits >= 1
        assert config.splits == 1 or slots // config.splits >= config.block


def test_an_invalid_config_is_refused():
    with pytest.raises(ValueError, match="stages=3 must be a multiple of key_groups=2"):
        Config(stages=3, key_groups=2)
    with pytest.raises(ValueError, match="block=96 must be a multiple of 64"):
        Config(block=96)


CPU, HOPPER = (
    types.SimpleNamespace(device_kind="cpu"),
    types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0"),
)
A100 = types.SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "device", "message"),
    [
        ("float32", 128, HOPPER, "supports bfloat16 and float16, not float32; use backend='xla'"),
        ("bfloat16", 96, HOPPER, "supports head sizes 64, 128, 256, not 96; use backend='xla'"),
        (
            "bfloat16",
            128,
            A100,
            r"runs on NVIDIA Hopper .*9\.x.* and this device is NVIDIA A100; use",
        ),
        (
            "bfloat16",
            128,
            CPU,
            "runs on .* and this device is cpu; use backend='xla', or omit backend",
        ),
    ],
)
def test_an_unsupported_call_is_refused(dtype, head_dim, device, message):
    with pytest.raises(ValueError, match=f"backend='mosaic' {message}"):
        choose_backend("mosaic", jnp.dtype(dtype), head_dim, device)


@interpreted
def test_too_few_threads_are_an_error_instead_of_a_deadlock(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(ValueError, match="needs 8 XLA threads, and there are 2: set NPROC=8"):
        choose_backend("mosaic_interpreted")
