"""Which tokens of a long text a draft cache pins. A policy picks positions; gathering is shared."""

from magicjax.policies.base import Policy, find
from magicjax.policies.streaming import StreamingLLM

__all__ = ["Policy", "StreamingLLM", "find"]
