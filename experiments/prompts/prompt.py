"""What a prompt is, how text becomes its tokens, and how well a text answers it."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from jaxtyping import Int

PROBE = "x"  # any short text


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt and the right answer to its question.

    Attributes:
      tokens: int32 [T].
      answer: every text that a right answer holds, in any order; none if nothing is asked.
      alternatives: whether one of these texts is enough.
      source: which of many texts it is from, a file's name and an id; "" of one long text.
    """

    tokens: Int[np.ndarray, "T"]
    answer: tuple[str, ...] = ()
    alternatives: bool = False
    source: str = ""


def score(prompt: Prompt, text: str) -> float:
    """Returns the share of the prompt's answers that stand in the text, in capitals or not.

    RULER's string match: where the answers are alternatives, one of them is all. NaN if nothing is
    asked.
    """
    if not prompt.answer:
        return math.nan
    said = text.casefold()
    found = [answer.casefold() in said for answer in prompt.answer]
    return float(any(found)) if prompt.alternatives else sum(found) / len(found)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the text's tokens and no other: what looks like a special token is text too."""
    return tokenizer.encode(
        text, add_special_tokens=False, split_special_tokens=True, verbose=False
    )


@functools.lru_cache(maxsize=512)
def tokens_of(tokenizer: Any, text: str) -> Int[np.ndarray, " n"]:
    """Returns int32 [n]: `encode`, kept for prompts of another length from the same text."""
    return np.array(encode(tokenizer, text), np.int32)


def opening(tokenizer: Any) -> list[int]:
    """Returns the special tokens that a tokenizer puts before every text, often one or none.

    What it puts behind a text is left out: a prompt is there to go on.
    """
    plain = encode(tokenizer, PROBE)
    whole = tokenizer.encode(PROBE, split_special_tokens=True, verbose=False)
    starts = range(len(whole) - len(plain) + 1)
    first = next((s for s in starts if whole[s : s + len(plain)] == plain), None)
    if first is None:
        raise ValueError(
            f"the tokenizer makes {plain} of {PROBE!r}, and {whole} with special tokens, where the "
            "former is not to be found: prompts need one that only puts tokens around a text"
        )
    return whole[:first]


def join(begin: list[int], tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, "T"]:
    """Returns int32: the tokens behind those that every prompt begins with."""
    return np.concatenate([np.array(begin, np.int32), tokens.astype(np.int32)])
