"""The control that pins everything: a draft that agrees with its target on every token."""

import dataclasses

from magicjax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """A control: nothing is left out, so there is no budget.

    Self-speculation reads the target's own cache then, and a small model keeps all of its own.

    Raises:
      ValueError: recent given.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.recent is not None:
            raise ValueError(f"recent={self.recent}: a full cache has no ring; leave recent out")
