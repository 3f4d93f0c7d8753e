"""Self-speculation on pages of the target's cache, which each round's root chooses (Quest)."""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters import layer_skipping
from magicjax.drafters.base import RoundOutcome
from magicjax.drafters.draft_pass import DraftContext, RootPass
from magicjax.drafters.sparse import (
    BUDGET,
    DRAW_HELP,
    check_budget,
    check_context,
    check_refresh,
)
from magicjax.drafters.target_drafter import LAYERS_HELP, WEIGHTS_HELP, TargetDrafter
from magicjax.kv_cache.attend import ChoosePages
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.pages import (
    PageBounds,
    PagedCache,
    Pages,
    bounds_of,
    in_order,
    update_bounds,
)
from magicjax.model import CAPACITY_MULTIPLE, Model
from magicjax.options import option
from magicjax.settings import Settings
from magicjax.trees.proposal import DrawMethod
from magicjax.trees.token_tree import Tree
from sharding import KV_HEADS, LAYER_BATCH, Split, logical_axes


@struct.dataclass
class PageRetrievalState:
    """The state of page retrieval between two rounds.

    Attributes:
      bounds: bounds of the target's committed keys, by page.
      chosen_pages: the pages that each row chose last.
      wait: int32 [B], rounds of the row before it chooses again; 0: in the next one.
    """

    bounds: PageBounds
    chosen_pages: Pages = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    wait: Int[Array, "B"]

    @property
    def split(self) -> Split:
        """The model's division over devices."""
        return self.bounds.split


