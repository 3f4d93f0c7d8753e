"""`SamplingParams` accepts what it documents, and names value and limit otherwise."""

import re

import numpy as np
import pytest

from magicjax.sampling_params import SamplingParams


def test_stop_strings_become_a_tuple_and_numpy_numbers_are_numbers():
    params = SamplingParams(stop="\n", temperature=np.float32(0.5), top_k=np.int64(3))
    assert params.stop == ("\n",)
    assert hash(SamplingParams(stop=["a", "b"])) == hash(SamplingParams(stop=("a", "b")))
    assert not params.greedy


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "0.7", "temperature='0.7': it must be a number"),
        ("temperature", -1, "temperature=-1: it must be a number of at least 0; 0 for greedy"),
        ("temperature", True, "temperature=True: it must be a number"),
        ("temperature", 1e39, "its magnitude must be from 1.2e-38 to 3.4e+38, as in float32"),
        ("temperature", 1e-40, "its magnitude must be from 1.2e-38"),
        ("temperature", float("nan"), "temperature=nan"),
        ("stop", [3], "3 is not a string"),
        ("top_k", 2.0, "top_k=2.0: it must be an integer"),
        ("top_k", -1, "top_k=-1: it must be an integer of at least 0; 0 for all"),
        ("top_p", 0, "top_p=0: it must be a number above 0 and at most 1; 1 for all"),
        ("seed", 2**32, "seed=4294967296: it must be an integer from 0 to 4294967295"),
        (
            "max_tokens",
            -1,
            "max_tokens=-1: it must be an integer of at least 0; None for as many as fit",
        ),
        ("stop", 3, "stop=3: it must be a string, or a list of strings"),
        ("stop", "", "a string must have at least 1 character"),
        ("grammar", "[a-z]+", "grammar has type str: pass a magicjax.Grammar"),
        ("logprobs", 21, "logprobs=21: it must be an integer from 0 to 20"),
        (
            "max_new_tokens",
            9,
            "max_new_tokens=9 is not an argument of magicjax.SamplingParams: use ",
        ),
        ("stop_token_ids", 2, "stop_token_ids=2: it must be a list of token ids"),
        ("stop_token_ids", ["</s>"], "a token of stop_token_ids='</s>': it must be an integer"),
        (
            "stop_token_ids",
            [-1],
            "a token of stop_token_ids=-1: it must be an integer of at least 0",
        ),
        (
            "n",
            2,
            "repeat the prompt with other seeds, or call engine.submit_samples(prompt, n, par",
        ),
        ("temprature", 1, "did you mean 'temperature'?"),
    ],
)
def test_invalid_values_are_errors(field, value, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        SamplingParams(**({"temperature": 1.0} | {field: value}))


def test_values_that_cannot_change_greedy_decoding_are_accepted():
    params = SamplingParams(temperature=0, top_k=5, top_p=0.9, min_p=0.1, seed=3)
    assert params.greedy and (params.top_k, params.seed) == (5, 3)


def test_tokens_that_end_a_text():
    params = SamplingParams(stop_token_ids=np.array([7, 3, 7]))
    assert params.stop_token_ids == (3, 7) and params.end_tokens([1, 2]) == (1, 2, 3, 7)
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).end_tokens([1]) == (3,)
    assert SamplingParams(stop_token_ids=None) == SamplingParams()
