"""The contract between a drafter and the loop."""

from typing import Any, Protocol

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from magicjax.cache import KVCache
from magicjax.model import Model
from magicjax.tree import TokenTree


@struct.dataclass
class Proposal:
    """What a drafter proposes for one round.

    Attributes:
      tokens: int32 [B, N]; node 0 is the row's pending token.
      parents: of the nodes, [N] where every row has the same tree, else [B, N].
    """

    tokens: Int[Array, "B N"]
    parents: jax.Array | np.ndarray


@struct.dataclass
class Round:
    """What came of a proposal.

    Attributes:
      path: int32 [B, A], the accepted nodes of each row, the root first; A is the depth plus 1.
      kept: int32 [B], how many of them became part of the text (0 in a row that had ended).
      new: for each layer the target's k, v [B, N, K, D] of all nodes.
    """

    path: Int[Array, "B A"]
    kept: Int[Array, "B"]
    new: tuple[tuple[Array, Array], ...]


class Drafter(Protocol):
    """A pytree: what is static specialises the program, arrays travel with it.

    All but `check` are pure functions, traced into the loop.
    """

    def check(self, target: Model, tree: TokenTree, context: int) -> None:
        """Raises ValueError if it cannot draft `tree` for `target` in texts of `context` tokens."""

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, settings: Any
    ) -> Any:
        """Returns its state behind the prompts, whose keys and values `cache` holds."""

    def propose(
        self, target: Model, state: Any, root: Int[Array, "B"], cache: KVCache, settings: Any
    ) -> tuple[Proposal, Any]:
        """Returns (the proposal, whatever `commit` will need of this draft)."""

    def commit(self, state: Any, draft: Any, proposal: Proposal, of_round: Round) -> Any:
        """Returns its state behind the tokens that were kept."""

    def cache_of(self, state: Any) -> Any:
        """Returns the cache within its state, for counting bytes."""
