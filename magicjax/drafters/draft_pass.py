"""Forward passes of a draft model: their context, the entries they fill, and the backlog.

A pass writes the keys and values of the nodes it runs to entries beside the committed cache, so
that drafting commits nothing and rolls nothing back. With a backlog of up to F tokens, a tree of N
nodes has N + F entries: node n is entry n, backlog token f is entry N + f.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.kv_cache.attend import KV, AttendLevel
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.model import Model
from magicjax.trees.token_tree import DynamicTree, Tree
from magicjax.verification.sampling import Sampling
from models import NEVER
from sharding import collectives

NOT_RUN = -1


@struct.dataclass
class Backlog:
    """Committed tokens that a draft model has not run, so that its cache lacks them.

    Attributes:
      tokens: int32 [B, F], oldest first; undefined from `count` on.
      count: int32 [B], 0..F.
    """

    tokens: Int[Array, "B F"]
    count: Int[Array, "B"]


@struct.dataclass
class DraftedKV:
    """The keys and values that a draft model computed in one round.

    Attributes:
      kv: for each layer k, v [B, R, K, D], of whose R entries the last F are the backlog's.
      entries: int32 [B, N], the entry of each node, or `NOT_RUN`.
    """

    kv: KV
    entries: Int[Array, "B N"]

    def renumber(self, node_of: Int[Array, "B N"], num_nodes: int) -> "DraftedKV":
        """Returns the same with the entries of merged nodes; see `Drafter.renumber`.

        The entry of a merged node is that of any of its nodes that ran.
        """
        rows = jnp.arange(node_of.shape[0])[:, None]
        entries = jnp.full((node_of.shape[0], num_nodes), NOT_RUN, jnp.int32)
        node = jnp.where(node_of < 0, num_nodes, node_of)  # padding is dropped
        entries = entries.at[rows, node].max(self.entries, mode="drop")
        return dataclasses.replace(self, entries=entries)


@struct.dataclass
class RootPass:
    """The results of a pass of the root alone.

    Attributes:
      hidden: [B, 1, E], the hidden state.
      kv: for each layer k, v [B, 1, K, D].
    """

    hidden: Float[Array, "B 1 E"]
    kv: KV


@struct.dataclass
class DraftContext:
    """What a draft model continues, and how.

    Attributes:
      model: the draft model.
      target: the target, whose sharding of the vocabulary the draft distributions must have.
      cache: the draft model's committed prefix.
      root, root_position: int32 [B], the pending tokens and their positions in the text.
      sampling: how each row samples; None: greedy.
      backlog: None for a cache that lacks nothing.
      draw_method: static; one of `DRAW_METHODS`, ignored in greedy decoding.
      backend: static; of the attention.
      drafter_index: static; index of the drafter in its ensemble.
      root_pass: the pass over the root, if it has run already; None: it has not. Not with a
        backlog.
      feature: [B, 1, E], of the target at the token before the root, for a model that is a learned
        head (`models.eagle`); None: the model reads tokens only.
    """

    model: Model
    target: Model
    cache: KVCache | DraftCache
    root: Int[Array, "B"]
    root_position: Int[Array, "B"]
    sampling: Sampling | None
    backlog: Backlog | None
    draw_method: str = struct.field(pytree_node=False)
    backend: str | None = struct.field(pytree_node=False)
    drafter_index: int = struct.field(pytree_node=False)
    root_pass: RootPass | None = None
    feature: Float[Array, "B 1 E"] | None = None

    @property
    def draws(self) -> bool:
        """Whether children are drawn at random."""
        return self.sampling is not None and self.draw_method != "top"

    @property
    def max_backlog(self) -> int:
        """F, the entries of the backlog."""
        return 0 if self.backlog is None else self.backlog.tokens.shape[1]

    def logits(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T R"]:
        """Returns the logits of the draft vocabulary, `NEVER` for tokens that the target lacks."""
        model, size = self.model, self.target.config.vocab_size
        logits = model.draft_logits(hidden)
        if model.config.vocab_size <= size:
            return logits
        rows = collectives.global_indices(logits, model.split.axes)
        return jnp.where(model.draft_tokens(rows) < size, logits, NEVER)

    def over_target(self, probs: Float[Array, "B T R"]) -> Float[Array, "B T V"]:
        """Returns probabilities of the target's tokens, given those of the draft vocabulary."""
        draft_size, target_size = self.model.config.vocab_size, self.target.config.vocab_size
        axes = self.model.split.axes
        probs = self.model.over_tokens(probs)
        if draft_size != target_size:
            probs, axes = collectives.all_gather(probs, axes)[..., :target_size], ()
            missing = max(0, target_size - draft_size)
            probs = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, missing)])
        return collectives.local_slice(probs, axes, self.target.split.axes)

    @property
    def runs(self) -> Bool[Array, "B"]:
        """Which rows draft; those that ended, or whose tokens it lacks, have no position."""
        return self.root_position > 0

    def run(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: AttendLevel,
        features: Float[Array, "B T E"] | None,
        live: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Returns the hidden states of a pass, and the entries that `attend` fills.

        Args:
          tokens, positions: the inputs of the pass.
          attend: the attention to the prefix and the entries.
          features: for a learned head, the hidden state of each token's parent; None for other
            models.
          live: False for padding. Padding, and rows that do not draft, are zeros, which native
            products skip. None: no padding.
        """
        live = self.runs[:, None] if live is None else live & self.runs[:, None]
        live = jnp.broadcast_to(live, tokens.shape)
        attend = dataclasses.replace(attend, live=live)
        if features is None:
            if self.model.empty_token is not None:
                tokens = jnp.where(live, tokens, self.model.empty_token)
            return self.model(tokens, positions, attend)[:2]
        x = embed_for(self.model, self.target, tokens, positions)
        return self.model.module.apply(
            self.model.params, x, features, positions, attend, method="decode"
        )


def embed_for(
    head: Model, target: Model, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Float[Array, "B T E"]:
    """Returns the embeddings that a learned head reads: its own if it has any, or the target's."""
    embedder = head if head.config.own_embedding else target  # type: ignore[attr-defined]
    return embedder.embed(tokens, positions).astype(head.dtype)


def check_width(tree: Tree, vocab_size: int, name: str = "vocabulary") -> None:
    """Raises ValueError if a node has more children than there are tokens."""
    if tree.width > vocab_size:
        raise ValueError(
            f"a node has {tree.width} children and the {name} {vocab_size} tokens: "
            f"give each node at most {vocab_size}"
        )


def resolve_draw_method(draw: str | None, tree: Tree) -> str:
    """Returns how children of `tree` are drawn.

    None selects drawing without replacement, or the most likely tokens in a dynamic tree.

    Raises:
      ValueError: a random method in a dynamic tree.
    """
    dynamic = isinstance(tree, DynamicTree)
    if dynamic and draw not in (None, "top"):
        raise ValueError(
            f"children drawn {draw} in a dynamic tree would be pruned by their probability after "
            "the draw, which is not exact: use draw='top', or a static tree"
        )
    return draw or ("top" if dynamic else "without_replacement")


def see_backlog(backlog: Backlog | None, mask: Bool[Array, "*B T N"]) -> Bool[Array, "*B T N+F"]:
    """Returns the mask [B, T, N + F] of tokens that also see the backlog, or `mask` without one."""
    if backlog is None:
        return mask
    batch, size = backlog.tokens.shape
    visible = jnp.arange(size) < backlog.count[:, None]
    mask = jnp.broadcast_to(mask, (batch, *mask.shape[-2:]))
    visible = jnp.broadcast_to(visible[:, None], (*mask.shape[:2], size))
    return jnp.concatenate([mask, visible], -1)


def run_root(context: DraftContext, kv: KV, nodes: int) -> tuple[Array, KV]:
    """Returns the root's hidden state [B, 1, E], and the entries with those of the root.

    The backlog runs in the same pass of F + 1 tokens; its entries come after those of the nodes.

    With F = 2, a root at position 10 and N = 3 nodes, a row with one token b0 in its backlog runs
        token  position  entry  sees nodes  sees backlog
        b0     9         3      . . .       1 .
        pad    10        4      . . .       1 1
        root   10        0      1 . .       1 .
    The padding token is zeros, and no other token sees it.
    """
    if context.root_pass is not None:
        kv = jax.tree.map(lambda x, root: x.at[:, :1].set(root), kv, context.root_pass.kv)
        return context.root_pass.hidden, kv
    backlog, position = context.backlog, context.root_position[:, None]
    if backlog is None:
        mask = (jnp.arange(nodes) == 0)[None]
        node = jnp.zeros(1, jnp.int32)
        attend = AttendLevel(context.cache, kv, node, mask, context.backend, positions=position)
        return context.run(context.root[:, None], position, attend, context.feature)
    batch, size = backlog.tokens.shape
    steps = jnp.arange(size)
    chain_mask = jnp.concatenate([jnp.zeros((size, nodes), bool), steps <= steps[:, None]], 1)
    chain_mask = jnp.broadcast_to(chain_mask, (batch, *chain_mask.shape))
    root_mask = see_backlog(backlog, (jnp.arange(nodes) == 0)[None])
    mask = jnp.concatenate([chain_mask, root_mask], 1)
    tokens = jnp.concatenate([backlog.tokens, context.root[:, None]], 1)
    offsets = jnp.concatenate([steps - backlog.count[:, None], jnp.zeros((batch, 1), jnp.int32)], 1)
    positions = jnp.clip(position + offsets, 0, position)  # padding too stays a valid position
    entries = jnp.concatenate([nodes + steps, jnp.zeros(1, jnp.int32)])
    attend = AttendLevel(context.cache, kv, entries, mask, context.backend, positions=positions)
    in_backlog = steps < backlog.count[:, None]
    live = jnp.concatenate([in_backlog, jnp.ones((batch, 1), bool)], 1)
    hidden, kv = context.run(tokens, positions, attend, None, live)
    return hidden[:, -1:], kv
