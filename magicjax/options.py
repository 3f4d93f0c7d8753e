"""Options of drafters: declared in the class, and read from text in commands and configs."""

import dataclasses
import textwrap
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from flax import struct

from magicjax.suggest import did_you_mean


class Option(NamedTuple):
    """A setting of a drafter or a policy.

    Attributes:
      name: of the field.
      annotation: int, float, bool, str, a Literal, or a union of them and None.
      default: its value if it is not set.
      help: what it does.
      positional: whether its value may be written without its name.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""
    positional: bool = False


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
    hints = typing.get_type_hints(kind)
    return {
        field.name: Option(field.name, hints[field.name], field.default, **_declared(field))
        for field in dataclasses.fields(kind)
        if "help" in field.metadata
    }


def _declared(field: dataclasses.Field) -> dict[str, Any]:
    return {name: field.metadata[name] for name in ("help", "positional")}


def fields_of(kind: type) -> dict[str, Option]:
    """Returns all fields of a dataclass, such as a policy's, as options."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return {field.name: Option(field.name, hints[field.name], field.default) for field in fields}


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
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    known = (int, float, str, bool)
    return [kind for kind in members if kind in known or typing.get_origin(kind) is Literal]


def find(name: str, known: dict[str, Option], owner: str) -> Option:
    """Returns the option of a name.

    Raises:
      ValueError: `owner`, the text of a drafter, has no such option.
    """
    if name in known:
        return known[name]
    listed = ", ".join(known) if known else "none"
    raise ValueError(
        f"{name!r} is not an option of {owner}{did_you_mean(name, known)} (options: {listed})"
    )


def as_help(known: Iterable[Option]) -> str:
    """Returns a line or two for each option: its name, values, default, and help."""
    lines = []
    for each in known:
        default = "" if each.default is None else f", default {each.default}"
        lines.append(f"  {each.name} ({describe(each.annotation)}{default})")
        lines += textwrap.wrap(each.help, 90, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
