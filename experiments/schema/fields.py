"""Strict settings from YAML files, and error messages that name the key, the value, and the remedy.

Unknown keys are errors, because a misspelt option that is silently ignored makes a wrong result
look like a right one.
"""

import dataclasses
import pathlib
import typing
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from magicjax.suggest import did_you_mean


class ConfigError(ValueError):
    """An experiment's settings are wrong; the message names the key, the value, and the remedy."""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


# What pydantic's errors expect, in the words of YAML.
EXPECTED = {
    "list_type": "a list",
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "`key: value` lines",
    "model_type": "`key: value` lines",
}
Positive = Annotated[int, Field(ge=1)]
Many = BeforeValidator(_listed)  # a single value in a file is a list of one
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Strict(BaseModel):
    """Settings without coercion and unknown keys; docstrings below fields are their help."""

    model_config = STRICT | ConfigDict(use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())


def read_mapping(path: pathlib.Path) -> dict[str, Any]:
    """Returns the keys and values of a YAML file.

    Raises:
      ConfigError: the file cannot be read, is not valid YAML, or does not hold a mapping.
    """
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path}: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    if raw is None:
        raise ConfigError(f"{path}: the file is empty: write `key: value` lines")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found {type(raw).__name__}")
    return raw


def validated[Settings: BaseModel](
    settings_class: type[Settings], raw: dict, source: str
) -> Settings:
    """Returns validated settings; `source`, where they come from, starts the error message.

    Raises:
      ConfigError: every problem of `raw`, one line each.
    """
    try:
        return settings_class.model_validate(raw)
    except pydantic.ValidationError as error:
        raise config_error(settings_class, error, source) from error


def config_error(settings_class: type, error: pydantic.ValidationError, source: str) -> ConfigError:
    """Returns the error of settings from `source`, with a line for each problem."""
    lines = [_explain(settings_class, problem) for problem in error.errors()]
    return ConfigError("\n".join([f"{source}:", *(f"  {line}" for line in lines)]))


def _explain(settings_class: type, problem: Any) -> str:
    """Returns one line for one of pydantic's errors: key, value, and remedy."""
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "invalid_key" or problem["loc"][-1:] == ("[key]",):
        return (
            f"{location.removesuffix('.[key]')}: a key must be text: quote a value that contains "
            'commas, as in {tree: "expansion:2,2,1"}, and write several values in brackets, as in '
            "{batch: [1, 4]}"
        )
    if problem["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        compound = isinstance(problem["input"], dict | list)
        value = "" if compound else f"={problem['input']!r}"
        message = problem["msg"].removeprefix("Value error, ")
        if expected := EXPECTED.get(problem["type"]):
            message = f"it must be {expected}{_example(settings_class, problem['loc'])}"
        return f"{location}{value}: {message}".removeprefix(": ")
    name, known = str(problem["loc"][-1]), sorted(_fields_at(settings_class, problem["loc"][:-1]))
    hint = did_you_mean(name, known)
    if not hint and "methods" in known:
        methods = _fields_at(settings_class, ("methods",))
        hint = did_you_mean(name, methods).replace("?", " of methods?")
    return f"{location}: no such key{hint} (keys: {', '.join(known)})"


def _example(settings_class: type, location: tuple) -> str:
    """Returns ", as in KEY: VALUE" if the setting at `location` declares an example, else ""."""
    names = [part for part in location if isinstance(part, str)]
    for name in names[:-1]:
        settings_class = (
            _settings_in(typing.get_type_hints(settings_class).get(name)) or settings_class
        )
    field = getattr(settings_class, "model_fields", {}).get(names[-1]) if names else None
    return f", as in {names[-1]}: {field.examples[0]}" if field and field.examples else ""


def _fields_at(settings_class: type, location: tuple) -> list[str]:
    """Returns the keys of the settings that `location` leads to from `settings_class`."""
    for part in location:
        if isinstance(part, str):
            settings_class = (
                _settings_in(typing.get_type_hints(settings_class)[part]) or settings_class
            )
    if dataclasses.is_dataclass(settings_class):
        return [field.name for field in dataclasses.fields(settings_class)]
    return [*settings_class.model_fields, *getattr(settings_class, "further_keys", ())]  # type: ignore[attr-defined]


def _settings_in(annotation: Any) -> Any:
    """Returns the settings class within an annotation such as `list[Shapes]`, None without one."""
    if dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_fields"):
        return annotation
    return next(filter(None, map(_settings_in, typing.get_args(annotation))), None)
