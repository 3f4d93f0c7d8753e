"""Who proposes: the target itself on a sparse cache, or a small model."""

from magicjax.drafters.base import Drafter, Proposal, Round
from magicjax.drafters.self_speculation import SelfSpeculation
from magicjax.drafters.small_model import SmallModel

__all__ = ["Drafter", "Proposal", "Round", "SelfSpeculation", "SmallModel"]
