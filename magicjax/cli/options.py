"""What the subcommands share: option types, the table of ineffective options, error texts."""

import argparse
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from magicjax.drafters.spec import DRAFTER_SYNTAX, Drafters, Trees, parse, parse_trees
from magicjax.loading import ACTIVATIONS
from magicjax.model import KV_DTYPES
from magicjax.sources import Source
from models import parse_weights
from pallas_kernels.cpu import build

AUTO = "auto"
NONE = "none"
SINGULAR = {"stop_token_ids": "stop_token_id", "bad_words": "bad_word"}  # options given repeatedly
SOURCE = "directory, OWNER/NAME or OWNER/NAME:Q4_K_M on the Hugging Face Hub, GGUF file or preset"
# CPU instructions with which XLA multiplies bfloat16, as Linux names them on x86 and Arm: bfloat16
# against float32 takes 3.2 and 6.9 s for the prefill of 2,048 tokens, 90 and 148 ms for a round of
# prompt lookup with chain:4, and 103 and 108 ms for a plain step (SmolLM2-135M, two shared cores of
# an Intel Xeon with AMX, medians of interleaved runs). Without them, weights would be converted.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def trees(text: str) -> str | Trees:
    """Returns the trees of a --tree option, or "auto", for `argparse`."""
    return text if text == AUTO else _parsed(parse_trees, text)


def drafter(text: str) -> str | Drafters:
    """Returns the drafter of a --drafter option, or "auto", for `argparse`."""
    return text if text == AUTO else _parsed(parse, text)


def engine_drafter(text: str) -> str | Drafters:
    """Returns the drafter of an engine's --drafter option, which can also be "none"."""
    return text if text == NONE else drafter(text)


def candidate(text: str) -> Drafters:
    """Returns the drafter of a --candidate option."""
    if text == AUTO:
        raise argparse.ArgumentTypeError(f"{AUTO} is not a candidate: use {DRAFTER_SYNTAX}")
    return _parsed(parse, text)


def _parsed[Value](parser: Callable[[str], Value], text: str) -> Value:
    """Returns the value of an option's text, with the parser's error as one of `argparse`."""
    try:
        return parser(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Adds `--backend`."""
    parser.add_argument(
        "--backend",
        help="of attention and products; default: cpu, the native kernels, on a CPU that has them, "
        "else xla",
    )


def add_weights(parser: Any) -> None:
    """Adds `--weights`, `--kv-dtype` and `--offload` to a command."""
    parser.add_argument(
        "--weights",
        type=_weights,
        metavar="FORMAT",
        help="quantize the target's matrices: int8 with a scale per output, int4 or int4:32 with "
        "one per group of 128 or 32 inputs, Q4_0 or Q8_0 on a CPU; none: dequantize a quantized "
        "checkpoint; default: as stored",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=[name for name in KV_DTYPES if name],
        help="of the target's KV cache: int8 with a scale per token and head; default: that of "
        "activations",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="stream the target's weights from host memory, layer by layer",
    )


def add_activations(parser: Any) -> None:
    """Adds `--activations` to a command that runs or predicts a target on this machine."""
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default=ACTIVATIONS[0],
        help="of products with the matrices of a GGUF file on a CPU: int8 keeps the file's types "
        f"and rounds activations to 8 bits, float does not; default: {ACTIVATIONS[0]}",
    )


def _weights(text: str) -> str:
    return str(_parsed(parse_weights, text))


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


def check_context(source: Source, context: int, timed_tokens: int = 0) -> None:
    """Raises ValueError if a context, and the tokens that a timed loop adds, exceed a model's.

    Args:
      source: of the model.
      context: tokens per row.
      timed_tokens: tokens that a timed loop adds to the context.
    """
    positions = source.config.max_positions
    if context > positions - timed_tokens:
        timed = f", of which a timed loop needs {timed_tokens}" if timed_tokens else ""
        raise ValueError(
            f"context={context} exceeds the {positions} positions of {source}{timed}: use at most "
            f"{positions - timed_tokens}"
        )


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


def default_dtype(backend: str | None) -> str | None:
    """Returns the faster dtype on a CPU, and None elsewhere: as stored."""
    if jax.default_backend() != "cpu":
        return None
    if backend in (None, "cpu") and build.is_available():  # products read half the bytes
        return "bfloat16"
    flags = pathlib.Path("/proc/cpuinfo")
    has_bfloat16 = flags.exists() and BFLOAT16_FLAGS & set(flags.read_text().split())
    return "bfloat16" if has_bfloat16 else "float32"
