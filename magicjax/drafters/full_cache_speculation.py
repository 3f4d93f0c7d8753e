"""Self-speculation on the target's own full cache, with a cheaper copy of the target."""

from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters import layer_skipping
from magicjax.drafters.base import Previous, RoundOutcome
from magicjax.drafters.sparse import DRAW_HELP
from magicjax.drafters.target_drafter import LAYERS_HELP, WEIGHTS_HELP, TargetDrafter
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.model import Model
from magicjax.options import option
from magicjax.settings import Settings
from magicjax.trees.proposal import DrawMethod, Proposal


@struct.dataclass
class FullCacheSpeculation(TargetDrafter):
    """The target with quantized weights, fewer layers, or both, reading all of its cache.

    Without either it is a control: the target itself drafts, and only rounding rejects. Sources:
    the drafts of quantized weights of QuantSpec (arXiv 2502.10424), whose cache is quantized too,
    and the skipped layers of Draft & Verify (arXiv 2309.08168).

    Attributes:
      weights: the format of a quantized copy of the target's blocks, which drafts, as for
        `magicjax.load`; None: the target's own blocks draft.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      layers: the layers of the target that draft, from 0, such as "0-9,20-29"; None: all. A copy
        has these layers only.
      blocks: that copy; `for_target` sets it.

    Raises:
      ValueError: an unknown format, or invalid layers.
      TypeError: an unknown draw.
    """

    weights: str | None = option(None, WEIGHTS_HELP)
    draw: DrawMethod | None = option(None, DRAW_HELP)
    layers: str | None = option(None, LAYERS_HELP)
    blocks: Model | None = struct.field(default=None, repr=False)

    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> tuple[()]:
        return ()

    def draft_cache(self, state: tuple[()], cache: KVCache) -> KVCache:
        return layer_skipping.of_cache(cache, self.layer_indices)

    def commit(
        self,
        target: Model,
        state: tuple[()],
        draft: None,
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> tuple[()]:
        return ()
