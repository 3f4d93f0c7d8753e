"""Who proposes: the target on a sparse cache, small models, the text's own past, or several."""

from magicjax.drafters.base import Drafter, Round
from magicjax.drafters.ensemble import Ensemble
from magicjax.drafters.prompt_lookup import LookUp
from magicjax.drafters.self_speculation import SelfSpeculation
from magicjax.drafters.small_model import SmallModel
from magicjax.trees.proposal import DRAWINGS, ONE_HOT, Draws, Proposal

__all__ = [
    "DRAWINGS",
    "ONE_HOT",
    "Drafter",
    "Draws",
    "Ensemble",
    "LookUp",
    "Proposal",
    "Round",
    "SelfSpeculation",
    "SmallModel",
]
