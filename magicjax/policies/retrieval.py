"""Policies that choose pages of the target's cache in every round, by the draft's queries."""

import dataclasses

from magicjax.kv_cache.full_cache import CAPACITY_MULTIPLE
from magicjax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Quest(Policy):
    """Reads the pages whose keys may have the highest scores, chosen by each round's root.

    Self-speculation then has no draft cache: it reads pages of the target's, beside the first page
    and those of the newest tokens. The score of a page is an upper bound of the scores of its keys,
    sum_d max(q_d * min_d, q_d * max_d), averaged over the query heads that share a KV head.

    Source: Quest (arXiv 2406.10774), which chooses for every token, reads no other pages, and keeps
    the first two layers dense. Here the root's choice serves the whole round, as in TriForce (arXiv
    2404.11912), and every layer has the same budget.

    Attributes:
      recent: slots of the newest tokens, rounded up to pages; None: a quarter of the budget.
      page_size: slots of a page, a power of two up to 64.

    Raises:
      ValueError: another page_size, or recent < 1.
    """

    page_size: int = 16

    def __post_init__(self):
        super().__post_init__()
        if self.page_size < 1 or CAPACITY_MULTIPLE % self.page_size:
            raise ValueError(
                f"page_size={self.page_size}: it must divide {CAPACITY_MULTIPLE}, the slots by "
                "which caches grow: use 1, 2, 4, 8, 16, 32 or 64"
            )

    def ring(self, budget: int) -> int:
        """Returns the slots of the newest tokens, whole pages."""
        slots = max(1, budget // 4) if self.recent is None else self.recent
        return -(-slots // self.page_size) * self.page_size
