"""What drafters have in common that run the target itself: self-speculation on any cache."""

import abc
import dataclasses
from typing import Any, Self

from jaxtyping import Array, Int

from magicjax.drafters import layer_skipping, quantized_blocks
from magicjax.drafters.base import Drafter
from magicjax.drafters.draft_pass import DraftContext, check_width, resolve_draw_method
from magicjax.drafters.dynamic_tree import draft_tree
from magicjax.drafters.layer_skipping import LayerIndices
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.model import Model
from magicjax.parallel import offloading
from magicjax.settings import Settings
from magicjax.trees.proposal import DrawMethod, Proposal
from magicjax.trees.token_tree import Tree
from magicjax.verification.sampling import Sampling
from models import WeightFormat

WEIGHTS_HELP = "quantized copy of the target's matrices to draft with: int8, int4 or int4:32"
LAYERS_HELP = "layers of the target to draft with, such as 0-9,20-29; default: all"


class TargetDrafter(Drafter):
    """A drafter that runs the target, with some of its layers or a quantized copy of them.

    Attributes, which subclasses declare as fields:
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      weights: the format of a quantized copy of the target's blocks, which drafts, as for
        `magicjax.load`; None: the target itself drafts. The target verifies, so the copy changes
        acceptance only (SpecInfer, arXiv 2305.09781; QuantSpec, arXiv 2502.10424).
      layers: the layers of the target that draft, from 0, such as "0-9,20-29"; None: all. A copy
        has these layers only.
      blocks: that copy; `for_target` sets it.
    """

    draw: DrawMethod | None
    weights: str | None
    layers: str | None
    blocks: Model | None

    def __post_init__(self):
        super().__post_init__()
        if self.weights is not None:
            WeightFormat.parse(self.weights).check_rounding()
        if self.layers is not None:
            layer_skipping.parse(self.layers)

    @property
    def layer_indices(self) -> LayerIndices:
        """The layers as in `layer_skipping`."""
        return None if self.layers is None else layer_skipping.parse(self.layers)

    def part_of(self, target: Model) -> Model:
        """Returns the model of the target's layers that draft, in the target's own format."""
        return layer_skipping.of_model(target, self.layer_indices)

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if `tree` is too wide, or `target` does not support the options."""
        resolve_draw_method(self.draw, tree)
        check_width(tree, target.config.vocab_size)
        if self.layers is not None:
            stages = target.layout.stages
            layer_skipping.check(self.layers, target.config.num_layers, target.offload, stages)
            option = f"layers={self.layers!r} of self-speculation"
            offloading.check_independent(target.config, option, "omit layers")
        if self.weights is not None:
            quantized_blocks.check(target, self.weights)

    def draw_methods(self, tree: Tree) -> set[str]:
        return {resolve_draw_method(self.draw, tree)}

    def for_target(self, target: Model) -> Self:
        if self.weights is None:
            return self
        blocks = quantized_blocks.of(target, self.weights, self.layer_indices)
        return dataclasses.replace(self, blocks=blocks)  # type: ignore[type-var]

    @abc.abstractmethod
    def draft_cache(self, state: Any, cache: KVCache) -> KVCache | DraftCache:
        """Returns the cache that a draft reads, given its own state and the target's cache."""

    def draft_context(
        self,
        target: Model,
        state: Any,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[DraftContext, Any]:
        """Returns the context of a draft, and what `commit` needs; arguments of `propose`."""
        model = self.part_of(target)
        if self.blocks is not None:
            model = quantized_blocks.join(self.blocks, target)
        context = DraftContext(
            model=model,
            target=target,
            cache=self.draft_cache(state, cache),
            root=root,
            root_position=cache.lengths,
            sampling=sampling,
            backlog=None,
            draw_method=resolve_draw_method(self.draw, settings.tree),
            backend=settings.backend,
            drafter_index=settings.drafter_index,
        )
        return context, None

    def propose(
        self,
        target: Model,
        state: Any,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, Any]:
        context, draft = self.draft_context(target, state, root, cache, sampling, settings)
        return draft_tree(context, settings.tree)[0], draft
