"""The options of models, which the subcommands share, and the models that they describe."""

import argparse
import pathlib
from typing import Any

import jax

from magicjax.cli import arg_utils
from magicjax.loading import ACTIVATIONS, abstract_model
from magicjax.model import KV_DTYPES, Model
from magicjax.sources import Source
from models import parse_weights
from pallas_kernels.cpu import build

SOURCE = "directory, OWNER/NAME or OWNER/NAME:Q4_K_M on the Hugging Face Hub, GGUF file or preset"
# CPU instructions with which XLA multiplies bfloat16, as Linux names them on x86 and Arm: bfloat16
# against float32 takes 3.2 and 6.9 s for the prefill of 2,048 tokens, 90 and 148 ms for a round of
# prompt lookup with chain:4, and 103 and 108 ms for a plain step (SmolLM2-135M, two shared cores of
# an Intel Xeon with AMX, medians of interleaved runs). Without them, weights would be converted.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Adds `--backend`."""
    parser.add_argument(
        "--backend",
        help="backend of attention and products; default: cpu, the native kernels, on a CPU that "
        "has them, else xla",
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
        help="dtype of the target's KV cache: int8 with a scale per token and head; default: that "
        "of activations",
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
        help="dtype in products with the matrices of a GGUF file on a CPU: int8 keeps the file's "
        f"types and rounds activations to 8 bits, float does not; default: {ACTIVATIONS[0]}",
    )


def _weights(text: str) -> str:
    return str(arg_utils.parsed(parse_weights, text))


def default_dtype(backend: str | None) -> str | None:
    """Returns the faster dtype on a CPU, and None elsewhere: as stored."""
    if jax.default_backend() != "cpu":
        return None
    if backend in (None, "cpu") and build.is_available():  # products read half the bytes
        return "bfloat16"
    flags = pathlib.Path("/proc/cpuinfo")
    has_bfloat16 = flags.exists() and BFLOAT16_FLAGS & set(flags.read_text().split())
    return "bfloat16" if has_bfloat16 else "float32"


def unloaded_target(
    arguments: argparse.Namespace, source: Source, dtype: str | None = None
) -> Model:
    """Returns the target without weights; `dtype` is the default of --dtype, None for as stored.

    Raises:
      ValueError: it has no tokenizer, or one that cannot stream text.
    """
    tokenizer_text = arguments.tokenizer or arguments.target
    if source.tokenizer is None:
        raise ValueError(
            f"{tokenizer_text} has no tokenizer: pass a directory that has one as --tokenizer"
        )
    if getattr(source.tokenizer, "backend_tokenizer", None) is None:  # `print_stream` uses it
        raise ValueError(
            f"{tokenizer_text} has a tokenizer without tokenizer.json: save it with transformers' "
            "save_pretrained as a fast tokenizer"
        )
    return unloaded(
        arguments,
        dtype,
        source,
        weights=arguments.weights,
        kv_dtype=arguments.kv_dtype,
        offload=arguments.offload,
    )


def unloaded(
    arguments: argparse.Namespace, dtype: str | None, source: str | Source, **options: Any
) -> Model:
    """Returns the target, or a draft model, without weights.

    Args:
      arguments: the parsed options of a command with --dtype and --activations.
      dtype: the default of --dtype; None: as stored.
      source, options: arguments of `abstract_model`.
    """
    packed = arguments.activations == "int8" and not getattr(arguments, "mesh", None)
    return abstract_model(source, arguments.dtype or dtype, packed=packed, **options)


def check_context(source: Source, context: int, timed_tokens: int = 0) -> None:
    """Raises ValueError if a context, and the tokens that a timed loop adds, exceed a model's.

    Args:
      source: the model's source.
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
