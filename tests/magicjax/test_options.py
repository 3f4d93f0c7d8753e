"""Settings are declared once: docstrings, checks, options and errors follow from their fields."""

import argparse
import dataclasses
import pathlib
import pickle

import pytest

from magicjax import EngineConfig, SamplingParams
from magicjax.checks import OptionError, check_number
from magicjax.cli import arg_utils
from magicjax.engine.config import EngineLimitError
from magicjax.options import check_options, documented, options_of, setting

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@documented
@dataclasses.dataclass(frozen=True)
class Baking:
    """How a cake is baked.

    {attributes}

    Raises:
      ValueError: too hot.
    """

    degrees: float = setting(180.0, "of the oven; `minutes` is the time", ge=20, le=250)
    minutes: int | None = setting(None, "in the oven; None for until it is done", gt=0)
    layers: int = setting(1, "of dough", ge=1, hint="1 for a plain cake")
    vegan: bool = setting(False, "without eggs")

    def __post_init__(self):
        check_options(self, options_of(type(self)).values())


def test_the_docstring_lists_the_settings():
    assert Baking.__doc__ == (
        "How a cake is baked.\n\n"
        "Attributes:\n"
        "  degrees: of the oven; `minutes` is the time (a number from 20 to 250).\n"
        "  minutes: in the oven; None for until it is done (an integer above 0).\n"
        "  layers: of dough (an integer of at least 1).\n"
        "  vegan: without eggs.\n\n"
        "Raises:\n"
        "  ValueError: too hot."
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("degrees", 251, "degrees=251: it must be a number from 20 to 250"),
        ("degrees", float("nan"), "degrees=nan: it must be a number from 20 to 250"),
        ("minutes", 0, "minutes=0: it must be an integer above 0"),
        ("minutes", 2.0, "minutes=2.0: it must be an integer above 0"),
        ("layers", 0, "layers=0: it must be an integer of at least 1; 1 for a plain cake"),
        ("layers", None, "layers=None: it must be an integer of at least 1; 1 for a plain cake"),
        ("layers", True, "layers=True: it must be an integer of at least 1; 1 for a plain cake"),
        ("vegan", None, "vegan=None: it must be true or false"),
    ],
)
def test_an_error_has_field_value_and_limit(name, value, text):
    with pytest.raises(OptionError) as raised:
        Baking(**{name: value})
    error = raised.value
    assert str(error) == text and error.field == name and error.value is value
    assert isinstance(error, TypeError) == (value in (2.0, None, True))


def test_numbers_that_float32_lacks_are_errors():
    check_number("x", 0, float)
    for value in (1e39, -1e39, 1e-40, float("inf"), float("nan")):
        with pytest.raises(OptionError, match="its magnitude must be from 1.2e-38 to 3.4e"):
            check_number("x", value, float)


def parsed(*words: str) -> dict:
    parser = argparse.ArgumentParser()
    arg_utils.add_settings(parser, Baking, layers=dict(metavar="N"))
    return arg_utils.settings_from(parser.parse_args(words), Baking)


def test_settings_are_options():
    assert parsed() == {}
    words = ("--degrees", "90.5", "--minutes", "7", "--layers", "2", "--vegan")
    assert parsed(*words) == dict(degrees=90.5, minutes=7, layers=2, vegan=True)


def test_the_help_of_options_has_defaults_and_limits():
    parser = argparse.ArgumentParser()
    arg_utils.add_settings(parser, Baking, ("vegan",), layers=dict(metavar="N"))
    text = " ".join(parser.format_help().split())
    for part in (
        "--degrees DEGREES of the oven; --minutes is the time (a number from 20 to 250); "
        "default: 180",
        "--minutes MINUTES in the oven; default: until it is done (an integer above 0)",
        "--layers N of dough (an integer of at least 1); default: 1",
    ):
        assert part in text
    assert "vegan" not in text


def test_the_command_line_names_options():
    for error, text in (
        (OptionError("{}: it must be even", "top_k", 3), "--top-k 3: it must be even"),
        (OptionError("{} has no {}", "stop_token_ids"), "--stop-token-id has no {}"),
        (OptionError("{}: no", "offload", True), "--offload: no"),
        (OptionError("{}: no", "max_match", 0), "max_match=0: no"),  # of a drafter's text
    ):
        arguments = argparse.Namespace(top_k=3, stop_token_ids=[], offload=True)
        assert arg_utils.explain(error, arguments) == text


def test_errors_can_be_sent_to_another_process():
    for error in (
        OptionError("{}: no", "top_k", 3),
        EngineLimitError("{}: no", "temperature", 0.5, "sampling", "sampling=True"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert str(error) == "temperature=0.5: no, or create the engine with sampling=True"


def test_every_parameter_is_a_field_of_bodies_and_documented():
    from magicjax.server.bodies import ChatBody, CompletionBody

    parameters = set(options_of(SamplingParams)) - {"grammar", "prompt_logprobs"}
    for body in (CompletionBody, ChatBody):
        assert parameters <= set(body.model_fields)
    page = (DOCS / "server_requests.md").read_text()
    assert [name for name in sorted(parameters) if f"`{name}`" not in page] == []


def test_every_field_is_a_setting():
    for kind in (SamplingParams, EngineConfig):
        assert list(options_of(kind)) == [field.name for field in dataclasses.fields(kind)]
