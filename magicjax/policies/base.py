"""What a policy is, and how one is found by its name."""

import difflib
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Int

from magicjax.cache import KVCache


@runtime_checkable
class Policy(Protocol):
    """A frozen, hashable class that chooses the pinned entries of a draft cache."""

    def num_pinned(self, budget: int) -> int:
        """Returns P, how many of the budget's slots are pinned; the others form the ring."""

    def pins(self, cache: KVCache, budget: int) -> tuple[Int[Array, "B K P"], ...]:
        """Returns, for each layer, which positions are pinned in rows longer than the budget.

        Args:
          cache: the target's keys and values after prefill, with lengths [B].
          budget: C; positions must be distinct and below lengths - (C - P).
        """


def find(policy: "str | Policy") -> Policy:
    """Returns the policy of that name with its default settings, or `policy` itself.

    Raises:
      ValueError: no such name; the nearest is named.
      TypeError: neither a name nor a policy.
    """
    from magicjax.policies.streaming import StreamingLLM

    if isinstance(policy, Policy) and not isinstance(policy, type):
        return policy
    if not isinstance(policy, str):
        raise TypeError(
            f"policy={policy!r} is neither a name nor an object with the Policy methods"
        )
    known = {"streaming": StreamingLLM}
    if policy not in known:
        nearest = difflib.get_close_matches(policy, known, 1, 0.0)[0]
        raise ValueError(
            f"policy={policy!r} is unknown: did you mean {nearest!r}? "
            f"It must be one of {', '.join(sorted(known))}, or an object with the Policy methods"
        )
    return known[policy]()
