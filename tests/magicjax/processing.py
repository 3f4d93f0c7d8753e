"""Logits of plain decoding with penalties and excluded tokens, by their definitions in numpy."""

from collections.abc import Sequence

import numpy as np

MARKERS = (1, 2)  # <think> and </think>, unless a test has others


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
    thinking_token_budget: int | None = None,
) -> np.ndarray:
    """Returns the logits of the token after a text, of one row.

    Args:
      logits: [V], of the model.
      prompt, text: tokens before and so far.
      eos: tokens that end the text.
      sequences: excluded ones, of tokens.
      repetition_penalty, frequency_penalty, presence_penalty, logit_bias, allowed_token_ids,
        min_tokens, thinking_token_budget: of `magicjax.SamplingParams`; the markers are MARKERS.
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
    return x if thinking_token_budget is None else ended(x, prompt, text, thinking_token_budget)


def ended(
    logits: np.ndarray,
    prompt: Sequence[int],
    text: Sequence[int],
    budget: int,
    markers: Sequence[int] = MARKERS,
) -> np.ndarray:
    """Returns the logits after a text, of </think> alone if the reasoning has a budget of tokens.

    Args:
      logits, prompt, text: as for `processed`.
      budget: of tokens after <think>, which the prompt ends with or the text begins with.
      markers: the tokens <think> and </think>, and others that end the reasoning.
    """
    begin, end, *others = markers
    both = [*prompt[-1:], *text]
    begun = [i for i in range(2) if both[i : i + 1] == [begin]]
    if not begun or {end, *others} & {*both[begun[0] + 1 :]} or logits[end] == -np.inf:
        return logits
    if len(both) - begun[0] - 1 < budget:
        return logits
    return np.where(np.arange(len(logits)) == end, logits, -np.inf)
