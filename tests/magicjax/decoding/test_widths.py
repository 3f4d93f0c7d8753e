"""Speculative greedy text equals plain text bit for bit in all formats of the native kernels.

A round computes several nodes of several rows at once, plain decoding one token of each row. The
kernels give a row the same bits in any company, so not even ties differ.
"""

import dataclasses

import jax
import numpy as np
import pytest

import models
from magicjax.model import Model
from pallas_kernels.cpu import build
from tests.eight_devices import limit_memory_maps
from tests.fuzz import configurations
from tests.magicjax import keywords, tiny
from tests.quick import quick

pytestmark = pytest.mark.skipif(not build.is_default(), reason="needs the CPU kernels")

SHAPE = 4  # its groups are those of the kernels
SHAPES = {"windows": 5, "experts": 6}
FORMATS = ("bfloat16", "int8", "int4:32", "packed", "cache in int8", *SHAPES)
CONFIGURATIONS = [(form, number) for form in FORMATS for number in range(100)]


def in_bfloat16(model: Model) -> Model:
    module = models.build(model.config, "bfloat16")
    return dataclasses.replace(
        model, module=module, params=models.cast_params(model.params, "bfloat16")
    )


def outputs(form: str, number: int, **options):
    """Returns plain and speculative output of a random configuration."""
    rng = np.random.default_rng([number, 5])
    shape = SHAPES.get(form, SHAPE)
    target, is_quantized = in_bfloat16(configurations.model(shape, number)), form.startswith("int")
    if is_quantized:
        target = tiny.quantized(target, form)
    if form == "cache in int8":
        target = dataclasses.replace(target, kv_bits=8)
    if form == "packed":
        target, is_quantized = tiny.packed(target), True  # has no quantized copies
    drafter, tree = configurations.drafting_of(rng, shape, number, False, not is_quantized)
    drafter = jax.tree.map(
        lambda x: in_bfloat16(x) if isinstance(x, Model) else x,
        drafter,
        is_leaf=lambda x: isinstance(x, Model),
    )
    rows = int(rng.choice([1, 3, 5]))
    prompts = [rng.integers(0, 48, n).astype(np.int32) for n in rng.integers(1, 32, rows)]
    prompts[0] = np.resize(prompts[0], 32)  # one padded width
    options = dict(max_tokens=24, eos_token_id=[]) | options
    plain = keywords.generate(target, prompts, **options)
    return plain, keywords.generate(target, prompts, drafter=drafter, tree=tree, **options)


@pytest.mark.parametrize(
    ("form", "number"),
    quick(CONFIGURATIONS, ("packed", 2)),
)
def test_speculative_text_equals_plain_text_bit_for_bit(form, number):
    plain, speculative = outputs(form, number)
    assert plain.stats.attention_backend == "cpu"
    np.testing.assert_array_equal(speculative.tokens, plain.tokens)
    limit_memory_maps()


@pytest.mark.slow
def test_log_probabilities_are_equal_too():
    """The control: XLA's differ in their last bits, so equal ones say that the kernels ran."""
    for backend, equal in (("cpu", True), ("xla", False)):
        plain, speculative = outputs("bfloat16", 3, backend=backend, logprobs=0)
        pairs = zip(plain.logprobs, speculative.logprobs, strict=True)
        assert all((a.chosen == b.chosen).all() for a, b in pairs) == equal
