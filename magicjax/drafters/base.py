"""The contract between a drafter and the loop."""

from typing import Any, Protocol

from flax import struct
from jaxtyping import Array, Int

from magicjax.cache import KVCache
from magicjax.model import Model
from magicjax.proposal import Proposal
from magicjax.sampling import Sampling
from magicjax.tree import Shape, Tree


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

    `check`, `shape` and `drawings` run on the host, before anything is compiled; the others are
    pure functions, traced into the loop.
    """

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if it cannot draft `tree` for `target` in texts of `context` tokens.

        `depth` is the most edges of a path that it may have to commit; in an ensemble another
        drafter's tree may be deeper than its own.
        """

    def shape(self, tree: Tree) -> Shape:
        """Returns the bounds of what it proposes when asked for `tree`."""

    def drawings(self, tree: Tree) -> set[str]:
        """Returns the ways in which it draws children under sampling, of `DRAWINGS`."""

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, settings: Any
    ) -> Any:
        """Returns its state behind the prompts, whose keys and values `cache` holds."""

    def propose(
        self,
        target: Model,
        state: Any,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Any,
    ) -> tuple[Proposal, Any]:
        """Returns (the proposal, whatever `commit` will need of this draft).

        `sampling` is None in greedy decoding; else the proposal must tell its draws.
        """

    def commit(self, state: Any, draft: Any, proposal: Proposal, of_round: Round) -> Any:
        """Returns its state behind the tokens that were kept."""

    def caches(self, state: Any) -> tuple[Any, ...]:
        """Returns the caches within its state, for counting bytes."""
