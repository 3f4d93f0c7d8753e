"""The kernel for TPUs without a TPU: races, tiles, lowering, configurations, and the self-check.

`test_attention` and `test_windows` compare it with the reference.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import types

import jax
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import (
    attention,
    attention_check,
    choose_backend,
    device_check,
    quantize,
    tree_attention,
)
from pallas_kernels.benchmarks.shapes import Shape
from pallas_kernels.tpu import attention as tpu_attention
from pallas_kernels.tpu import config, flash
from tests.pallas_kernels import test_windows
from tests.pallas_kernels.attention_cases import compiled, make_inputs, relative_error
from tests.quick import quick

LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}


def check(inputs: dict, backend: str = "tpu_interpreted") -> None:
    """Asserts that the kernel computes what the definition does."""
    out, lse = jax.jit(lambda x: tree_attention(**x, return_lse=True, backend=backend))(inputs)
    expected, expected_lse = compiled("reference")(inputs)
    limit = LIMIT[inputs["q"].dtype.name]
    assert relative_error(out, expected) < limit
    np.testing.assert_allclose(jnp.maximum(lse, -100), jnp.maximum(expected_lse, -100), atol=limit)


def quantized(inputs: dict, bits: int = 8) -> dict:
    return inputs | {name: quantize(inputs[name], bits) for name in ("k_prefix", "v_prefix")}


TILED = Shape(2, 40, 40, 2, 3, 64, 300)  # 120 rows for each of 2 KV heads


TILES = [(dtype, bits) for dtype in ("float32", "bfloat16") for bits in (None, 8, 4)]


@pytest.mark.parametrize(("dtype", "bits"), quick(TILES, ("bfloat16", 8)))
def test_tiles_of_rows_and_blocks_of_keys_give_the_same_result(dtype, bits, monkeypatch):
    small = config.Config(rows=32, block=128, new_block=16)
    monkeypatch.setattr(tpu_attention, "choose_config", lambda *sizes: small)
    inputs = make_inputs(TILED, jnp.dtype(dtype))
    check(quantized(inputs, bits) if bits else inputs)


RACING = {
    "decoding": lambda: make_inputs(Shape(4, 1, 1, 2, 4, 128, 300), jnp.bfloat16),
    "a tree": lambda: make_inputs(TILED, jnp.float32),
    "8 bits": lambda: quantized(make_inputs(TILED, jnp.float32)),
    "a ring": lambda: test_windows.inputs_of(*test_windows.CASES["ring"]),
}


raises_races = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before JAX 0.12 a race is printed only"
)


def run_detecting_races(monkeypatch, inputs: dict) -> None:
    monkeypatch.setattr(
        tpu_attention,
        "choose_config",
        lambda *sizes: config.Config(rows=64, block=128, new_block=16),
    )
    parameters = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(parameters):
        check(inputs, "tpu")


@raises_races
@pytest.mark.parametrize("kind", quick(RACING, "a tree"))
def test_there_are_no_races(kind, monkeypatch):
    run_detecting_races(monkeypatch, RACING[kind]())


@raises_races
def test_two_cores_that_write_the_same_rows_are_a_race(monkeypatch):
    monkeypatch.setattr(flash._Grid, "query_index", lambda self, row, tile, *_: (0, 0, tile, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Rr]ace"):
        run_detecting_races(monkeypatch, RACING["a tree"]())


KINDS = ("TPU v5 lite", "TPU v6 lite", "TPU7x")


def lowered(shape: Shape, dtype: str, kind: str, bits: int | None = None) -> str:
    """Returns the module for the TPU compiler, lowered on any machine."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    inputs = make_inputs(shape, jnp.dtype(dtype))
    inputs = quantized(inputs, bits) if bits else inputs
    call = jax.jit(functools.partial(tree_attention, backend="tpu"))
    names = ("q", "k_prefix", "v_prefix", "lengths", "k_new", "v_new", "mask")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        exported = export.export(call, platforms=["tpu"])(*(shapes[name] for name in names))
    return exported.mlir_module()


