"""Options: fields of dataclasses, with which commands, configs and request bodies are made."""

import argparse
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import struct

from magicjax.checks import OptionTypeError, check_number, describe_number
from magicjax.suggest import did_you_mean

_hints = functools.cache(typing.get_type_hints)  # objects are made while programs are traced


def token_count(text: str) -> int:
    """Returns a number of tokens, for `argparse`: "8k" is 8 × 1,024, as "8192"."""
    match = re.fullmatch(r"(-?\d+)([kK]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens: use 8192 or 8k")
    return int(match[1]) * (1024 if match[2] else 1)


class Option(NamedTuple):
    """A setting of a drafter, a policy, a request, an engine or a server.

    Attributes:
      name: the field's name.
      annotation: int, float, bool, str, a Literal, or a union of them and None; others are neither
        checked nor read from text.
      default: its value if it is not set.
      help: what it does.
      positional: whether its value may be written without its name.
      owner: the policy that it belongs to; "": the drafter.
      ge, gt, le: the smallest number, one that all are above, and the largest; None for none.
      hint: ends the error of a wrong number.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""
    positional: bool = False
    owner: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    hint: str = ""

    @property
    def value_types(self) -> list[Any]:
        """The types that can be written as text."""
        known = (int, float, str, bool)
        members = _members(self.annotation)
        return [each for each in members if each in known or typing.get_origin(each) is Literal]

    @property
    def checkable(self) -> bool:
        """Whether all values but None can be written as text."""
        members = _members(self.annotation)
        return len(self.value_types) == len(members) - (types.NoneType in members)

    @property
    def limits(self) -> dict[str, Any]:
        """Its `ge`, `gt` and `le`, without None."""
        limits = {"ge": self.ge, "gt": self.gt, "le": self.le}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def values(self) -> str:
        """Its values in words, except for None."""
        return " or ".join(
            " or ".join(map(str, typing.get_args(option_type)))
            if typing.get_origin(option_type) is Literal
            else describe_number(option_type, **self.limits)
            if option_type in (int, float)
            else {str: "a text", bool: "true or false"}[option_type]
            for option_type in self.value_types
        )


def option(default: Any, help: str, *, positional: bool = False, **limits: float) -> Any:
    """Returns a static field of a drafter that commands and configs can set.

    ::

        @flax.struct.dataclass
        class Repeat(magicjax.Drafter):
            period: int = magicjax.option(4, "how many tokens are repeated", positional=True, ge=1)

    The text of a drafter sets it by name, `repeat:period=8`, and a positional one also without,
    `repeat:8`, in the order of the fields.

    Args:
      default: its value if it is not set.
      help: what it does.
      positional: whether its value may be written without its name.
      **limits: `ge`, `gt`, `le`, as in `magicjax.options.Option`.
    """
    metadata = {"help": help, "positional": positional} | limits
    return struct.field(pytree_node=False, default=default, metadata=metadata)


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Returns a field of a dataclass from which other interfaces are made; see `Option`."""
    return dataclasses.field(default=default, metadata={"help": help} | declared)


def documented[Cls: type](cls: Cls) -> Cls:
    """Returns a dataclass with the help and limits of its settings in its docstring."""
    lines = []
    for name, option in options_of(cls).items():
        text = f"{name}: {option.help}{f' ({option.values})' if option.limits else ''}."
        lines.append(textwrap.fill(text, 98, initial_indent="  ", subsequent_indent="    "))
    attributes = "\n".join(["Attributes:", *lines])
    cls.__doc__ = inspect.cleandoc(cls.__doc__ or "").replace("{attributes}", attributes)
    return cls


def options_of(cls: type) -> dict[str, Option]:
    """Returns the options that a class declares, by name, in order."""
    declared = [field for field in dataclasses.fields(cls) if "help" in field.metadata]
    hints = _hints(cls) if declared else {}
    return {
        field.name: Option(field.name, hints[field.name], field.default, **_declared(field))
        for field in declared
    }


def _declared(field: dataclasses.Field) -> dict[str, Any]:
    return {name: field.metadata[name] for name in Option._fields if name in field.metadata}


def fields_of(cls: type, owner: str = "") -> dict[str, Option]:
    """Returns all fields of a dataclass, such as a policy's, as options of `owner`."""
    hints = _hints(cls)
    return {
        field.name: Option(field.name, hints[field.name], field.default, owner=owner)
        for field in dataclasses.fields(cls)
    }


def check_options(owner: Any, options: Iterable[Option]) -> None:
    """Checks the values of an object's options, and replaces NumPy's scalars by Python's.

    Options of other types than those that a text can have are not checked.

    Raises:
      OptionTypeError: a value of another type, which would fail while a program is traced.
      OptionError: a number outside its range.
    """
    for option in options:
        value = getattr(owner, option.name)
        if isinstance(value, np.generic):
            value = value.item()
            object.__setattr__(owner, option.name, value)
        if value is option.default or not option.checkable:
            continue
        if not any(_is_instance(value, option_type) for option_type in _members(option.annotation)):
            wanted = option.values + (option.hint and f"; {option.hint}")
            raise OptionTypeError(f"{{}}: it must be {wanted}", option.name, value)
        if _is_instance(value, float):
            option_type = int if int in option.value_types else float
            check_number(option.name, value, option_type, **option.limits, hint=option.hint)


def _is_instance(value: Any, option_type: Any) -> bool:
    if typing.get_origin(option_type) is Literal:
        return value in typing.get_args(option_type)
    if option_type is float:
        option_type = int | float
    return isinstance(value, option_type) and (option_type is bool or not isinstance(value, bool))


def parse(option: Option, text: str) -> Any:
    """Returns the value of an option.

    Raises:
      ValueError: the text is not a value of the option's type.
    """
    for option_type in option.value_types:
        if typing.get_origin(option_type) is Literal:
            values = {str(value): value for value in typing.get_args(option_type)}
            if text in values:
                return values[text]
        elif option_type is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        elif option_type in (int, float, str):
            try:
                return option_type(text)
            except ValueError:
                continue
    raise ValueError(f"{option.name}={text!r}: it must be {option.values}")


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the type itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def find(name: str, options: dict[str, Option], owner: str) -> Option:
    """Returns the option of a name.

    Raises:
      ValueError: `owner`, the text of a drafter, has no such option.
    """
    if name in options:
        return options[name]
    raise ValueError(
        f"{name!r} is not an option of {owner}{did_you_mean(name, options)} "
        f"(options: {names_by_owner(options.values())})"
    )


def names_by_owner(options: Iterable[Option]) -> str:
    """Returns the names of options as "budget, draw; of h2o: recent, window"."""
    by_owner: dict[str, list[str]] = {}
    for option in options:
        by_owner.setdefault(option.owner and f"of {option.owner}: ", []).append(option.name)
    return "; ".join(owner + ", ".join(names) for owner, names in by_owner.items()) or "none"


def as_help(options: Iterable[Option]) -> str:
    """Returns a line or two for each option: its name, values, default, and help."""
    lines = []
    for option in options:
        default = "" if option.default is None else f", default {option.default}"
        lines.append(f"  {option.name} ({option.values}{default})")
        lines += textwrap.wrap(option.help, 90, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
