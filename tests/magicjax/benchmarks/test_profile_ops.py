"""Profiles by operation class: small programs and traces, then real ones."""

import jax
import jax.numpy as jnp
import pytest

from magicjax.benchmarks import profile_ops

PROGRAM = """HloModule jit_decode, is_scheduled=true

%fused_product (a: f32[2,4]) -> f32[2,8] {
  ROOT %dot.1 = f32[2,8]{1,0} dot(%a, %b), metadata={op_name="jit(decode)/while/body/mlp/dot"}
}

%body (t: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %kernel.1 = (f32[8]{0}, f32[8]{0}) custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(decode)/while/body/score/tree_attention/mosaic"}
  %merge = f32[2,4]{1,0} fusion(%kernel.1), kind=kLoop, calls=%f, metadata={op_name="jit(decode)/while/body/score/tree_attention/mul"}
  %dot.7 = f32[2,4]{1,0} dot(%merge, %v), lhs_contracting_dims={1}
  %dot.8 = f32[2,4]{1,0} dot(%tokens, %v), lhs_contracting_dims={1}
  %gemm_fusion = f32[2,8]{1,0} fusion(%x), kind=kCustom, calls=%fused_product, metadata={op_name="jit(decode)/while/body/mlp/dot"}
  %custom-call.3 = f32[2,8]{1,0} custom-call(%x, %y), custom_call_target="__cublas$gemm", metadata={op_name="jit(decode)/while/body/unembed/dot"}
  %norm = f32[2,4]{1,0} fusion(%x), kind=kLoop, calls=%g, metadata={op_name="jit(decode)/while/body/norm/mul"}
}

ENTRY %main (p: f32[2,4]) -> f32[2,4] {
  %while.1 = (s32[], f32[2,4]{1,0}) while(%t), condition=%c, body=%body
}
"""  # noqa: E501

CLASSES = {
    "kernel.1": "attention",
    "merge": "attention",
    "dot.7": "attention",  # without a scope, but it reads an attention operation
    "dot.8": "matrix products",
    "gemm_fusion": "matrix products",
    "custom-call.3": "matrix products",
    "norm": "other",
    "while.1": None,
}


def test_operations_of_a_program_are_classified():
    found = profile_ops.class_of_operations(PROGRAM)
    assert {name: found[name] for name in CLASSES} == CLASSES


def meta(pid, name, tid=None):
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def ran(pid, tid, begin, length, name, **arguments):
    of_module = {"hlo_module": "jit_decode"} if arguments else {}
    times = {"ts": begin, "dur": length}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "args": arguments | of_module} | times


GPU = {
    "traceEvents": [
        meta(1, "/device:GPU:0"),
        meta(1, "Stream #7(Compute)", 7),
        meta(1, "XLA Ops", 8),
        meta(2, "/host:CPU"),
        meta(2, "python", 1),
        ran(2, 1, 0, 500, "while.1", hlo_op="while.1"),
        ran(1, 8, 100, 60, "merge", hlo_op="merge"),  # a duplicate by operation
        ran(1, 7, 100, 40, "mosaic_gpu_kernel", hlo_op="kernel.1"),
        ran(1, 7, 140, 10, "loop_multiply_fusion", hlo_op="merge"),
        ran(1, 7, 150, 30, "nvjet_sm90_tst", hlo_op="custom-call.3"),
        ran(1, 7, 200, 10, "loop_fusion", hlo_op="norm"),
        ran(1, 7, 215, 5, "MemcpyD2H"),
    ]
}


def test_gpu_kernels_are_summed_by_class_with_gaps():
    events = profile_ops.events_of(GPU, "jit_decode", on_cpu=False)
    assert events[0].kernel == "mosaic_gpu_kernel" and len(events) == 5
    found = profile_ops.summarize(events, profile_ops.class_of_operations(PROGRAM))
    microseconds = {name: round(1e6 * x) for name, x in found["seconds"].items()}
    assert microseconds == {
        "wall": 120,
        "busy": 95,
        "idle": 25,
        "longest gap": 20,
        "attention": 50,
        "matrix products": 30,
        "other": 15,
    }
    assert found["outside attention and products"] == pytest.approx((15 + 25) / 120)
    assert list(found["top other"]) == ["loop_fusion", "MemcpyD2H"]


def test_a_real_program_is_profiled():
    x = jnp.ones((256, 256))
    body = lambda i, x: jnp.tanh(x @ x)  # noqa: E731
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 20, body, x)).lower(x).compile()
    _, found = profile_ops.profile(program, lambda: program(x))
    assert found["seconds"]["matrix products"] > 0
    assert found["seconds"]["attention"] == 0
    assert 0 <= found["seconds"]["idle"] < found["seconds"]["wall"]
