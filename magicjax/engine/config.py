"""The configuration of an engine: what is fixed when it is created."""

import dataclasses
from collections.abc import Sequence

import jax

from magicjax.checks import check_real, check_whole
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.suggest import explain_unknown
from magicjax.verification.logprobs import MAX_ALTERNATIVES

MAX_SLOTS = 2**16
MAX_CAPACITY = 4096  # default limit: a model's own one can need more memory than the device has
MAX_STOP_TOKENS = 16  # of a request, beside EOS: all requests share shapes
MAX_PREFILLS = 2  # at once, each in a row of its own: a short prompt overtakes a long one


@explain_unknown
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The shapes, limits and features of an engine, which its requests share.

    ::

        config = magicjax.EngineConfig(slots=8, capacity=2048, sampling=True)
        engine = magicjax.Engine(target, "self:streaming:256", "chain:4", config)

    Attributes:
      slots: the most requests that are decoded at once; a multiple of the mesh's `data`.
      capacity: the most tokens of a request, prompt and new ones; None for the target's positions,
        and at most 4,096. Each slot holds as many, and some for a step of prefill.
      max_tokens: the limit of any request's new tokens; at most capacity - 1 are used.
      sampling: whether requests may have a temperature above 0; an engine without is faster.
      verifier: the rule that accepts drafted tokens, as for `magicjax.generate`; None for greedy,
        or with sampling for mss, and for naive if adaptive, or if the drafter remembers texts.
      eos_token_id: ends a text, one id or several; None for those of the target, [] for none.
      prefill_chunk: the most prompt tokens that a step prefills. A policy that sums the attention
        of all prompt tokens, such as h2o, prefills each prompt at once.
      rounds_per_step: the most rounds of a call of the loop, which also ends when a request does.
        New requests, text and cancellations wait for the end of a call.
      max_stall_ms: the longest pause between two texts of a request that prefill of others and the
        rounds of a call may cause, as measured; at least one round and 16 prompt tokens run. Copies
        of rows, log-probabilities of prompts, the drafter's own prefill, and policies that sum the
        attention of all prompt tokens are not bounded. None: no bound.
      adaptive: whether each call of the loop runs what has the most expected tokens per second:
        plain decoding, or a drafter with a depth up to that of its tree. Rounds of each are
        compiled and timed by `Engine.warm_up`, or before the first request. Sampled requests are
        then verified by naive, whose text does not depend on what drafts. A draft model does not
        draft any more for requests that have decoded plainly.
      queue_limit: the most requests that wait for a slot.
      prefix_bytes: the most bytes of prompts and answers that are stored on the device, on a mesh
        in each group of devices; 0 to store none; None for as many rows as slots, at most 4.
      host_prefix_bytes: the most bytes of those that the device has no room for, in host memory.
      grammars: whether requests may have grammars, whose rounds are programs of their own.
      logits_processors: whether requests may have penalties, logit_bias, allowed_token_ids,
        bad_words, min_tokens and thinking_token_budget.
      logprobs: the most alternatives whose log-probabilities a request may ask for, 0 to 20; None
        for no log-probabilities.
      backend: of attention and products, as for `magicjax.generate`.

    Raises:
      ValueError, TypeError: a value of another type or outside its range. `Engine` validates the
        verifier, EOS and the backend.
    """

    slots: int = 8
    capacity: int | None = None
    max_tokens: int = 512
    sampling: bool = False
    verifier: str | None = None
    eos_token_id: int | Sequence[int] | None = None
    prefill_chunk: int = 512
    rounds_per_step: int = 8
    adaptive: bool = False
    max_stall_ms: float | None = None
    queue_limit: int = 1024
    prefix_bytes: int | None = None
    host_prefix_bytes: int = 0
    grammars: bool = False
    logits_processors: bool = False
    logprobs: int | None = None
    backend: str | None = None

    def __post_init__(self):
        check_whole("slots", self.slots, 1, MAX_SLOTS)
        if self.capacity is not None:
            check_whole("capacity", self.capacity, 2)
        for name in ("max_tokens", "prefill_chunk", "rounds_per_step", "queue_limit"):
            check_whole(name, getattr(self, name), 1)
        if self.prefix_bytes is not None:
            check_whole("prefix_bytes", self.prefix_bytes, 0)
        if self.max_stall_ms is not None:
            check_real("max_stall_ms", self.max_stall_ms, "None for no bound")
            if not self.max_stall_ms > 0:
                raise ValueError(
                    f"max_stall_ms={self.max_stall_ms}: it must be above 0; None for no bound"
                )
        check_whole("host_prefix_bytes", self.host_prefix_bytes, 0)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, MAX_ALTERNATIVES)
        for name in ("sampling", "adaptive", "grammars", "logits_processors"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r}: it must be True or False")

    def for_target(self, target: Model, drafter: Drafter | None) -> "EngineConfig":
        """Returns the configuration with the capacity, limit and verifier that are used.

        Raises:
          ValueError: a capacity beyond the target's positions.
        """
        positions = target.config.max_positions
        capacity = min(positions, MAX_CAPACITY) if self.capacity is None else self.capacity
        if capacity > positions:
            raise ValueError(
                f"capacity={capacity}: it must be at most the {positions} positions of the target"
            )
        verifier, remembers = self.verifier, getattr(drafter, "remembers", False)
        if verifier is None and self.sampling and (self.adaptive or remembers):
            verifier = "naive"
        limit = min(self.max_tokens, capacity - 1)
        return dataclasses.replace(self, capacity=capacity, max_tokens=limit, verifier=verifier)

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError for what the engine was not created for."""
        if not params.greedy and not self.sampling:
            raise ValueError(
                f"temperature={params.temperature:g}: the engine decodes greedily; use "
                "temperature=0, or create the engine with sampling=True"
            )
        if params.grammar is not None and not self.grammars:
            raise ValueError(
                "grammar in an engine without grammars: create the engine with grammars=True"
            )
        if params.changes_logits and not self.logits_processors:
            raise ValueError(
                "penalties, logit_bias, allowed_token_ids, bad_words, min_tokens and "
                "thinking_token_budget in an engine without them: create the engine with "
                "logits_processors=True"
            )
        if (count := len(params.stop_token_ids)) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids has {count} tokens: an engine supports at most {MAX_STOP_TOKENS}"
            )
        limit = self.logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is None or (limit is not None and count <= limit):
                continue
            returns = "no log-probabilities" if limit is None else f"at most {limit}"
            raise ValueError(
                f"{name}={count}: the engine returns {returns}; "
                f"{'omit it' if limit is None else 'request fewer'}, or create the engine with "
                f"logprobs={count}"
            )
        if params.max_tokens is not None and params.max_tokens > self.max_tokens:
            raise ValueError(
                f"max_tokens={params.max_tokens}: it must be at most {self.max_tokens}, the limit "
                "of the engine, or None for as many as fit"
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
