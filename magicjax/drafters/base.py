"""The contract between a drafter and the loop."""

from typing import Any, Protocol

from flax import struct
from jaxtyping import Array, Int

from magicjax.kv_cache.attention_stats import Seen, Watch
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Shape, Tree
from magicjax.verification.sampling import Sampling


@struct.dataclass
class Round:
    """What came of a proposal.

    Attributes:
      path: int32 [B, A], the accepted nodes of each row, the root first; A is the depth plus 1.
      kept: int32 [B], how many of them became part of the text (0 in a row that had ended).
      new: for each layer the target's k, v [B, N, K, D] of all nodes.
      queries: for each layer the target's queries [B, N, H, D] and the log-sum-exp of their scores
        [B, N, H], in a drafter that watches rounds; else None for each layer.
      cache: the target's, behind the tokens that were kept.
      backend: static; of the attention, and of what else reads the target's cache.
    """

    path: Int[Array, "B A"]
    kept: Int[Array, "B"]
    new: tuple[tuple[Array, Array], ...]
    queries: tuple[Any, ...]
    cache: KVCache
    backend: str | None = struct.field(pytree_node=False)


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

    def watch(self) -> Watch:
        """Returns what must be kept of the target's attention for it."""

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        """Returns the bytes of keys and values that it will hold beside the target's.

        `capacity` is S, the slots of a cache that holds everything.
        """

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, seen: Seen, settings: Any
    ) -> Any:
        """Returns its state behind the prompts, whose keys and values `cache` holds.

        `seen` is what it asked to `watch`, and perhaps more.
        """

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

    def commit(
        self, target: Model, state: Any, draft: Any, proposal: Proposal, of_round: Round
    ) -> Any:
        """Returns its state behind the tokens that were kept."""
