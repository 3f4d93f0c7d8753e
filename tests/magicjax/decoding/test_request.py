"""Requests: one set of options, validation on the host, placement on the devices."""

import dataclasses
import inspect
import types

import jax
import numpy as np
import pytest
import transformers

import magicjax
import models
from magicjax import loading
from magicjax.decoding.preparation import place, prepare, validated_request
from magicjax.decoding.request import RequestOptions
from magicjax.parallel.layouts import Resident
from magicjax.sources import Source
from magicjax.verification.sampling import row_keys
from sharding import abstract_mesh
from tests.magicjax import small_tokenizers, tiny
from tests.magicjax.grammars import spelled

PROMPTS = [[1, 2], [3]]
PARAMS = [magicjax.SamplingParams(temperature=1, top_p=0.9, max_tokens=n) for n in (3, 4)]


def arrays(request):
    rows = request.rows
    return rows.tokens, rows.lengths, rows.limits, rows.eos


def test_generate_and_stream_take_the_options_that_are_validated():
    fields = {field.name: field.default for field in dataclasses.fields(RequestOptions)}
    for call in (magicjax.generate, magicjax.stream):
        _, _, _, *keywords = inspect.signature(call).parameters.values()
        assert {keyword.name: keyword.default for keyword in keywords} == fields


def test_a_target_without_weights_is_validated_on_the_host():
    abstract_model = magicjax.Model(models.build(tiny.config()), None)
    request = validated_request(abstract_model, PROMPTS, PARAMS)
    assert all(type(array) is np.ndarray for array in arrays(request))
    assert request.rows.tokens.tolist() == [[1, 2] + [0] * 14, [3] + [0] * 15]
    assert request.rows.limits.tolist() == [3, 4]


def test_weights_are_loaded_after_validation():
    abstract_model = loading.abstract_model("opt-125m", "float32")
    loaded = []
    lazy = dataclasses.replace(
        abstract_model, load=lambda **options: loaded.append(options) or tiny.model()
    )
    with pytest.raises(ValueError, match="shorten the prompt"):
        prepare(lazy, [[0] * 4096])
    assert not loaded
    assert prepare(lazy, PROMPTS).target.params is tiny.model().params
    assert loaded == [dict(mesh=None, stages=None)]


def test_a_preset_keeps_the_tokenizer_that_it_was_given(monkeypatch):
    monkeypatch.setattr(loading, "_initialized", lambda *_: ({}, Resident()))
    source = Source("opt-125m", "experiments/zoo/target")
    abstract_model = loading.abstract_model(source, "float32")
    assert loading.with_weights(abstract_model).tokenizer is source.tokenizer is not None
    other = types.SimpleNamespace(get_vocab=dict)
    replaced = dataclasses.replace(abstract_model, tokenizer=other)
    assert loading.with_weights(replaced).tokenizer is other


def test_a_copy_is_validated_for_the_mesh_before_the_target_has_weights():
    abstract_model = dataclasses.replace(tiny.model(), params=None)
    options = RequestOptions(drafter=magicjax.FullCacheSpeculation(weights="int4:8"))
    validated_request(abstract_model, PROMPTS, options=options)
    options = dataclasses.replace(options, mesh=abstract_mesh(model=2))
    with pytest.raises(ValueError, match="groups of 8 do not divide the 20 inputs of mlp/down on"):
        validated_request(abstract_model, PROMPTS, options=options)


def test_each_row_has_its_parameters():
    """Greedy rows keep the most likely token, and the keys depend on a row's seed and index."""
    params = [
        magicjax.SamplingParams(),
        magicjax.SamplingParams(temperature=0.5, top_k=7, seed=3),
        magicjax.SamplingParams(temperature=0.5, seed=3, logprobs=2, stop="a"),
    ]
    sampling = validated_request(spelled.target(), PROMPTS + [[4]], params).rows.sampling
    assert sampling.temperature.tolist() == [1.0, 0.5, 0.5]
    assert sampling.top_k.tolist() == [1, 7, 0]
    for row, seed in enumerate((0, 3, 3)):
        (key,) = row_keys(seed, np.array([row]))
        assert (jax.random.key_data(sampling.keys[row]) == jax.random.key_data(key)).all()
    assert validated_request(tiny.model(), PROMPTS, [params[0]] * 2).rows.sampling is None


def test_a_row_gets_the_log_probabilities_that_it_requested():
    params = [magicjax.SamplingParams(max_tokens=3, logprobs=n) for n in (None, 0, 2)]
    output = magicjax.generate(tiny.model(), tiny.prompts(3), params)
    none, chosen, two = output.logprobs
    assert none is None and chosen.top.shape == (3, 0) and two.top.shape == (3, 2)


