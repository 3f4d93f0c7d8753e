"""What the subcommands share: the table of ineffective options, error texts."""

import argparse
import re
from collections.abc import Callable, Iterable

AUTO = "auto"
NONE = "none"
SINGULAR = {"stop_token_ids": "stop_token_id", "bad_words": "bad_word"}  # options given repeatedly


def parsed[Value](parser: Callable[[str], Value], text: str) -> Value:
    """Returns the value of an option's text, with the parser's error as one of `argparse`."""
    try:
        return parser(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def flag(name: str) -> str:
    """Returns the option of an argument: "top_k" becomes "--top-k"."""
    return "--" + SINGULAR.get(name, name).replace("_", "-")


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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


def in_option_names(message: str, names: Iterable[str]) -> str:
    """Returns an error text with Python arguments replaced by options.

    "stages=2 has no effect: pass offload=True or omit stages" becomes "--stages 2 has no effect:
    pass --offload or omit --stages". Names that are part of a path stay.
    """
    name = "|".join(map(re.escape, names))

    def option(match: re.Match) -> str:
        return flag(match[1]) + ("" if match[2] else " ")

    def bare(match: re.Match) -> str:
        return re.sub(rf"\b({name})\b", lambda one: flag(one[1]), match[0])

    message = re.sub(rf"(?<![\w./:-])({name})=(True\b)?", option, message)
    subject = rf"(?<![\w./:-])({name})(?= has the token | with a grammar )"
    message = re.sub(subject, lambda one: flag(one[1]), message)
    return re.sub(rf"\b(omit|reduce|remove) ({name})\b( and ({name})\b)?", bare, message)