FULL = [
    (Shape(2, 1, 1, 8, 4, 128, 4096), "bfloat16"),
    (Shape(1, 256, 256, 8, 4, 128, 8192), "bfloat16"),  # a wide tree
    (Shape(2, 5, 5, 3, 3, 64, 1000), "float32"),
]


@pytest.mark.parametrize("kind", quick(KINDS))
@pytest.mark.parametrize(("shape", "dtype"), FULL, ids=str)
def test_lowers_without_a_tpu(shape, dtype, kind):
    assert "tpu_custom_call" in lowered(shape, dtype, kind)


def test_only_4_bits_are_dequantized_before_the_kernel():
    shape = Shape(2, 5, 5, 2, 4, 128, 1024)
    assert "tensor<2x2x1024x128xbf16>" not in lowered(shape, "bfloat16", KINDS[0], 8)
    assert "tensor<2x2x1024x128xbf16>" in lowered(shape, "bfloat16", KINDS[0], 4)


def test_configs_fit_in_vmem_and_read_the_prefix_once_for_wide_trees():
    heads, rows, new = (1, 3, 8, 32), (1, 20, 512, 4096), (1, 64, 512, 4096)
    for sizes in itertools.product(heads, rows, new, (1, 600, 131072), (64, 128, 256), (2, 4)):
        chosen = config.choose_config(*sizes)
        assert chosen.vmem_bytes(sizes[0], sizes[4], sizes[5]) <= config.VMEM_BUDGET, sizes
        assert chosen.block == sizes[3] or chosen.block % config.LANES == 0
        assert chosen.rows % 16 == chosen.new_block % 16 == 0
    assert config.choose_config(8, 256 * 4, 256, 32768, 128, 2).rows == 1024


CLIENT = types.SimpleNamespace(platform_version="1")
V5E = types.SimpleNamespace(device_kind="TPU v5 lite", platform="tpu", client=CLIENT)
V3 = types.SimpleNamespace(device_kind="TPU v3", platform="tpu")
GPU = functools.partial(types.SimpleNamespace, platform="gpu", client=CLIENT)
H100 = GPU(device_kind="NVIDIA H100", compute_capability="9.0")
AMD = GPU(device_kind="AMD", compute_capability="gfx942")
T4 = GPU(device_kind="Tesla T4", compute_capability="7.5")
A100 = GPU(device_kind="NVIDIA A100", compute_capability="8.0")


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        ("float16", V5E, "supports bfloat16 and float32, not float16; use backend='xla'"),
        ("bfloat16", V3, "runs on TPUs from v5 on, and this device is TPU v3"),
        ("bfloat16", A100, "runs on TPUs from v5 on, and this device is NVIDIA A100"),
    ],
)
def test_an_unsupported_call_is_refused(dtype, device, message):
    with pytest.raises(ValueError, match=f"backend='tpu' {message}"):
        choose_backend("tpu", jnp.dtype(dtype), 128, device)