ENCODED = {
    "left": ([[9, 1, 2], [4, 5, 6]], [[0, 1, 1], [1, 1, 1]]),
    "right": ([[1, 2, 9], [4, 5, 6]], [[1, 1, 0], [1, 1, 1]]),
    "none": ([[1, 2], [4, 5, 6]], None),
}


@pytest.mark.parametrize("padding", ENCODED)
def test_the_result_of_a_tokenizer_is_read_without_its_padding(padding):
    ids, mask = ENCODED[padding]
    for kind in (list,) if mask is None else (list, np.array):
        masks = {} if mask is None else {"attention_mask": kind(mask)}
        encoding = transformers.BatchEncoding({"input_ids": kind(ids)} | masks)
        request = validated_request(tiny.model(), encoding)
        assert [row.tolist() for row in request.prompts] == [[1, 2], [4, 5, 6]]
    one = validated_request(
        tiny.model(), [{"input_ids": [9, 1, 2], "attention_mask": [0, 1, 1]}, [3]]
    )
    assert [row.tolist() for row in one.prompts] == [[1, 2], [3]]


def test_padding_without_its_mask_is_an_error():
    target = dataclasses.replace(tiny.model(), pad_token_id=9, eos_token_ids=())
    for ids in ([[9, 1, 2], [4, 5, 6]], [[1, 2, 9], [4, 5, 6]]):
        with pytest.raises(ValueError, match="prompt 0 begins or ends with the pad token 9: pass"):
            validated_request(target, ids)
    assert len(validated_request(target, [[9, 1, 2], [4, 5]]).prompts) == 2  # not padded
    ends = dataclasses.replace(target, eos_token_ids=(9,))  # many models pad with EOS
    assert len(validated_request(ends, [[9, 1], [1, 2]]).prompts) == 2


def test_texts_are_not_padded():
    """The pad token may be one of text, as "!" with the id 0 in tokenizers like Llama 3's."""
    tokenizer = small_tokenizers.make("byte-level")
    unknown, exclamation = tokenizer.convert_tokens_to_ids([small_tokenizers.UNKNOWN, "!"])
    module = models.build(tiny.config(vocab_size=len(tokenizer)))
    target = dataclasses.replace(tiny.model(), module=module, tokenizer=tokenizer)
    for pad, texts in ((exclamation, ["!", "a"]), (unknown, [small_tokenizers.UNKNOWN, "a"])):
        padding = dataclasses.replace(target, pad_token_id=pad, eos_token_ids=())
        ids = [tokenizer(text)["input_ids"] for text in texts]
        assert ids[0] == [pad] and len(ids[1]) == 1
        found = validated_request(padding, texts).prompts
        assert [row.tolist() for row in found] == ids
        if pad == exclamation:
            assert len(validated_request(padding, ids).prompts) == 2
        else:
            with pytest.raises(ValueError, match="prompt 0 begins or ends with the pad token"):
                validated_request(padding, ids)


@pytest.mark.parametrize("pad", [-1, 2**32])
def test_a_pad_token_outside_of_the_vocabulary_is_in_no_prompt(pad):
    """LLaMA-1's config has -1."""
    tokenizer = small_tokenizers.make("byte-level")
    target = dataclasses.replace(tiny.model(), tokenizer=tokenizer, pad_token_id=pad)
    assert len(validated_request(target, [[1, 2], [3, 4]]).prompts) == 2


def test_messages_are_rendered_with_the_chat_template():
    target = dataclasses.replace(tiny.model(), tokenizer=ChatTokenizer())
    messages = [{"role": "user", "content": [7]}]
    for prompts, rows in ((messages, 1), ([messages], 1), ([messages, [5]], 2)):
        request = validated_request(target, prompts)
        assert [row.tolist() for row in request.prompts] == [[1, 7, 2], [5]][:rows]


class ChatTokenizer:
    """A tokenizer that renders messages of token ids."""

    chat_template = "..."

    def apply_chat_template(self, messages, add_generation_prompt, return_dict, tools=None):
        assert add_generation_prompt and return_dict
        contents = [token for message in messages for token in message["content"]]
        return {"input_ids": [1, *contents, 2]}

    def get_vocab(self):
        return {}


def test_placed_arrays_equal_the_validated_ones():
    request = validated_request(tiny.model(), PROMPTS, PARAMS)
    placed = place(request)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed.rows.sampling))
    for array, on_device in zip(arrays(request), arrays(placed), strict=True):
        assert isinstance(on_device, jax.Array) and on_device.dtype == array.dtype
        np.testing.assert_array_equal(array, on_device)
