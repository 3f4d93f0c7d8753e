"""Multi-token prediction: the head that a checkpoint has beside its target drafts."""

import dataclasses
from typing import ClassVar, Self

from flax import struct

import models
from magicjax.drafters.eagle import Eagle
from magicjax.model import Model
from magicjax.trees.token_tree import Tree


@struct.dataclass
class MTP(Eagle):
    """A head for multi-token prediction, which was trained with its target (Qwen3-Next, Qwen3.5).

    It drafts as an `Eagle` head: one layer, whose own output takes the place of the target's hidden
    state from the second token of a draft on.

    Attributes:
      model: the head alone, or a model whose files have it, as `magicjax.load` returns them; None:
        the target's own.
      budget, sinks, draw, check_agreement: as those of `Eagle`.
    """

    model: Model | None = None  # type: ignore[assignment]

    _HEAD: ClassVar[str] = "head for multi-token prediction"
    _CONFIG: ClassVar[type] = models.MtpConfig

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises if there is no head, it was not made for the target, or `tree` is too wide."""
        super(MTP, self._with_head(target)).check(target, tree, depth, context)

    def for_target(self, target: Model) -> Self:
        """Returns the drafter with its head, which has the target's output matrix."""
        return super(MTP, self._with_head(target)).for_target(target)

    def _with_head(self, target: Model) -> Self:
        """Returns the drafter with the head alone.

        Raises:
          ValueError: there is none.
        """
        owner = target if self.model is None else self.model
        if isinstance(owner, Model) and isinstance(owner.config, models.MtpConfig):
            return self
        if not isinstance(owner, Model) or owner.mtp_head is None:
            raise ValueError(
                f"the model {getattr(owner, 'name', owner)!r} has no files with a head for "
                "multi-token prediction: load the target from a directory that has one, or name "
                "that directory (mtp:PATH)"
            )
        return dataclasses.replace(self, model=owner.mtp_head())
