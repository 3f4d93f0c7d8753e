"""What a request asks of the target's text: how tokens are chosen, and where the text ends."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from magicjax.checks import OptionError, OptionTypeError, check_number
from magicjax.grammars.grammar import Grammar
from magicjax.options import check_options, documented, options_of, setting
from magicjax.suggest import explain_unknown
from magicjax.verification.logprobs import MAX_ALTERNATIVES

MAX_SEED = 2**32 - 1
FILTERS = ("top_n_sigma", "top_k", "top_p", "min_p")  # without effect in greedy decoding
PROCESSORS = (  # of logits
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "thinking_token_budget"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
UNCONSTRAINED = ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos")  # or a grammar


@explain_unknown
@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a text are chosen, and where it ends.

    ::

        magicjax.generate(target, prompts, magicjax.SamplingParams(temperature=0.7, max_tokens=64))

    {attributes}

    Raises:
      ValueError, TypeError: a value of another type or outside these ranges; a grammar with
        parameters that exclude tokens.
    """

    temperature: float = setting(
        0.0,
        "divides the logits; 0 for greedy decoding, which takes the most likely tokens",
        ge=0,
        hint="0 for greedy decoding",
    )
    top_k: int = setting(
        0, "sample from this many of the most likely tokens; 0 for all", ge=0, hint="0 for all"
    )
    top_p: float = setting(
        1.0,
        "of the tokens that `top_k` keeps, sample from the fewest most likely ones whose "
        "probabilities sum to `top_p`; 1 for all",
        gt=0,
        le=1,
        hint="1 for all tokens",
    )
    min_p: float = setting(
        0.0,
        "before `top_k`, exclude tokens whose probability is below `min_p` times the highest "
        "one; 0 for none",
        ge=0,
        le=1,
        hint="0 for all tokens",
    )
    top_n_sigma: float = setting(
        0.0,
        "before the other filters, exclude tokens whose logits are more than this many standard "
        "deviations of the logits below the highest one, as in llama.cpp; 0 for none",
        ge=0,
        hint="0 for all tokens",
    )
    repetition_penalty: float = setting(
        1.0,
        "divides the positive logits of tokens that the prompt or the text has, and multiplies "
        "negative ones; 1 for none",
        gt=0,
        hint="1 for none",
    )
    frequency_penalty: float = setting(
        0.0, "is subtracted from the logit of a token for each time that the text has it"
    )
    presence_penalty: float = setting(
        0.0, "is subtracted once from the logits of the tokens that the text has"
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = setting(
        (), "numbers that are added to the logits of tokens, by token id"
    )
    allowed_token_ids: Sequence[int] | None = setting(
        None, "the only tokens that may be sampled, EOS included; None for all"
    )
    bad_words: Sequence[str] = setting(
        (),
        "strings that are not generated: the last token of each of their tokenizations, at the "
        "beginning of a text and after a space, is excluded where it would complete them",
    )
    seed: int = setting(
        0,
        "seed of the random numbers: the same call gives the same text again. With the verifier "
        "mss the text also depends on the drafter and its tree. It changes nothing in greedy "
        f"decoding, like {', '.join(f'`{name}`' for name in FILTERS)}",
        ge=0,
        le=MAX_SEED,
    )
    max_tokens: int | None = setting(
        128,
        "the most new tokens; None for as many as fit; 0 in an engine for none, with "
        "`prompt_logprobs`",
        ge=0,
        hint="None for as many as fit",
    )
    min_tokens: int = setting(
        0,
        "new tokens before EOS and `stop_token_ids` are allowed; stop strings end the text even "
        "before",
        ge=0,
        le=2**31 - 1,
    )
    ignore_eos: bool = setting(False, "EOS does not end the text")
    thinking_token_budget: int | None = setting(
        None,
        "tokens of the reasoning between <think> and </think> after which the next one is "
        "</think>; None for any number",
        ge=0,
        hint="None for any number",
    )
    stop: str | Sequence[str] = setting(
        (),
        "strings that end the text, which is cut before the first one. They may span tokens. "
        "Special tokens are found by their names",
    )
    stop_token_ids: Sequence[int] = setting(
        (), "tokens that end the text beside EOS; their own text is omitted"
    )
    grammar: Grammar | None = setting(
        None,
        "what the text must match. Tokens that it does not allow have probability 0, and the text "
        "ends with EOS where the grammar allows its end",
    )
    speculative: bool = setting(
        True,
        "False: the text is decoded without drafts, one token a round; under sampling, it is that "
        "of plain sampling with the seed",
    )
    logprobs: int | None = setting(
        None,
        "return the log-probabilities of the new tokens, and of this many of the most likely "
        "tokens at their positions; None for no log-probabilities",
        ge=0,
        le=MAX_ALTERNATIVES,
    )
    prompt_logprobs: int | None = setting(
        None,
        "the same for the tokens of the prompt, except for the first one; it takes a second pass "
        "over the prompt",
        ge=0,
        le=MAX_ALTERNATIVES,
    )

    def __post_init__(self):
        check_options(self, options_of(type(self)).values())
        if not isinstance(self.grammar, Grammar | None):
            raise OptionTypeError(
                f"{{}} has type {type(self.grammar).__name__}: pass a magicjax.Grammar, such as "
                "Grammar.regex(...) or Grammar.json_schema(...)",
                "grammar",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                f"{{}} exceeds the limit of {self.max_tokens} new tokens: reduce it",
                "min_tokens",
                self.min_tokens,
            )
        normalized = {
            "logit_bias": _biases(self.logit_bias),
            "stop": _strings("stop", self.stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        if self.allowed_token_ids is not None:
            normalized["allowed_token_ids"] = _token_ids(
                "allowed_token_ids", self.allowed_token_ids
            )
            if not normalized["allowed_token_ids"]:
                raise OptionError(
                    "{} is empty: pass at least one token, or None", "allowed_token_ids"
                )
        for name, value in normalized.items():  # hashable
            object.__setattr__(self, name, value)
        for name in UNCONSTRAINED:
            if self.grammar is not None and getattr(self, name):
                raise OptionError(
                    "{} with a grammar may leave no token: express it in the grammar", name
                )

    @property
    def processors(self) -> list[str]:
        """The parameters that are set of those that change logits, except for a grammar."""
        return [name for name in PROCESSORS if getattr(self, name) != getattr(type(self), name)]

    @property
    def changes_logits(self) -> bool:
        """Whether there are biases, penalties, excluded or forced tokens, the grammar aside."""
        return bool(self.processors)

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature == 0

    def end_tokens(self, eos: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that end the text, given those of EOS."""
        return (*(() if self.ignore_eos else eos), *self.stop_token_ids)


def _biases(logit_bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns sorted pairs of a token and its bias."""
    pairs = tuple(logit_bias.items()) if isinstance(logit_bias, Mapping) else tuple(logit_bias)
    for token, bias in pairs:
        check_number("logit_bias", token, ge=0, option="a token of {}")
        check_number("logit_bias", bias, float, option=f"the bias of {token} in {{}}")
    token, count = Counter(token for token, _ in pairs).most_common(1)[0] if pairs else (0, 0)
    if count > 1:
        raise OptionError(
            f"{{}} has token {token} {count} times: pass one bias for each", "logit_bias"
        )
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Returns sorted token ids, each once."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise OptionTypeError("{}: it must be a list of token ids", name, value)
    value = tuple(value)
    for token in value:
        check_number(name, token, ge=0, option="a token of {}")
    return tuple(sorted({int(token) for token in value}))


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | Sequence):
        raise OptionTypeError("{}: it must be a string, or a list of strings", name, value)
    strings = (value,) if isinstance(value, str) else tuple(value)
    for string in strings:
        if not isinstance(string, str):
            raise OptionTypeError(f"{{}}: {string!r} is not a string", name, value)
        if not string:
            raise OptionError("{}: a string must have at least 1 character", name, string)
    return strings
