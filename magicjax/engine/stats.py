"""Statistics of an engine."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts and times since the engine was created or warmed up; seconds of the wall clock.

    Attributes:
      finished: number of requests by finish reason.
      waiting, running: requests in the queue or in prefill, and in slots.
      new_tokens: of finished requests.
      steps: calls of `Engine.step`.
      loop_s, prefill_s: of the compiled loop, and of the programs that prefill and copy rows.
      host_s: of the steps, without the two before and without compilation: scheduling, transfers
        and detokenization.
      tokens_per_s: new_tokens divided by the sum of the three times.
      prefix_lookups, prefix_hits: prompts looked up in the prefix store, and those that reused
        tokens.
      prefix_host_hits: the hits of prefixes that were in host memory.
      reused_tokens: prompt tokens that were not prefilled.
      prefix_bytes, prefix_host_bytes: of the prefixes on the device and in host memory.
      kv_bytes: of the keys and values of all slots, target and drafter.
      rounds_by_depth: rounds of the loop by the depth of the tree; depth 0 drafts nothing.
    """

    finished: dict[str, int]
    waiting: int
    running: int
    new_tokens: int
    steps: int
    loop_s: float
    prefill_s: float
    host_s: float
    tokens_per_s: float
    prefix_lookups: int
    prefix_hits: int
    prefix_host_hits: int
    reused_tokens: int
    prefix_bytes: int
    prefix_host_bytes: int
    kv_bytes: int
    rounds_by_depth: dict[int, int]
