"""Drafters: self-speculation, models, lookups in texts, ensembles and cascades of them."""

from magicjax.drafters.base import Drafter, Previous, RoundOutcome
from magicjax.drafters.cascade import Cascade
from magicjax.drafters.eagle import Eagle
from magicjax.drafters.ensemble import Ensemble
from magicjax.drafters.forced_tokens import ForcedTokens
from magicjax.drafters.full_cache_speculation import FullCacheSpeculation
from magicjax.drafters.mtp import MTP
from magicjax.drafters.page_retrieval import PageRetrieval
from magicjax.drafters.prompt_lookup import PromptLookup
from magicjax.drafters.self_speculation import SelfSpeculation
from magicjax.drafters.small_model import SmallModel
from magicjax.drafters.suffix_lookup import SuffixLookup
from magicjax.trees.proposal import DRAW_METHODS, ONE_HOT, Draws, Proposal

__all__ = [
    "DRAW_METHODS",
    "MTP",
    "ONE_HOT",
    "Cascade",
    "Drafter",
    "Draws",
    "Eagle",
    "Ensemble",
    "ForcedTokens",
    "FullCacheSpeculation",
    "PageRetrieval",
    "Previous",
    "PromptLookup",
    "Proposal",
    "RoundOutcome",
    "SelfSpeculation",
    "SmallModel",
    "SuffixLookup",
]
