"""What the subcommands share: the table of ineffective options, error texts."""

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

from magicjax.checks import OptionError
from magicjax.options import Option, options_of

AUTO = "auto"
NONE = "none"
# Settings that are lists, whose options are repeated, and the types of their values.
LISTS = {"stop_token_ids": int, "allowed_token_ids": int, "bad_words": str, "stop": str}


def parsed[Value](parser: Callable[[str], Value], text: str) -> Value:
    """Returns the value of an option's text, with the parser's error as one of `argparse`."""
    try:
        return parser(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def flag(name: str) -> str:
    """Returns the option of an argument: "top_k" becomes "--top-k"."""
    return "--" + (name.removesuffix("s") if name in LISTS else name).replace("_", "-")


def add_settings(
    parser: Any, settings_class: type, omitted: Iterable[str] = (), **changes: Any
) -> None:
    """Adds an option for each setting of a dataclass, with its type, default and help.

    An option that is not given is None, and `settings_from` omits it.

    Args:
      parser: the parser of a command, or a group of its options.
      settings_class: the dataclass.
      omitted: settings that are no options, or that the command adds itself.
      **changes: arguments of `add_argument` that differ, by the name of the setting.
    """
    for name, option in options_of(settings_class).items():
        if name in omitted:
            continue
        kwargs: dict[str, Any] = {"dest": name, "help": _help(option)}
        if name in LISTS:
            metavar = "TOKEN" if LISTS[name] is int else "TEXT"
            kwargs |= {"action": "append", "type": LISTS[name], "metavar": metavar}
        elif option.value_types == [bool]:
            kwargs |= {"action": "store_true", "default": None}
        elif option.value_types:
            kwargs["type"] = option.value_types[0]
        kwargs |= changes.get(name, {})
        if kwargs.get("action") == "append":
            kwargs["help"] += "; repeat the option for several"
        parser.add_argument(flag(name), **kwargs)


def _help(option: Option) -> str:
    text = re.sub(r"`(\w+)`", lambda match: flag(match[1]), option.help)
    text = text.replace("None for", "default:")
    if option.limits:
        text += f" ({option.values})"
    default = option.default
    if isinstance(default, bool) or not isinstance(default, int | float):
        return text
    shown = f"{default:g}" if isinstance(default, float) else f"{default:,}"
    return f"{text}; default: {shown}"


def settings_from(arguments: argparse.Namespace, settings_class: type) -> dict[str, Any]:
    """Returns the settings of a dataclass that a command line sets, for its constructor."""
    values = {name: getattr(arguments, name, None) for name in options_of(settings_class)}
    return {name: value for name, value in values.items() if value is not None}


def check_effects(
    arguments: argparse.Namespace, effects: Iterable[tuple[str, object, str]]
) -> None:
    """Raises ValueError for an option that was set but has no effect.

    Args:
      arguments: the parsed options.
      effects: rows of an option, whether it has an effect, and a phrase for when it has none.
    """
    for name, effective, when in effects:
        value = getattr(arguments, name)
        is_set = value not in (None, []) and value is not False  # 0 is a value
        if is_set and not effective:
            raise ValueError(f"{flag(name)} has no effect {when}: remove it")


def explain(error: Exception, arguments: argparse.Namespace) -> str:
    """Returns the text of an error, in which arguments of Python are called by their options."""
    if isinstance(error, OptionError) and error.field in vars(arguments):
        is_flag = error.value is ... or error.value is True
        name = flag(error.field)
        return error.naming(name if is_flag else f"{name} {error.value}")
    # The weights of a drafter are in its text.
    unset = {"weights"} if getattr(arguments, "weights", None) is None else {}
    return in_option_names(str(error), [name for name in vars(arguments) if name not in unset])


def in_option_names(message: str, names: Iterable[str]) -> str:
    """Returns an error text with Python arguments replaced by options.

    "stages=2 has no effect: pass offload=True or omit stages" becomes "--stages 2 has no effect:
    pass --offload or omit --stages". Names that are part of a path stay.
    """
    name = "|".join(map(re.escape, names))

    def assignment(match: re.Match) -> str:
        return flag(match[1]) + ("" if match[2] else " ")

    def mention(match: re.Match) -> str:
        return re.sub(rf"\b({name})\b", lambda match: flag(match[1]), match[0])

    message = re.sub(rf"(?<![\w./:-])({name})=(True\b)?", assignment, message)
    return re.sub(rf"\b(omit|reduce|remove) ({name})\b( and ({name})\b)?", mention, message)
