"""What a request asks of the target's text: how tokens are chosen, and where the text ends."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from magicjax.checks import check_real, check_whole
from magicjax.grammars.grammar import Grammar
from magicjax.suggest import explain_unknown
from magicjax.verification.logprobs import MAX_ALTERNATIVES

MAX_SEED = 2**32 - 1
LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are 0 on some devices


@explain_unknown
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a text are chosen, and where it ends.

    ::

        magicjax.generate(target, prompts, magicjax.SamplingParams(temperature=0.7, max_tokens=64))

    Attributes:
      temperature: divides the logits; 0 for greedy decoding, which takes the most likely tokens.
      top_k: sample from this many of the most likely tokens; 0 for all.
      top_p: of the tokens that top_k keeps, sample from the fewest most likely ones whose
        probabilities sum to top_p; 1 for all.
      min_p: before top_k, leave out tokens whose probability is below min_p times the highest one;
        0 for none.
      repetition_penalty: divides the positive logits of tokens that the prompt or the text has, and
        multiplies negative ones; 1 for none.
      frequency_penalty: is subtracted from the logit of a token for each time that the text has it.
      presence_penalty: is subtracted once from the logits of the tokens that the text has.
      logit_bias: numbers that are added to the logits of tokens, by token id.
      allowed_token_ids: the only tokens that may be sampled, EOS included; None for all.
      bad_words: strings that are not generated: the last token of each of their tokenizations, at
        the beginning of a text and after a space, is excluded where it would complete them.
      seed: of the random numbers, 0 to 2**32 - 1; the same seed gives the same text. Like top_k,
        top_p and min_p, it changes nothing in greedy decoding.
      max_tokens: the most new tokens; None for as many as fit; 0 in an engine for none, with
        `prompt_logprobs`.
      min_tokens: new tokens before EOS and `stop_token_ids` are allowed; stop strings end the text
        even before.
      ignore_eos: EOS does not end the text.
      thinking_token_budget: tokens of the reasoning between <think> and </think> after which the
        next one is </think>; None for any number.
      stop: strings that end the text, which is cut before the first one. They may span
        tokens. Special tokens are found by their names. None for none.
      stop_token_ids: tokens that end the text beside EOS; their own text is left out. None for
        none.
      grammar: what the text must match. Tokens that it does not allow have probability 0, and the
        text ends with EOS where the grammar allows its end.
      speculative: False: the text is decoded without drafts, one token a round; under sampling, it
        is that of plain sampling with the seed.
      logprobs: return the log-probabilities of the new tokens, and of this many of the most likely
        tokens at their positions, 0 to 20; None for none.
      prompt_logprobs: the same for the tokens of the prompt, except for the first one; it takes a
        second pass over the prompt.

    Raises:
      ValueError, TypeError: a value of another type or outside these ranges; a grammar with
        parameters that exclude tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int = 0
    max_tokens: int | None = 128
    min_tokens: int = 0
    ignore_eos: bool = False
    thinking_token_budget: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    grammar: Grammar | None = None
    speculative: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        check_real("temperature", self.temperature, "0 for greedy decoding")
        if self.temperature != 0 and not TINY <= self.temperature <= LARGEST:
            raise ValueError(
                f"temperature={self.temperature}: it must be 0 for greedy decoding, or at least "
                f"{TINY:.1e} and finite in float32"
            )
        check_whole("top_k", self.top_k, 0, hint="0 for all tokens")
        check_real("top_p", self.top_p, "1 for all tokens")
        if not TINY <= self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p}: it must be above 0 and at most 1, for all tokens"
            )
        check_real("min_p", self.min_p, "0 for all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: it must be from 0, for all tokens, to 1")
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 0, hint="None for as many as fit")
        self._check_processors()
        check_whole("seed", self.seed, 0, MAX_SEED, "the default is 0")
        for field in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, field)) is not None:
                check_whole(field, count, 0, MAX_ALTERNATIVES)
        if not isinstance(self.grammar, Grammar | None):
            raise TypeError(
                f"grammar has type {type(self.grammar).__name__}: pass a magicjax.Grammar, such as "
                "Grammar.regex(...) or Grammar.json_schema(...)"
            )
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        ids = _token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_processors(self) -> None:
        """Checks what changes logits, and makes it hashable."""
        check_real("repetition_penalty", self.repetition_penalty, "1 for none")
        if not TINY <= self.repetition_penalty <= LARGEST:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: it must be above 0; 1 for none"
            )
        bias = self.logit_bias
        pairs = tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)
        for name in ("frequency_penalty", "presence_penalty"):
            _check_finite(name, getattr(self, name))
        for token, value in pairs:
            check_whole("a token of logit_bias", token, 0)
            _check_finite(f"logit_bias[{token}]", value)
        token, count = Counter(token for token, _ in pairs).most_common(1)[0] if pairs else (0, 0)
        if count > 1:
            raise ValueError(f"logit_bias has token {token} {count} times: pass one bias for each")
        object.__setattr__(self, "logit_bias", tuple(sorted((int(t), float(x)) for t, x in pairs)))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise ValueError("allowed_token_ids is empty: pass at least one token, or None")
            object.__setattr__(self, "allowed_token_ids", ids)
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}: reduce it"
            )
        if self.thinking_token_budget is not None:
            check_whole("thinking_token_budget", self.thinking_token_budget, 0, hint="None for all")
        for name in ("ignore_eos", "speculative"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r}: it must be True or False")
        if self.grammar is not None:
            for field in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos"):
                if getattr(self, field):
                    raise ValueError(
                        f"{field} with a grammar may leave no token: express it in the grammar"
                    )

    @property
    def changes_logits(self) -> bool:
        """Whether there are biases, penalties, excluded or forced tokens, the grammar aside."""
        penalties = self.repetition_penalty != 1, self.frequency_penalty, self.presence_penalty
        excluded = self.allowed_token_ids is not None, self.bad_words, self.min_tokens
        is_forced = self.thinking_token_budget is not None
        return any((*penalties, self.logit_bias, *excluded, is_forced))

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature == 0

    def end_tokens(self, eos: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that end the text, given those of EOS."""
        return (*(() if self.ignore_eos else eos), *self.stop_token_ids)


def _check_finite(name: str, value: Any) -> None:
    check_real(name, value, "0 for none")
    if not math.isfinite(np.float32(value)):
        raise ValueError(f"{name}={value}: it must be finite")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Returns sorted token ids, each once."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise TypeError(f"{name}={value!r}: it must be a list of token ids")
    value = tuple(value)
    for token in value:
        check_whole(f"a token of {name}", token, 0)
    return tuple(sorted({int(token) for token in value}))


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | Sequence):
        raise TypeError(f"{name}={value!r}: it must be a string, or a list of strings")
    strings = (value,) if isinstance(value, str) else tuple(value)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"{name}={value!r}: {string!r} is not a string")
        if not string:
            raise ValueError(f"{name}={string!r}: a string must have at least 1 character")
    return strings
