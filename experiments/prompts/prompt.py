"""The prompt type, encoding of text, and the score of an answer."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
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
      category: what is asked for, such as "math"; "" for text alone.
      final: a regular expression. If it is set, its last match in a text without commas is the
        text's answer, which must equal one of `answer`.
    """

    tokens: Int[np.ndarray, "T"]
    answer: tuple[str, ...] = ()
    alternatives: bool = False
    source: str = ""
    category: str = ""
    final: str = ""


def score(prompt: Prompt, text: str) -> float:
    """Returns the share of the prompt's answers in the text, ignoring case (RULER's string match).

    One of several alternatives gives 1, and so does a final answer (`Prompt.final`) that is right.
    NaN if nothing is asked.
    """
    if not prompt.answer:
        return math.nan
    if prompt.final:
        answers = re.findall(prompt.final, text.replace(",", ""))
        return float(bool(answers) and answers[-1] in prompt.answer)
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
    with_special = tokenizer.encode(PROBE, split_special_tokens=True, verbose=False)
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    raise ValueError(
        f"the tokenizer encodes {PROBE!r} as {plain}, and as {with_special} with special tokens, "
        "which does not contain the former: use a tokenizer that only adds tokens around a text"
    )


def join(*parts: Sequence[int] | Int[np.ndarray, " n"]) -> Int[np.ndarray, "T"]:
    """Returns int32: the tokens of all parts."""
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def without_middle(tokens: Int[np.ndarray, " n"], length: int) -> Int[np.ndarray, "T"]:
    """Returns the first and the last tokens, `length` of them (LongBench's truncation)."""
    half = length // 2
    return np.concatenate([tokens[:half], tokens[len(tokens) - (length - half) :]])
