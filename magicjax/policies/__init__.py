"""Which tokens of a long text a draft cache pins. A policy scores entries; gathering is shared."""

from magicjax.policies.attention_mass import H2O, TOVA
from magicjax.policies.base import Evidence, Policy, Queries, choose
from magicjax.policies.expected_attention import ExpectedAttention
from magicjax.policies.full import Full
from magicjax.policies.key_geometry import KeyDiff, KNorm, Random
from magicjax.policies.registry import GROUP, POLICIES, find
from magicjax.policies.snapkv import PyramidKV, SnapKV
from magicjax.policies.streaming import StreamingLLM

__all__ = [
    "GROUP",
    "H2O",
    "POLICIES",
    "TOVA",
    "Evidence",
    "ExpectedAttention",
    "Full",
    "KNorm",
    "KeyDiff",
    "Policy",
    "PyramidKV",
    "Queries",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "choose",
    "find",
]
