"""What all ways of drafting a tree with a model share: who runs, from where, and a lead."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax.kv_cache.attend import AttendLevel
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.model import Model
from magicjax.trees.proposal import DRAWINGS
from magicjax.trees.token_tree import DynamicTree, Tree
from magicjax.verification.sampling import Sampling

NOT_RUN = -1


@struct.dataclass
class Lead:
    """Committed tokens whose keys and values a small model's cache still lacks.

    Attributes:
      tokens: int32 [B, F], oldest first; rubbish behind `count`.
      count: int32 [B], 0..F.
    """

    tokens: Int[Array, "B F"]
    count: Int[Array, "B"]


@struct.dataclass
class Drafted:
    """What a model ran while drafting.

    Attributes:
      new: for each layer k, v [B, R, K, D]; the last F entries are the lead's.
      slots: int32 [B, N], which entry is each node's; `NOT_RUN` for nodes that were not run.
    """

    new: tuple[tuple[Array, Array], ...]
    slots: Int[Array, "B N"]


@struct.dataclass
class Source:
    """Who drafts a tree, and from where.

    Attributes:
      model: the drafter's model.
      target: whose verifier will read the draft distributions, in its own division.
      cache: its committed prefix.
      root, root_position: int32 [B], the pending tokens and their positions in the text.
      sampling: of the rows; None: greedy.
      lead: None: the cache lacks nothing.
      drawing: static; see `DRAWINGS`. In greedy decoding it is always "top".
      backend: static; of the attention.
      index: static; the drafter's place in an ensemble.
    """

    model: Model
    target: Model
    cache: KVCache | DraftCache
    root: Int[Array, "B"]
    root_position: Int[Array, "B"]
    sampling: Sampling | None
    lead: Lead | None
    drawing: str = struct.field(pytree_node=False)
    backend: str | None = struct.field(pytree_node=False)
    index: int = struct.field(pytree_node=False)

    @property
    def draws(self) -> bool:
        """Whether children are drawn at random."""
        return self.sampling is not None and self.drawing != "top"


def check_width(tree: Tree, vocab: int) -> None:
    """Raises ValueError if a node has more children than there are tokens."""
    if tree.width > vocab:
        raise ValueError(
            f"a node has {tree.width} children and the vocabulary {vocab} tokens: "
            f"give each node at most {vocab}"
        )


def drawing_of(draw: str | None, tree: Tree) -> str:
    """Returns how children of `tree` are drawn; None is the best way that is exact.

    Raises:
      ValueError: no such way, or drawn children in a dynamic tree.
    """
    if draw is not None and draw not in DRAWINGS:
        raise ValueError(f"draw={draw!r} is unknown: use one of {', '.join(DRAWINGS)}")
    dynamic = isinstance(tree, DynamicTree)
    if dynamic and draw not in (None, "top"):
        raise ValueError(
            f"children drawn {draw} in a dynamic tree would be pruned by their probability after "
            "the draw, which is not exact: use draw='top', or a static tree"
        )
    return draw or ("top" if dynamic else "without_replacement")


def with_lead(lead: Lead, mask: Bool[Array, "B T N"]) -> Bool[Array, "B T N+F"]:
    """Returns the mask of tokens that also see the lead, which comes behind the nodes."""
    seen = jnp.arange(lead.tokens.shape[1]) < lead.count[:, None]
    shape = (*mask.shape[:2], seen.shape[1])
    return jnp.concatenate([mask, jnp.broadcast_to(seen[:, None], shape)], -1)


def run_root_with_lead(source: Source, drafted: tuple, nodes: int) -> tuple[Array, tuple]:
    """Returns (the root's hidden state [B, 1, E], `drafted` with the root and the lead).

    The lead and the root are one pass of F + 1 tokens; the lead's entries begin at `nodes`.
    """
    lead = source.lead
    assert lead is not None
    batch, count = lead.tokens.shape
    steps = jnp.arange(count)
    own = jnp.arange(nodes) == 0
    # A token of the lead sees itself and those before it; what stands behind the lead's end is
    # seen by nobody else.
    chain = jnp.concatenate([jnp.zeros((count, nodes), bool), steps <= steps[:, None]], 1)
    root = with_lead(lead, jnp.broadcast_to(own, (batch, 1, nodes)))
    mask = jnp.concatenate([jnp.broadcast_to(chain, (batch, *chain.shape)), root], 1)
    fed = jnp.concatenate([lead.tokens, source.root[:, None]], 1)
    behind = jnp.concatenate([steps - lead.count[:, None], jnp.zeros((batch, 1), jnp.int32)], 1)
    # Padding of the lead must not leave the positions either.
    positions = jnp.clip(source.root_position[:, None] + behind, 0, source.root_position[:, None])
    places = jnp.concatenate([nodes + steps, jnp.zeros(1, jnp.int32)])
    attend = AttendLevel(source.cache, drafted, places, mask, source.backend)
    hidden, drafted = source.model(fed, positions, attend)
    return hidden[:, -1:], drafted
