"""The attention backend: checked before compilation, used by all models, reported."""

import contextlib
import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax.decoding import validation
from pallas_kernels import attention, attention_check, device_check
from pallas_kernels.cpu import build
from pallas_kernels.mosaic_gpu import mosaic
from pallas_kernels.tpu import attention as tpu_attention
from tests.magicjax import keywords, tiny


@functools.cache
def wide(dtype: str, **changes) -> magicjax.Model:
    """Returns a model with heads of size 64, which the Hopper kernel supports."""
    module = models.build(tiny.config(**dict(head_dim=64, num_layers=1) | changes), dtype)
    return magicjax.Model(module, tiny.put(tiny.drawn(module.config, 0), dtype))


def generate(target, backend, **options):
    prompts = [np.arange(1, 21, dtype=np.int32), np.arange(5, 10, dtype=np.int32)]
    options = dict(max_tokens=5, eos_token_id=tiny.NEVER) | options
    return keywords.generate(target, prompts, backend=backend, **options)


@pytest.mark.slow
@pytest.mark.skipif(
    mosaic.interpreter_unsupported_reason() is not None,
    reason=str(mosaic.interpreter_unsupported_reason()),
)
def test_the_interpreted_kernel_gives_the_same_text_as_xla():
    target = wide("bfloat16")
    drafter = magicjax.SelfSpeculation("snapkv", 16, refresh_every=2)
    outputs = {
        backend: generate(target, backend, drafter=drafter, tree=magicjax.expansion((2, 1)))
        for backend in ("xla", "mosaic_interpreted")
    }
    xla, mosaic = outputs.values()
    np.testing.assert_array_equal(mosaic.tokens, xla.tokens)
    assert [o.stats.attention_backend for o in outputs.values()] == list(outputs)


LOOPS = {
    "greedy tree": dict(tree=magicjax.expansion((2, 1))),
    "sampled tree": dict(tree=magicjax.expansion((2, 1)), temperature=0.8, seed=3),
    "windows and caps": dict(
        config=dict(sliding_window=6, full_layers=(1,), attention_softcap=2.0, num_layers=2)
    ),
    "8 bits": dict(kv_dtype="int8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LOOPS)
def test_the_interpreted_kernel_for_tpus_gives_the_same_text_as_xla(case):
    options = dict(LOOPS[case])
    drafter = magicjax.SelfSpeculation(
        "snapkv", 16, refresh_every=2, kv_dtype=options.pop("kv_dtype", None)
    )
    target = wide("float32", **options.pop("config", {}))
    outputs = {
        backend: generate(target, backend, drafter=drafter, **options)
        for backend in ("xla", "tpu_interpreted")
    }
    xla, tpu = outputs.values()
    np.testing.assert_array_equal(tpu.tokens, xla.tokens)
    assert tpu.stats.acceptance_rate == xla.stats.acceptance_rate
    assert [o.stats.attention_backend for o in outputs.values()] == list(outputs)


@pytest.mark.parametrize(("error", "backend"), [(1.0, "tpu"), (1.1, "xla")], ids=["right", "wrong"])
def test_a_run_starts_with_the_kernel_that_is_right(error, backend, monkeypatch, tmp_path, caplog):
    """A stand-in for a TPU, whose kernel is interpreted; wrong, it is replaced before the run."""

    def kernel(*arguments, **options):
        out, lse = tpu_attention.attend(*arguments, **options, interpret=True)
        return out * error, lse

    device = types.SimpleNamespace(
        platform="tpu", device_kind="TPU v5 lite", client=jax.local_devices()[0].client
    )
    monkeypatch.setenv("MAGICJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(validation, "default_device", lambda: device)
    monkeypatch.setattr(jax, "default_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(attention_check, "CASES", attention_check.CASES[1:2])
    monkeypatch.setitem(attention.BACKENDS, "tpu", kernel)
    device_check._verdicts.clear()
    target = wide("float32")
    found = generate(target, None)
    device_check._verdicts.clear()
    np.testing.assert_array_equal(found.tokens, generate(target, "xla").tokens)
    assert found.stats.attention_backend == backend
    assert ("attention runs in XLA" in caplog.text) == (backend == "xla")


def test_the_device_is_that_of_the_mesh_or_of_the_weights(monkeypatch):
    monkeypatch.setattr(validation, "default_device", lambda: "default")
    target, (cpu, *_) = wide("float32"), jax.devices()
    assert validation._device(target, None) == "default"
    committed = dataclasses.replace(target, params=jax.device_put(target.params, cpu))
    assert validation._device(committed, None) == cpu
    mesh = types.SimpleNamespace(devices=np.array([["first", "second"]]))
    assert validation._device(committed, mesh) == "first"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="tests machines without a GPU")
def test_a_kernel_for_another_device_is_refused():
    default = "cpu" if build.is_default() else "xla"
    assert generate(wide("bfloat16"), None).stats.attention_backend == default
    with pytest.raises(ValueError, match="backend='mosaic' runs on NVIDIA Hopper GPUs .* is cpu"):
        generate(wide("bfloat16"), "mosaic")


def test_a_drafter_that_the_kernel_does_not_support_is_refused():
    target, small = wide("bfloat16"), tiny.model("near", "bfloat16")
    with pytest.raises(
        ValueError, match="supports head sizes 64, 128, 256, not 8; use backend='xla'"
    ):
        generate(target, "mosaic_interpreted", drafter=magicjax.SmallModel(small))
