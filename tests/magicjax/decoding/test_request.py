"""Requests: one set of options, validation on the host, placement on the devices."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax.decoding.request import RequestOptions, place, prepare, validate
from sharding import abstract_mesh
from tests.magicjax import tiny

PROMPTS = [[1, 2], [3]]
OPTIONS = dict(max_new_tokens=[3, 4], do_sample=True, top_p=0.9)


def arrays(request):
    return request.tokens, request.lengths, request.limits, request.eos


def test_generate_and_stream_take_the_options_that_are_validated():
    fields = {field.name: field.default for field in dataclasses.fields(RequestOptions)}
    for call in (magicjax.generate, magicjax.stream):
        _, _, *keywords = inspect.signature(call).parameters.values()
        assert {keyword.name: keyword.default for keyword in keywords} == fields


def test_a_target_without_weights_is_validated_on_the_host():
    skeleton = magicjax.Model(models.build(tiny.config()), None)
    for request in (
        validate(skeleton, PROMPTS, RequestOptions(**OPTIONS)),
        prepare(skeleton, PROMPTS, **OPTIONS),
    ):
        assert all(type(array) is np.ndarray for array in arrays(request))
        assert request.tokens.tolist() == [[1, 2] + [0] * 14, [3] + [0] * 15]


def test_a_copy_is_validated_for_the_mesh_before_the_target_has_weights():
    skeleton = dataclasses.replace(tiny.model(), params=None)
    drafter = magicjax.QuantizedCopy(weights="int4:8")
    prepare(skeleton, PROMPTS, drafter=drafter)
    with pytest.raises(ValueError, match="groups of 8 do not divide the 20 inputs of mlp/down on"):
        prepare(skeleton, PROMPTS, drafter=drafter, mesh=abstract_mesh(model=2))


def test_placed_arrays_equal_the_validated_ones():
    request = validate(tiny.model(), PROMPTS, RequestOptions(**OPTIONS))
    placed = place(request)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed.sampling))
    for array, on_device in zip(arrays(request), arrays(placed), strict=True):
        assert isinstance(on_device, jax.Array) and on_device.dtype == array.dtype
        np.testing.assert_array_equal(array, on_device)
