"""A request of an engine: one prompt with its parameters."""

import dataclasses

import numpy as np
from jaxtyping import Int

from magicjax.grammars.matcher import Matcher
from magicjax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class EngineRequest:
    """A validated request.

    Attributes:
      prompt: int32 [T].
      params: as submitted.
      max_tokens: the limit of new tokens, which fits the engine.
      matcher: follows the text under its grammar; None for any text, and at the end.
      priority: requests of larger priority start first.
      submitted_s: when it was submitted, on the engine's clock.
      deadline_s: when it ends at the latest, on the same clock; None for no deadline.
    """

    prompt: Int[np.ndarray, "T"]
    params: SamplingParams
    max_tokens: int
    matcher: Matcher | None
    priority: float
    submitted_s: float
    deadline_s: float | None
