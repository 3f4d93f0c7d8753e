"""Options as text: those that drafters declare, in commands and configs, and numbers of tokens."""

import argparse
import dataclasses
import functools
import re
import textwrap
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import struct

from magicjax.suggest import did_you_mean

_hints = functools.cache(typing.get_type_hints)  # objects are made while programs are traced


def token_count(text: str) -> int:
    """Returns a number of tokens, for `argparse`: "8k" is 8 × 1,024, as "8192"."""
    match = re.fullmatch(r"(-?\d+)([kK]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens: use 8192 or 8k")
    return int(match[1]) * (1024 if match[2] else 1)


class Option(NamedTuple):
    """A setting of a drafter or a policy.

    Attributes:
      name: of the field.
      annotation: int, float, bool, str, a Literal, or a union of them and None.
      default: its value if it is not set.
      help: what it does.
      positional: whether its value may be written without its name.
      owner: the policy that it belongs to; "": the drafter.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""
    positional: bool = False
    owner: str = ""


def option(default: Any, help: str, *, positional: bool = False) -> Any:
    """Returns a static field of a drafter that commands and configs can set.

    ::

        @flax.struct.dataclass
        class Repeat(magicjax.Drafter):
            period: int = magicjax.option(4, "how many tokens are repeated", positional=True)

    The text of a drafter sets it by name, `repeat:period=8`, and a positional one also without,
    `repeat:8`, in the order of the fields.
    """
    metadata = {"help": help, "positional": positional}
    return struct.field(pytree_node=False, default=default, metadata=metadata)


def options_of(kind: type) -> dict[str, Option]:
    """Returns the options that a class of drafters declares, by name, in order."""
    declared = [field for field in dataclasses.fields(kind) if "help" in field.metadata]
    hints = _hints(kind) if declared else {}
    return {
        field.name: Option(field.name, hints[field.name], field.default, **_declared(field))
        for field in declared
    }


def _declared(field: dataclasses.Field) -> dict[str, Any]:
    return {name: field.metadata[name] for name in ("help", "positional")}


def fields_of(kind: type, owner: str = "") -> dict[str, Option]:
    """Returns all fields of a dataclass, such as a policy's, as options of `owner`."""
    hints = _hints(kind)
    return {
        field.name: Option(field.name, hints[field.name], field.default, owner=owner)
        for field in dataclasses.fields(kind)
    }


def check_types(owner: Any, declared: Iterable[Option]) -> None:
    """Checks the values of an object's options, and replaces NumPy's scalars by Python's.

    Options of other types than those that a text can have are not checked.

    Raises:
      TypeError: a value of another type, which would fail while a program is traced.
    """
    for known in declared:
        value = getattr(owner, known.name)
        if isinstance(value, np.generic):
            value = value.item()
            object.__setattr__(owner, known.name, value)
        kinds = _members(known.annotation)
        checkable = len(_alternatives(known.annotation)) == len(kinds) - (types.NoneType in kinds)
        if checkable and value is not known.default and not any(_is_a(value, k) for k in kinds):
            raise TypeError(f"{known.name}={value!r}: it must be {describe(known.annotation)}")


def _is_a(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def parse(known: Option, text: str) -> Any:
    """Returns the value of an option.

    Raises:
      ValueError: the text is not a value of the option's type.
    """
    for kind in _alternatives(known.annotation):
        if typing.get_origin(kind) is Literal:
            values = {str(value): value for value in typing.get_args(kind)}
            if text in values:
                return values[text]
        elif kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        elif kind in (int, float, str):
            try:
                return kind(text)
            except ValueError:
                continue
    raise ValueError(f"{known.name}={text!r}: it must be {describe(known.annotation)}")


def describe(annotation: Any) -> str:
    """Returns the values of an annotation in words."""
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return " or ".join(
        " or ".join(map(str, typing.get_args(kind)))
        if typing.get_origin(kind) is Literal
        else words[kind]
        for kind in _alternatives(annotation)
    )


def _alternatives(annotation: Any) -> list[Any]:
    """Returns the types of an annotation that can be written as text."""
    known = (int, float, str, bool)
    members = _members(annotation)
    return [kind for kind in members if kind in known or typing.get_origin(kind) is Literal]


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the type itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def find(name: str, known: dict[str, Option], owner: str) -> Option:
    """Returns the option of a name.

    Raises:
      ValueError: `owner`, the text of a drafter, has no such option.
    """
    if name in known:
        return known[name]
    raise ValueError(
        f"{name!r} is not an option of {owner}{did_you_mean(name, known)} "
        f"(options: {names_by_owner(known.values())})"
    )


def names_by_owner(known: Iterable[Option]) -> str:
    """Returns the names of options as "budget, draw; of h2o: recent, window"."""
    by_owner: dict[str, list[str]] = {}
    for each in known:
        by_owner.setdefault(each.owner and f"of {each.owner}: ", []).append(each.name)
    return "; ".join(owner + ", ".join(names) for owner, names in by_owner.items()) or "none"


def as_help(known: Iterable[Option]) -> str:
    """Returns a line or two for each option: its name, values, default, and help."""
    lines = []
    for each in known:
        default = "" if each.default is None else f", default {each.default}"
        lines.append(f"  {each.name} ({describe(each.annotation)}{default})")
        lines += textwrap.wrap(each.help, 90, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
