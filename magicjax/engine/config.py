"""The configuration of an engine: what is fixed when it is created."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from magicjax.checks import OptionError
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.options import check_options, documented, options_of, setting
from magicjax.sampling_params import PROCESSORS, SamplingParams
from magicjax.suggest import explain_unknown
from magicjax.verification.logprobs import MAX_ALTERNATIVES

MAX_SLOTS = 2**16
MAX_CAPACITY = 4096  # default limit: a model's own one can need more memory than the device has
MAX_STOP_TOKENS = 16  # of a request, beside EOS: all requests share shapes
MAX_PREFILLS = 2  # at once, each in a row of its own: a short prompt overtakes a long one


class EngineLimitError(OptionError):
    """A request asks for what the engine was not created for.

    Attributes:
      config: the argument of `EngineConfig` that would have to differ.
      needed: what to create the engine with, such as "sampling=True".
    """

    def __init__(self, message: str, field: str, value: Any, config: str, needed: str):
        super().__init__(message, field, value)
        self.args, self.config, self.needed = (*self.args, config, needed), config, needed

    def __str__(self) -> str:
        return f"{super().__str__()}, or create the engine with {self.needed}"


@explain_unknown
@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The shapes, limits and features of an engine, which its requests share.

    ::

        config = magicjax.EngineConfig(slots=8, capacity=2048, sampling=True)
        engine = magicjax.Engine(target, "self:streaming:256", "chain:4", config)

    {attributes}

    Raises:
      ValueError, TypeError: a value of another type or outside its range. `Engine` validates the
        verifier, EOS and the backend.
    """

    slots: int = setting(
        8,
        "the most requests that are decoded at once; a multiple of the mesh's `data`",
        ge=1,
        le=MAX_SLOTS,
    )
    capacity: int | None = setting(
        None,
        "the most tokens of a request, prompt and new ones; None for the target's positions, and "
        f"at most {MAX_CAPACITY:,}. Each slot holds as many, and some for a step of prefill",
        ge=2,
    )
    max_tokens: int = setting(
        512, "the limit of any request's new tokens; at most capacity - 1 are used", ge=1
    )
    sampling: bool = setting(
        False, "whether requests may have a temperature above 0; an engine without is faster"
    )
    verifier: str | None = setting(
        None,
        "the rule that accepts drafted tokens, see `magicjax.generate`; None for greedy, or "
        "with sampling for mss, and for naive if adaptive, or if the drafter remembers texts",
    )
    eos_token_id: int | Sequence[int] | None = setting(
        None, "ends a text, one id or several; None for those of the target, [] for none"
    )
    prefill_chunk: int = setting(
        512,
        "the most prompt tokens that a step prefills. A policy that sums the attention of all "
        "prompt tokens, such as h2o, prefills each prompt at once",
        ge=1,
    )
    rounds_per_step: int = setting(
        8,
        "the most rounds of a call of the loop, which also ends when a request does. New requests, "
        "text and cancellations wait for the end of a call",
        ge=1,
    )
    adaptive: bool = setting(
        False,
        "whether each call of the loop runs what has the most expected tokens per second: plain "
        "decoding, or a drafter with a depth up to that of its tree. Rounds of each are compiled "
        "and timed by `Engine.warm_up`, or before the first request. Sampled requests are then "
        "verified by naive, whose text does not depend on what drafts. A draft model does not "
        "draft any more for requests that have decoded plainly",
    )
    max_stall_ms: float | None = setting(
        None,
        "the longest pause between two texts of a request that prefill of others and the rounds of "
        "a call may cause, in milliseconds, as measured; None for no bound. At least one round and "
        "16 prompt tokens run. Copies of rows, log-probabilities of prompts, the drafter's own "
        "prefill, and policies that sum the attention of all prompt tokens are not bounded",
        gt=0,
        hint="None for no bound",
    )
    queue_limit: int = setting(1024, "the most requests that wait for a slot", ge=1)
    prefix_bytes: int | None = setting(
        None,
        "the most bytes of prompts and answers that are stored on the device, on a mesh in each "
        "group of devices; 0 to store none; None for as many rows as slots, at most 4",
        ge=0,
    )
    host_prefix_bytes: int = setting(
        0, "the most bytes of those that the device has no room for, in host memory", ge=0
    )
    grammars: bool = setting(
        False, "whether requests may have grammars, whose rounds are programs of their own"
    )
    logits_processors: bool = setting(
        False,
        f"whether requests may have {', '.join(PROCESSORS)}",
    )
    logprobs: int | None = setting(
        None,
        "the most alternatives whose log-probabilities a request may ask for; None for no "
        "log-probabilities",
        ge=0,
        le=MAX_ALTERNATIVES,
    )
    backend: str | None = setting(
        None, "backend of attention and products, see `magicjax.generate`; None for the default"
    )

    def __post_init__(self):
        check_options(self, options_of(type(self)).values())

    def for_target(self, target: Model, drafter: Drafter | None) -> "EngineConfig":
        """Returns the configuration with the capacity, limit and verifier that are used.

        Raises:
          ValueError: a capacity beyond the target's positions.
        """
        positions = target.config.max_positions
        capacity = min(positions, MAX_CAPACITY) if self.capacity is None else self.capacity
        if capacity > positions:
            raise OptionError(
                f"{{}}: it must be at most the {positions} positions of the target",
                "capacity",
                capacity,
            )
        verifier, remembers = self.verifier, getattr(drafter, "remembers", False)
        if verifier is None and self.sampling and (self.adaptive or remembers):
            verifier = "naive"
        limit = min(self.max_tokens, capacity - 1)
        return dataclasses.replace(self, capacity=capacity, max_tokens=limit, verifier=verifier)

    def check_params(self, params: SamplingParams) -> None:
        """Raises EngineLimitError for what the engine was not created for."""
        if not params.greedy and not self.sampling:
            raise EngineLimitError(
                "{}: decoding is greedy; use temperature=0",
                "temperature",
                params.temperature,
                "sampling",
                "sampling=True",
            )
        if params.grammar is not None and not self.grammars:
            message = "{} is not supported: omit it"
            raise EngineLimitError(message, "grammar", ..., "grammars", "grammars=True")
        if params.processors and not self.logits_processors:
            name, needed = params.processors[0], "logits_processors=True"
            raise EngineLimitError(
                "{} is not supported: omit it", name, ..., "logits_processors", needed
            )
        if (count := len(params.stop_token_ids)) > MAX_STOP_TOKENS:
            raise OptionError(
                f"{{}} has {count} tokens: at most {MAX_STOP_TOKENS} are supported",
                "stop_token_ids",
            )
        limit = -1 if self.logprobs is None else self.logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > limit:
                wanted = (
                    "it is not supported; omit it"
                    if limit < 0
                    else f"it must be at most {limit}; reduce it"
                )
                raise EngineLimitError(
                    f"{{}}: {wanted}", name, count, "logprobs", f"logprobs={count}"
                )
        if params.max_tokens is not None and params.max_tokens > self.max_tokens:
            limiting = "max_tokens", "a larger max_tokens"
            if self.capacity is not None and self.max_tokens >= self.capacity - 1:
                limiting = "capacity", "a larger capacity"
            raise EngineLimitError(
                f"{{}}: it must be at most {self.max_tokens}; reduce it",
                "max_tokens",
                params.max_tokens,
                *limiting,
            )

    def check_drafter(self, drafter: Drafter | None, verifier: str) -> None:
        """Raises ValueError for a verifier or a drafter that the engine does not support."""
        if drafter is not None and drafter.remembers and verifier not in ("greedy", "naive"):
            raise ValueError(
                f"verifier={verifier!r} with a drafter that remembers texts: the text of a seed "
                "would depend on other requests; use verifier='naive', or a drafter that remembers "
                "none, such as suffix:store_tokens=0"
            )
        if not self.adaptive:
            return
        if drafter is None:
            raise ValueError(
                "adaptive=True has no effect without a drafter: pass drafter=..., or use "
                "adaptive=False"
            )
        if verifier not in ("greedy", "naive"):
            raise ValueError(
                f"verifier={verifier!r} with adaptive=True: the text of a seed would depend on "
                "what drafts, and so on other requests; use verifier='naive', or adaptive=False"
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"adaptive=True in {jax.process_count()} processes, whose times differ: use "
                "adaptive=False"
            )

    @property
    def prefill_rows(self) -> int:
        """The most prompts that are prefilled at once, each in a row of its own."""
        return min(MAX_PREFILLS, self.slots)
