"""What a request asks of the target's text: how tokens are chosen, and where the text ends."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from magicjax.checks import check_real, check_whole
from magicjax.grammars.grammar import Grammar
from magicjax.suggest import explain_unknown
from magicjax.verification.logprobs import MAX_ALTERNATIVES

MAX_SEED = 2**32 - 1
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
      seed: of the random numbers, 0 to 2**32 - 1; the same seed gives the same text.
      max_tokens: the most new tokens; None for as many as fit.
      stop: strings that end the text, which is cut before the first one. They may span
        tokens. None for none.
      grammar: what the text must match. Tokens that it does not allow have probability 0, and the
        text ends with EOS where the grammar allows its end.
      logprobs: return the log-probabilities of the new tokens, and of this many of the most likely
        tokens at their positions, 0 to 20; None for none.

    Raises:
      ValueError, TypeError: a value of another type or outside these ranges; top_k, top_p or seed
        in greedy decoding.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int | None = 128
    stop: str | Sequence[str] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None

    def __post_init__(self):
        check_real("temperature", self.temperature, "0 for greedy decoding")
        if self.temperature != 0 and not (
            TINY <= self.temperature and math.isfinite(np.float32(self.temperature))
        ):
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
        check_whole("seed", self.seed, 0, MAX_SEED, "the default is 0")
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1, hint="None for as many as fit")
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, MAX_ALTERNATIVES)
        if not isinstance(self.grammar, Grammar | None):
            raise TypeError(
                f"grammar has type {type(self.grammar).__name__}: pass a magicjax.Grammar, such as "
                "Grammar.regex(...) or Grammar.json_schema(...)"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if self.greedy:
            for field in ("top_k", "top_p", "seed"):
                value = getattr(self, field)
                if value != type(self).__dataclass_fields__[field].default:
                    raise ValueError(
                        f"{field}={value} has no effect in greedy decoding: pass a temperature "
                        f"above 0, or omit {field}"
                    )

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature == 0


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if not isinstance(stop, str | Sequence):
        raise TypeError(f"stop={stop!r}: it must be a string, or a list of strings")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop={stop!r}: {string!r} is not a string")
        if not string:
            raise ValueError(f"stop={string!r}: a stop string must have at least 1 character")
    return strings
