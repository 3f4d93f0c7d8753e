"""The validation of a backend on tiny sizes: it passes correct results and no others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.benchmarks import validate
from pallas_kernels.benchmarks.shapes import Shape

CASE = validate.Case(Shape(4, 3, 3, 2, 2, 64, 96), "bfloat16")
LENGTHS = np.array([96, 0, 1, 64], np.int32)


@pytest.mark.parametrize("bits", [0, 8])
def test_a_correct_backend_passes(bits):
    case = validate.Case(CASE.shape, CASE.dtype, bits)
    result = validate.errors(case, "xla", LENGTHS)
    assert validate.passed(case, result), result
    assert 0 < result["error"] and result["bytes filled with NaN"] > 0


def _one_slot_less(inputs, out, lse):
    lengths = jnp.maximum(inputs["lengths"] - 1, 0)
    return right(**inputs | {"lengths": lengths}, return_lse=True)


def _mask_of_the_first_row(inputs, out, lse):
    mask = jnp.broadcast_to(inputs["mask"][:1], inputs["mask"].shape)
    return right(**inputs | {"mask": mask}, return_lse=True)


WRONG = {
    "one slot fewer": (_one_slot_less, "error"),
    "the mask of another row": (_mask_of_the_first_row, "error"),
    "an unwritten result": (lambda i, out, lse: (out.at[0, 0, 0, 0].set(jnp.nan), lse), "error"),
    "an empty row that is not zero": (
        lambda i, out, lse: (out.at[1, 0].set(1.0), lse),
        "not empty",
    ),
    "a log-sum-exp in powers of two": (lambda i, out, lse: (out, lse * 1.44), "lse error"),
}
right = validate.tree_attention


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_backend_fails(kind, monkeypatch):
    change, detected_by = WRONG[kind]

    def wrong(*, backend, **inputs):
        options = {"return_lse": inputs.pop("return_lse")}
        result = right(**inputs, **options, backend=backend)
        return result if backend == "reference" else change(inputs, *result)

    monkeypatch.setattr(validate, "tree_attention", wrong)
    validate._row.clear_cache()
    result = validate.errors(CASE, "xla", LENGTHS)
    assert not validate.passed(CASE, result)
    good = validate.errors(CASE, "reference", LENGTHS)
    assert not result[detected_by] <= 10 * good[detected_by]


def test_results_that_change_between_calls_fail(monkeypatch):
    calls = iter(range(100))

    def changing(*, backend, **inputs):
        out, lse = right(**inputs, backend=backend)
        if backend == "reference":
            return out, lse
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        noise = jax.pure_callback(lambda: np.float32(1e-7 * next(calls)), scalar)
        return out, lse + noise

    monkeypatch.setattr(validate, "tree_attention", changing)
    result = validate.errors(CASE, "xla", LENGTHS)
    assert result["changed"] and not validate.passed(CASE, result)


def test_the_command_writes_results_and_returns_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(validate, "cases", lambda small: [CASE])
    path = tmp_path / "check.json"
    assert validate.main(["--backend", "xla", "--small", "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["passed"] and all(row["passed"] for row in content["rows"])
    assert capsys.readouterr().out.count("pass  ") == len(content["rows"]) == 2
    monkeypatch.setattr(validate, "TOLERANCE", {"bfloat16": 0.0})
    assert validate.main(["--backend", "xla", "--out", str(path)]) == 1
    assert not json.loads(path.read_text())["passed"]
