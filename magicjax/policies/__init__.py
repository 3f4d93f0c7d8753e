"""Policies: which tokens of a long text a sparse draft cache pins. A policy scores the entries."""

from magicjax.policies.attention_mass import H2O, TOVA, PyramidKV, SnapKV
from magicjax.policies.base import Evidence, Policy, RecentQueries, choose
from magicjax.policies.expected_attention import ExpectedAttention
from magicjax.policies.query_free import KeyDiff, KNorm, Random, StreamingLLM
from magicjax.policies.registry import GROUP, POLICIES, get_policy

__all__ = [
    "GROUP",
    "H2O",
    "POLICIES",
    "TOVA",
    "Evidence",
    "ExpectedAttention",
    "KNorm",
    "KeyDiff",
    "Policy",
    "PyramidKV",
    "Random",
    "RecentQueries",
    "SnapKV",
    "StreamingLLM",
    "choose",
    "get_policy",
]
