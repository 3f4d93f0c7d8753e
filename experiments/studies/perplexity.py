"""Perplexity of a model by the format of its weights: `python -m experiments.studies.perplexity`.

Every format reads the same texts. The first format is the reference of the last column, the share
of positions at which both have the same most likely token.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

import magicjax
from experiments import prompts
from experiments.runner import teacher
from magicjax.benchmarks.tables import record_table
from magicjax.cli.options import check_context
from magicjax.files import write_atomically
from magicjax.loading import skeleton
from magicjax.model import DTYPES
from magicjax.options import token_count
from sharding import part_bytes


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.perplexity",
        description="Perplexity of a model by the format of its weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    formats = ["none", "int8", "int4:64"]
    add("--target", default="smollm2", help="model directory or GGUF file, or a name of fetch")
    add("--dtype", choices=DTYPES, default="float32", help="of activations and other weights")
    add("--weights", nargs="+", default=formats, help="formats; none: dequantized")
    add("--prompts", choices=(prompts.STDLIB, prompts.FILES), default=prompts.STDLIB, help="texts")
    add("--prompt-path", help="with --prompts files, a text or a folder of texts")
    add("--requests", type=int, default=16, help="texts")
    add("--context", type=token_count, default=1024, help="tokens of each text")
    add("--out", type=pathlib.Path, help="write the table to this CSV file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints and writes the table; returns the exit status."""
    command = parser()
    args = command.parse_args(argv)
    try:
        rows = measure(args)
    except (OSError, ValueError) as error:
        command.error(str(error))
    print(record_table(rows))
    if args.out is not None:
        write_atomically(args.out, pd.DataFrame(rows).to_csv(index=False))
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each format.

    Raises:
      OSError, ValueError: as `magicjax.load`, or the model cannot read texts of this length.
    """
    rows: list[dict[str, Any]] = []
    if args.requests < 1 or args.context < 2:
        raise ValueError("--requests must be at least 1, and --context at least 2")
    check_context(args.target, args.context)
    for form in args.weights:
        skeleton(args.target, args.dtype, weights=form)  # raises before a model is loaded
    best: list[np.ndarray] = []
    for form in args.weights:
        target = magicjax.load(args.target, args.dtype, weights=form)
        texts = prompts.make(
            args.prompts, target.tokenizer, args.prompt_path or "", args.requests, args.context
        )
        log_probs, predicted = zip(*(score(target, text.tokens) for text in texts), strict=True)
        best.append(np.stack(predicted))
        rows.append(
            {
                "weights": form,
                "MB of weights": part_bytes(target.params) / 1e6,
                "perplexity": float(np.exp(-np.mean(log_probs))),
                "same token": float(np.mean(best[-1] == best[0])),
            }
        )
    return rows


@jax.jit
def score(
    target: magicjax.Model, text: Int[Array, "T"]
) -> tuple[Float[Array, "T-1"], Int[Array, "T"]]:
    """Returns the log-probabilities of a text's tokens, and the most likely token after each."""
    logits = teacher.logits(target, text[None])[0].astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), text[1:, None], 1)[:, 0]
    return chosen, logits.argmax(-1)


if __name__ == "__main__":
    raise SystemExit(main())
