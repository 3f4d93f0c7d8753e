"""Self-speculation on the target's own cache, with quantized weights (QuantSpec)."""

from flax import struct

from magicjax.drafters.base import RoundOutcome
from magicjax.drafters.sparse import DRAW_HELP
from magicjax.drafters.target_drafter import WEIGHTS_HELP, TargetDrafter
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.options import option
from magicjax.trees.proposal import DrawMethod


@struct.dataclass
class QuantizedCopy(TargetDrafter):
    """A quantized copy of the target, reading all of the target's cache.

    Source: the drafts of quantized weights of QuantSpec (arXiv 2502.10424), whose cache is
    quantized too.

    Attributes:
      weights: the format of the copy, as for `magicjax.load`; None, a control: the target itself
        drafts, and only rounding rejects.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      blocks: the copy of the target's blocks; `for_target` sets it.

    Raises:
      ValueError: an unknown format.
      TypeError: an unknown draw.
    """

    weights: str | None = option(None, WEIGHTS_HELP)
    draw: DrawMethod | None = option(None, DRAW_HELP)
    blocks: Model | None = struct.field(default=None, repr=False)

    def prefill(self, target, tokens, cache, stats, settings, previous=None) -> tuple[()]:
        return ()

    def draft_cache(self, state: tuple[()], cache: KVCache) -> KVCache:
        return cache

    def commit(
        self, target, state: tuple[()], draft: None, proposal, outcome: RoundOutcome
    ) -> tuple[()]:
        return ()

    def synthetic_state(self, state: tuple[()], lengths) -> tuple[()]:
        return ()