# The default, and the self-check that it depends on.


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Returns a function that replaces the kernel for TPUs, with an empty cache of verdicts."""
    monkeypatch.setenv("MAGICJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(attention_check, "CASES", attention_check.CASES[1:2])
    monkeypatch.setattr(jax, "default_device", lambda device: contextlib.nullcontext())

    def replace(attend):
        monkeypatch.setitem(attention.BACKENDS, "tpu", attend)
        device_check._verdicts.clear()

    yield replace
    device_check._verdicts.clear()


right = functools.partial(tpu_attention.attend, interpret=True)


def wrong(*arguments, **options):
    out, lse = right(*arguments, **options)
    return out.at[:, -1].multiply(1.1), lse


def crashes(*arguments, **options):
    raise RuntimeError("INTERNAL: the compiler failed")


def default(device=V5E, dtype="bfloat16", head_dim=64) -> str:
    return choose_backend(None, jnp.dtype(dtype), head_dim, device)


@pytest.mark.slow
def test_the_default_is_the_kernel_of_the_device(stand_in, monkeypatch):
    stand_in(right)
    assert default() == "tpu"
    assert default(dtype="float16") == default(V3) == default(T4) == default(AMD) == "xla"
    assert choose_backend(None, device=V5E) == "xla"  # what it computes is not known
    monkeypatch.setitem(attention.BACKENDS, "mosaic", right)
    assert default(H100) == "mosaic" and default(H100, head_dim=96) == "xla"
    monkeypatch.setitem(attention.BACKENDS, "mosaic_sm80", right)
    assert default(A100) == "mosaic_sm80" and default(A100, head_dim=256) == "xla"
    monkeypatch.setenv("MAGICJAX_BACKEND", "reference")
    assert default() == "reference"
    monkeypatch.setenv("MAGICJAX_BACKEND", "mosaic")
    with pytest.raises(ValueError, match="^MAGICJAX_BACKEND='mosaic' runs .*, or unset MAGIC"):
        default()


def test_a_wrong_kernel_is_replaced_and_remembered(stand_in, caplog, tmp_path):
    stand_in(wrong)
    with caplog.at_level(logging.WARNING):
        assert default() == default() == "xla"
    (record,) = caplog.records
    message = "tree_attention, tree in bfloat16, out: relative error"
    assert f"attention runs in XLA, not in the kernel 'tpu': {message}" in record.getMessage()
    stand_in(right)  # the verdict is stored
    assert default() == "xla"
    (file,) = (tmp_path / "kernels").glob("tpu-*.checked")
    file.unlink()
    device_check._verdicts.clear()
    assert default() == "tpu"


def test_an_error_of_the_check_is_not_remembered(stand_in, caplog):
    stand_in(crashes)
    assert default() == "xla"
    assert "its self-check failed: RuntimeError: INTERNAL: the compiler failed" in caplog.text
    stand_in(right)
    assert default() == "tpu"


def test_threads_wait_for_one_check(stand_in):
    stand_in(right)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: default(), range(3))) == {"tpu"}


def test_processes_of_one_run_use_xla(stand_in, monkeypatch):
    stand_in(right)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert default() == "xla"


def test_a_check_that_did_not_finish_is_not_repeated(stand_in, caplog, tmp_path):
    stand_in(right)
    assert default() == "tpu"
    (file,) = (tmp_path / "kernels").glob("tpu-*.checked")
    file.write_text(f"{device_check.RUNNING}{2**22 + 1}")  # no such process
    device_check._verdicts.clear()
    assert default() == "xla"
    assert "its self-check did not finish" in caplog.text


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("prefix_index", lambda row, _, block, end: (row, 0, block * 0, end)),
        ("query_index", lambda row, _, tile, end: (row, 0, tile * 0, end)),
    ],
)
def test_the_self_check_reaches_all_blocks(method, mistake, monkeypatch):
    right_block = getattr(flash._Grid, method)
    monkeypatch.setattr(flash._Grid, method, lambda *each: mistake(*right_block(*each)))
    assert attention_check.mismatch(right, jnp.bfloat16, 64) is not None


def test_the_kernel_is_chosen_only_where_the_device_is_known(stand_in, monkeypatch):
    """Elsewhere it may be differentiated, or partitioned automatically."""
    stand_in(crashes)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choose_backend(None, jnp.dtype("bfloat16"), 64) == "xla"


def test_the_default_device_is_that_of_jax(monkeypatch):
    (cpu, *_) = jax.local_devices(backend="cpu")
    by_backend = {None: [V5E], "cpu": [cpu]}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: by_backend[backend])
    assert device_check.default_device() is V5E
    for device in (cpu, "cpu"):
        with jax.default_device(device):
            assert device_check.default_device() is cpu
