"""Logits of plain decoding with penalties and excluded tokens, by their definitions in numpy."""

from collections.abc import Sequence

import numpy as np


def processed(
    logits: np.ndarray,
    prompt: Sequence[int],
    text: Sequence[int],
    eos: Sequence[int] = (),
    *,
    sequences: Sequence[Sequence[int]] = (),
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Sequence[tuple[int, float]] = (),
    allowed_token_ids: Sequence[int] | None = None,
    min_tokens: int = 0,
) -> np.ndarray:
    """Returns the logits of the token after a text, of one row.

    Args:
      logits: [V], of the model.
      prompt, text: tokens before and so far.
      eos: tokens that end the text.
      sequences: excluded ones, of tokens.
      repetition_penalty, frequency_penalty, presence_penalty, logit_bias, allowed_token_ids,
        min_tokens: of `magicjax.SamplingParams`.
    """
    x = np.array(logits, float)
    for token, bias in logit_bias:
        x[token] += bias
    if allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in allowed_token_ids]] = -np.inf
    excluded = list(eos) if len(text) < min_tokens else []
    for *before, last in sequences:
        if list(text[len(text) - len(before) :]) == before:
            excluded.append(last)
    left = x.copy()
    left[excluded] = -np.inf
    if left.max() > -np.inf:
        x = left
    for token in {*prompt, *text}:
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token in text:
        x[token] -= frequency_penalty
    for token in {*text}:
        x[token] -= presence_penalty
    return x
