"""The prompt type, encoding of text, and the score of an answer."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from jaxtyping import Int

PROBE = "x"  # any short text


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt and its correct answer.

    Attributes:
      tokens: int32 [T].
      answer: texts that a correct answer contains, in any order; empty if nothing is asked.
      alternatives: whether one of these texts suffices.
      source: file name and record of the text; "" for one long text.
    """

    tokens: Int[np.ndarray, "T"]
    answer: tuple[str, ...] = ()
    alternatives: bool = False
    source: str = ""


def score(prompt: Prompt, text: str) -> float:
    """Returns the share of the prompt's answers in the text, ignoring case (RULER's string match).

    One of several alternatives gives 1. NaN if nothing is asked.
    """
    if not prompt.answer:
        return math.nan
    matches = [answer.casefold() in text.casefold() for answer in prompt.answer]
    return float(any(matches)) if prompt.alternatives else sum(matches) / len(matches)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text, without special tokens; their text is encoded as text."""
    if tokenizer is None:
        raise ValueError("the target has no tokenizer, which prompts of text need")
    return tokenizer.encode(
        text, add_special_tokens=False, split_special_tokens=True, verbose=False
    )


@functools.lru_cache(maxsize=512)
def encode_cached(tokenizer: Any, text: str) -> Int[np.ndarray, " n"]:
    """Returns `encode` as int32 [n], cached for prompts of other lengths from the same text."""
    return np.array(encode(tokenizer, text), np.int32)


def leading_tokens(tokenizer: Any) -> list[int]:
    """Returns the special tokens that a tokenizer puts before a text, usually one or none.

    Special tokens after a text are omitted, because a model continues a prompt.
    """
    plain = encode(tokenizer, PROBE)
    whole = tokenizer.encode(PROBE, split_special_tokens=True, verbose=False)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    raise ValueError(
        f"the tokenizer encodes {PROBE!r} as {plain}, and as {whole} with special tokens, which "
        "does not contain the former: use a tokenizer that only adds tokens around a text"
    )


def join(leading: list[int], tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, "T"]:
    """Returns int32: the leading tokens, then the others."""
    return np.concatenate([np.array(leading, np.int32), tokens.astype(np.int32)])
