"""Errors of the engine are answered in the words of the server: its options."""

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from magicjax import EngineConfig, SamplingParams
from magicjax.engine import submission
from magicjax.server.errors import ApiError, refused

CONFIG = EngineConfig(capacity=64, max_tokens=32, eos_token_id=(0,))
ROW = SimpleNamespace(target=None, eos=np.zeros(1, np.int32))
TEMPLATES = SimpleNamespace(config=CONFIG, capacity=64, row=ROW)


def sample() -> None:
    CONFIG.check_params(SamplingParams(temperature=1))


def new_tokens() -> None:
    CONFIG.check_params(SamplingParams(max_tokens=33))


def prompt() -> None:
    submission._limit(TEMPLATES, 64, None)


def prompt_and_new_tokens() -> None:
    submission._limit(TEMPLATES, 60, 5)


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        (sample, "use temperature=0, or start the server without --greedy"),
        (new_tokens, "max_tokens=33: it must be at most 32; reduce it, or start the server with a"),
        (
            prompt,
            "the capacity of 64 leaves no room for new ones: shorten the prompt, or start the serv",
        ),
        (
            prompt_and_new_tokens,
            "exceeds the capacity of 64: use at most 4 new tokens, shorten the prompt, or start",
        ),
        (prompt_and_new_tokens, "or start the server with a larger --capacity"),
    ],
)
def test_errors_name_options_of_the_server(fail, text):
    error = answer(fail)
    assert error.status == 400 and text in error.message and "engine" not in error.message


def test_only_prompts_that_do_not_fit_have_the_code_for_it():
    codes = [answer(fail).code for fail in (prompt, prompt_and_new_tokens, new_tokens)]
    assert codes == ["context_length_exceeded"] * 2 + [None]
    assert answer(new_tokens).param == "max_tokens"


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_errors_of_long_prompts_name_the_field_of_the_prompt(field):
    for fail in (prompt, prompt_and_new_tokens):
        assert answer(fail, {"prompt": field, "max_tokens": "max_tokens"}).param == field


def answer(fail, fields=MappingProxyType({})) -> ApiError:
    with pytest.raises(ValueError) as raised:
        fail()
    return refused(raised.value, fields)