@struct.dataclass
class PageRetrieval(TargetDrafter):
    """The target itself, reading pages of its own cache that may hold the highest scores.

    It has no draft cache. The draft reads the first page, those of the newest tokens, and pages
    between them that the queries of the round's root choose. The score of a page is an upper bound
    of the scores of its keys, sum_d max(q_d * min_d, q_d * max_d), averaged over the query heads
    that share a KV head.

    Source: Quest (arXiv 2406.10774), which chooses for every token, reads no other pages, and keeps
    the first two layers dense. Here the root's choice serves the whole round, as in TriForce (arXiv
    2404.11912), and every layer has the same budget. Layers with a sliding window or a state are
    read as they are.

    Attributes:
      budget: slots that a draft step reads for each layer and KV head, rounded down to pages.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      refresh_every: rounds of a row between two choices.
      weights: the format of a quantized copy of the target's blocks, which drafts, as for
        `FullCacheSpeculation`; None: the target itself drafts.
      layers: the layers of the target that draft, from 0, such as "0-9,20-29"; None: all. A copy
        has these layers only.
      recent: slots of the newest tokens, rounded up to pages; None: a quarter of the budget.
      page_size: slots of a page, a power of two up to 64.
      blocks: the copy of the target's blocks; `for_target` sets it.

    Raises:
      ValueError: another page_size, an unknown format, invalid layers, or another
        number below 1.
      TypeError: a number is not an integer, or an unknown draw.
    """

    budget: int = option(
        BUDGET, "slots of the target's cache to read for each layer and KV head", positional=True
    )
    draw: DrawMethod | None = option(None, DRAW_HELP)
    refresh_every: int = option(1, "rounds between two choices of pages")
    weights: str | None = option(None, WEIGHTS_HELP)
    layers: str | None = option(None, LAYERS_HELP)
    recent: int | None = option(
        None, "slots of the newest tokens; default: a quarter of the budget"
    )
    page_size: int = option(16, "slots of a page, a power of two up to 64")
    blocks: Model | None = struct.field(default=None, repr=False)

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget)
        check_refresh(self.refresh_every)
        if self.recent is not None and self.recent < 1:
            raise ValueError(f"recent={self.recent}: use at least 1 slot of the newest tokens")
        if self.page_size < 1 or CAPACITY_MULTIPLE % self.page_size:
            raise ValueError(
                f"page_size={self.page_size}: it must divide {CAPACITY_MULTIPLE}, the slots by "
                "which caches grow: use 1, 2, 4, 8, 16, 32 or 64"
            )

    @property
    def num_newest_pages(self) -> int:
        """The pages of the newest tokens."""
        slots = max(1, self.budget // 4) if self.recent is None else self.recent
        return -(-slots // self.page_size)

    @property
    def num_chosen_pages(self) -> int:
        """C, the pages that the queries choose: all but the first and the newest."""
        return self.budget // self.page_size - 1 - self.num_newest_pages

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if no page can be chosen, or the target cannot draft `tree`."""
        super().check(target, tree, depth, context)
        if any(source is not None for source in target.kv_sources):
            raise ValueError(
                f"PageRetrieval (quest) does not support layers that read the keys of others "
                f"(shared_kv_layers, the target's family {target.config.family!r}): use "
                "self:streaming, full, prompt-lookup or small:PATH"
            )
        check_context(target, self.budget)
        if not any(self.part_of(target).pinnable):
            raise ValueError(
                "every layer of the target that drafts has a sliding window or a state, and such "
                "layers are read as they are: use self:streaming, or another drafter"
            )
        if self.num_chosen_pages < 1:
            size, newest = self.page_size, self.num_newest_pages
            raise ValueError(
                f"budget={self.budget} is too small: use at least {(2 + newest) * size}, for "
                f"{2 + newest} pages of {size} slots (the first, {newest} of the newest "
                "tokens, 1 chosen), or a smaller page_size or `recent`"
            )

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        """Returns the bytes of the bounds, two vectors for each page and KV head."""
        part = self.part_of(target)
        page = sum(part.slot_bytes(layer) for layer, paged in enumerate(part.pinnable) if paged)
        return batch * (capacity // self.page_size) * page

    def prefill(
        self, target, tokens, cache: KVCache, stats, settings, previous=None
    ) -> PageRetrievalState:
        cache = layer_skipping.of_cache(cache, self.layer_indices)
        bounds = bounds_of(cache, self.page_size, target.dtype)
        pages_of_cache = max(low.shape[2] for low in bounds.low if low is not None)
        others = pages_of_cache - 1 - self.num_newest_pages
        chosen_pages = in_order(cache, min(self.num_chosen_pages, max(1, others)))
        return PageRetrievalState(bounds, chosen_pages, jnp.zeros_like(cache.lengths))

    def draft_cache(self, state: PageRetrievalState, cache: KVCache) -> PagedCache:
        due = None if self.refresh_every == 1 else state.wait == 0
        cache = layer_skipping.of_cache(cache, self.layer_indices)
        return PagedCache(
            **vars(cache),
            bounds=state.bounds,
            chosen_pages=state.chosen_pages,
            due=due,
            newest=self.num_newest_pages,
            page_size=self.page_size,
        )

    def draft_context(
        self, target, state: PageRetrievalState, root, cache, sampling, settings: Settings
    ) -> tuple[DraftContext, tuple[Pages, Int[Array, "B"]]]:
        context, _ = super().draft_context(target, state, root, cache, sampling, settings)
        if settings.tree.num_nodes == 1:  # the next round chooses
            return context, (state.chosen_pages, state.wait)
        context, chosen_pages = _choose_pages(context)
        wait = jnp.where(state.wait == 0, self.refresh_every, state.wait) - 1
        return context, (chosen_pages, wait)

    def commit(
        self,
        target,
        state: PageRetrievalState,
        draft: tuple[Pages, Int[Array, "B"]],
        proposal,
        outcome: RoundOutcome,
    ) -> PageRetrievalState:
        outcome = layer_skipping.of_outcome(outcome, self.layer_indices)
        path, committed = outcome.path, outcome.committed
        bounds = update_bounds(state.bounds, outcome.kv, path, committed, outcome.cache)
        return PageRetrievalState(bounds, *draft)


def _choose_pages(context: DraftContext) -> tuple[DraftContext, Pages]:
    """Returns the context after a pass of the root, and the pages that its queries chose."""
    paged = context.cache
    assert isinstance(paged, PagedCache)
    position = context.root_position[:, None]
    attend = ChoosePages(paged, context.backend, positions=position)
    hidden, aux, _ = context.model(context.root[:, None], position, attend)
    kv, chosen_pages = zip(*aux, strict=True)
    cache = dataclasses.replace(paged, chosen_pages=chosen_pages)
    return dataclasses.replace(context, cache=cache, root_pass=RootPass(hidden, kv)), chosen_pages
