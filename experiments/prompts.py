"""Prompts from modules that no embedded model was trained on, as they are or with a task in them.

Held-out modules make one stream of tokens; prompts are its stretches that end at evenly spaced
places. Greedy text of a small model soon repeats itself, and a loop is easy to draft. So more
places are tried than there are rows, and the rows are those whose text repeats itself least.
Prompts of synthetic tasks (`synthetic.py`) are taken as they come.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments import corpus, metrics, synthetic

HELD_OUT = "held_out"
SEED = 0  # of the synthetic tasks: the seed of sampling changes no prompt


def held_out_stream(tokenizer: Any, modules: list[corpus.Module] | None = None) -> np.ndarray:
    """Returns int32 [n]: the held-out modules' tokens, each followed by the end token.

    The split goes by paths, so it holds for any version of Python; the text is that of the one
    that runs, and so prompts, and timings a little, differ between versions.
    """
    if modules is None:
        _, modules = corpus.split(corpus.library())
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: prompts are made from text")
    stream: list[int] = []
    for module in modules:
        stream += tokenizer.encode(module.text, add_special_tokens=False, verbose=False)
        if tokenizer.eos_token_id is not None:
            stream.append(tokenizer.eos_token_id)
    return np.array(stream, np.int32)


def cut(stream: Int[np.ndarray, " n"], count: int, context: int) -> np.ndarray:
    """Returns int32 [count, context], stretches that end at evenly spaced places.

    With n = 100, count = 2, context = 60: they end before tokens 70 and 90. Stretches may overlap;
    no two are the same.

    Raises:
      ValueError: the stream is too short.
    """
    room = len(stream) - context
    if room < count:
        raise ValueError(
            f"{count} prompts of context={context} need {context + count} tokens, but the held-out "
            f"text has {len(stream)}: choose a context of at most {len(stream) - count}, or a "
            "longer text"
        )
    ends = context + (2 * np.arange(count) + 1) * room // (2 * count)
    return np.stack([stream[end - context : end] for end in ends])


def make(
    kind: str, tokenizer: Any, stream: Int[np.ndarray, " n"], count: int, context: int
) -> list[synthetic.Prompt]:
    """Returns `count` prompts of `context` tokens each.

    Args:
      kind: `held_out`, or the name of a synthetic task.
      tokenizer, stream: the target's, and the held-out text in its tokens.
      count, context: how many, and how long.

    Raises:
      ValueError: the text is too short, or the context too short or too long for the task.
    """
    if kind == HELD_OUT:
        return [synthetic.Prompt(row) for row in cut(stream, count, context)]
    task = synthetic.TASKS[kind]
    return [task(tokenizer, stream, context, SEED, row) for row in range(count)]


def least_repetitive(
    candidates: Int[np.ndarray, "N T"],
    batch: int,
    continue_: Callable[[Int[np.ndarray, "B T"]], Int[np.ndarray, "B M"]],
) -> Int[np.ndarray, "B T"]:
    """Returns the `batch` candidates whose continuation repeats itself least, in their order.

    Args:
      candidates: prompts; N is a multiple of `batch`.
      batch: how many are wanted, and how many are continued at once.
      continue_: gives the plain greedy continuation of `batch` prompts.
    """
    if len(candidates) == batch:
        return candidates
    parts = [continue_(part) for part in np.split(candidates, len(candidates) // batch)]
    repeated = [metrics.repeated_ngrams(row[None]) for part in parts for row in part]
    return candidates[np.sort(np.argsort(repeated, kind="stable")[:batch])]
