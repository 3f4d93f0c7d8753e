"""Verifiers: which path of a proposal the target accepts, given its logits at every node."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.trees import token_tree
from magicjax.trees.proposal import ONE_HOT, Draws, Proposal
from magicjax.verification.sampling import (
    Purpose,
    Sampling,
    accept_or_residual,
    remove_token,
    sample,
    uniforms,
    warp,
)
from sharding import collectives
from sharding.collectives import AxisNames

VERIFIERS = ("greedy", "naive", "mss")
UNROLLED = 8  # levels of a walk; XLA fuses each with all before it, so deep walks are loops


@struct.dataclass
class VerifyResult:
    """The accepted path of each row.

    Attributes:
      path: int32 [B, A], the accepted nodes, the root first; the last one repeats to the end.
      accepted: int32 [B], how many drafted tokens are on the path, 0..A-1.
      bonus: int32 [B], the target's token after the path.
      ranks: int32 [B, A-1], how many draws were rejected before each accepted node; -1 after the
        path.
    """

    path: Int[Array, "B A"]
    accepted: Int[Array, "B"]
    bonus: Int[Array, "B"]
    ranks: Int[Array, "B D"]

    def emitted(self, tokens: Int[Array, "B N"]) -> Int[Array, "B A"]:
        """Returns the tokens of a round: the accepted ones, then the bonus token to the end.

        The path 0 2 5 with bonus 9 and A = 4 gives [token of 2, token of 5, 9, 9].
        """
        drafted = jnp.take_along_axis(tokens, self.path[:, 1:], 1)
        drafted = jnp.concatenate([drafted, self.bonus[:, None]], 1)
        index = jnp.arange(drafted.shape[1])
        return jnp.where(index < self.accepted[:, None], drafted, self.bonus[:, None])

    def along_path(self, logits: Float[Array, "B N V"]) -> Float[Array, "B A V"]:
        """Returns the logits from which the tokens of a round were chosen.

        The path 0 2 5 with A = 4 gives the logits of the nodes 0, 2, 5, 5. Those of node 2 are of
        the token after it, which node 5 has.
        """
        return jnp.take_along_axis(logits, self.path[:, :, None], 1)


def verify_tree(
    verifier: str,
    logits: Float[Array, "B N V"],
    proposal: Proposal,
    depth: int,
    sampling: Sampling | None,
    root_position: Int[Array, "B"],
    axis_names: AxisNames = (),
) -> VerifyResult:
    """Returns the path that a verifier accepts.

    Args:
      verifier: one of `VERIFIERS`.
      logits: the target's, at every node.
      proposal: what was drafted; mss reads its draws.
      depth: the longest path, in edges.
      sampling: how each row samples; None for greedy.
      root_position: positions of the rows' pending tokens.
      axis_names: the mesh axes that shard the vocabulary, here and in the functions below.
    """
    if verifier == "greedy":
        return greedy(logits, proposal.tokens, proposal.parents, depth, axis_names)
    assert sampling is not None
    rule = naive if verifier == "naive" else mss
    return rule(logits, proposal, depth, sampling, root_position, axis_names)


def greedy(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: token_tree.Parents,
    depth: int,
    axis_names: AxisNames = (),
) -> VerifyResult:
    """Returns the path of greedy decoding through the tree.

    At each node, the child that has the target's most likely token is accepted (the first one
    among siblings with the same token). Where no child has it, it is the bonus token. Parents are
    [N] or [B, N].
    """
    return _follow_choices(collectives.argmax(logits, axis_names), tokens, parents, depth)


def naive(
    logits: Float[Array, "B N V"],
    proposal: Proposal,
    depth: int,
    sampling: Sampling,
    root_position: Int[Array, "B"],
    axis_names: AxisNames = (),
) -> VerifyResult:
    """Returns the path of the tokens that the target samples, as long as a child has them.

    This is SpecInfer's baseline. Its text equals that of plain sampling with the same keys.
    """
    tokens, parents = proposal.tokens, proposal.parents
    position = root_position[:, None] + jnp.asarray(token_tree.depths(parents)) + 1
    u = uniforms(sampling.keys, jnp.broadcast_to(position, tokens.shape), Purpose.TARGET)
    choice = sample(warp(sampling, logits, axis_names), u, axis_names)
    return _follow_choices(choice, tokens, parents, depth)


def _follow_choices(
    choice: Int[Array, "B N"], tokens: Int[Array, "B N"], parents: token_tree.Parents, depth: int
) -> VerifyResult:
    """Returns the path from each node to its first child that has the token chosen there."""
    parents = jnp.broadcast_to(jnp.asarray(parents), tokens.shape)
    rows, nodes = jnp.arange(tokens.shape[0]), jnp.arange(tokens.shape[1])

    def follow(walk, step):
        node, accepted = walk
        children = parents == node[:, None]
        matches = children & (tokens == choice[rows, node][:, None])
        child = matches.argmax(-1).astype(jnp.int32)
        accept = matches.any(-1) & (accepted == step)
        rank = (children & (nodes < child[:, None])).sum(-1, dtype=jnp.int32)
        node = jnp.where(accept, child, node)
        return (node, accepted + accept), (node, jnp.where(accept, rank, -1))

    root = jnp.zeros(tokens.shape[0], jnp.int32)
    if depth == 0:  # plain decoding
        return VerifyResult(root[:, None], root, choice[:, 0], jnp.zeros((len(rows), 0), jnp.int32))
    steps = jnp.arange(depth)
    (node, accepted), (path, ranks) = jax.lax.scan(follow, (root, root), steps, unroll=UNROLLED)
    return VerifyResult(
        jnp.concatenate([root[:, None], path.T], 1), accepted, choice[rows, node], ranks.T
    )


@struct.dataclass
class TreeWalk:
    """The walk of each row from the root down its tree.

    Attributes:
      node: the last accepted node.
      last_draw: the last rejected draw below the node, -1 for none.
      rejected: how many draws below the node were rejected.
      p: the residual distribution of the target at the node.
      q_index, q: the distribution of the last rejected draw, without its token.
      path, ranks, accepted: as in `VerifyResult`.
    """

    node: Int[Array, "B"]
    last_draw: Int[Array, "B"]
    rejected: Int[Array, "B"]
    p: Float[Array, "B V"]
    q_index: Int[Array, "B"]
    q: Float[Array, "B V"]
    path: Int[Array, "B A"]
    ranks: Int[Array, "B D"]
    accepted: Int[Array, "B"]

    def remaining(self, draws: Draws) -> Bool[Array, "B J"]:
        """Returns which draws below the node have not been tried."""
        later = jnp.arange(draws.parent.shape[1]) > self.last_draw[:, None]
        return (draws.parent == self.node[:, None]) & later


@struct.dataclass
class Attempt:
    """The next draw of each row, and both outcomes.

    Attributes:
      active: bool [B], False in rows without a remaining draw, whose walk has ended.
      draw: int32 [B], the index of the draw.
      accept_prob: [B], the probability of accepting it.
      if_accepted, if_rejected: the walk after either outcome.
    """

    active: Bool[Array, "B"]
    draw: Int[Array, "B"]
    accept_prob: Float[Array, "B"]
    if_accepted: TreeWalk
    if_rejected: TreeWalk


def start_walk(
    logits: Float[Array, "B N V"], depth: int, sampling: Sampling, axis_names: AxisNames = ()
) -> TreeWalk:
    """Returns the walk at the root."""
    batch = logits.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    p = warp(sampling, logits[:, 0], axis_names)
    return TreeWalk(
        node=zeros,
        last_draw=zeros - 1,
        rejected=zeros,
        p=p,
        q_index=zeros + ONE_HOT,
        q=jnp.zeros_like(p),
        path=jnp.zeros((batch, depth + 1), jnp.int32),
        ranks=jnp.full((batch, depth), -1, jnp.int32),
        accepted=zeros,
    )


def next_attempt(
    walk: TreeWalk,
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    draws: Draws,
    sampling: Sampling,
    axis_names: AxisNames = (),
) -> Attempt:
    """Returns the acceptance rule applied to the first remaining draw of each row."""
    rows = jnp.arange(tokens.shape[0])
    remaining = walk.remaining(draws)
    draw = remaining.argmax(-1).astype(jnp.int32)
    child, q_index = draws.node[rows, draw], draws.q_index[rows, draw]
    token = tokens[rows, child]
    q = draws.q[rows, jnp.maximum(q_index, 0)].astype(walk.p.dtype)
    if not draws.replacement:
        q = jnp.where((q_index == walk.q_index)[:, None], walk.q, q)
    one_hot = (collectives.global_indices(q, axis_names) == token[:, None]).astype(q.dtype)
    q = jnp.where((q_index == ONE_HOT)[:, None], one_hot, q)
    accept_prob, residual = accept_or_residual(walk.p, q, token, axis_names)
    steps = jnp.arange(walk.path.shape[1])
    after = steps > walk.accepted[:, None]
    current = steps[:-1] == walk.accepted[:, None]
    if_accepted = TreeWalk(
        node=child,
        last_draw=jnp.full_like(walk.last_draw, -1),
        rejected=jnp.zeros_like(walk.rejected),
        p=warp(sampling, logits[rows, child], axis_names),
        q_index=jnp.full_like(walk.q_index, ONE_HOT),
        q=walk.q,
        path=jnp.where(after, child[:, None], walk.path),
        ranks=jnp.where(current, walk.rejected[:, None], walk.ranks),
        accepted=walk.accepted + 1,
    )
    if_rejected = walk.replace(  # type: ignore[attr-defined]
        last_draw=draw,
        rejected=walk.rejected + 1,
        p=residual,
        q_index=q_index,
        q=remove_token(q, token, axis_names),
    )
    return Attempt(remaining.any(-1), draw, accept_prob, if_accepted, if_rejected)


def mss(
    logits: Float[Array, "B N V"],
    proposal: Proposal,
    depth: int,
    sampling: Sampling,
    root_position: Int[Array, "B"],
    axis_names: AxisNames = (),
) -> VerifyResult:
    """Returns a path by multi-step speculative sampling, with the target's joint distribution.

    The draws below a node are tried in order. An accepted one is the next node; when all are
    rejected, the bonus token is sampled from the residual distribution. One step of the loop tries
    one draw of every row. Source: SpecInfer, algorithm 2 and theorem 4.2; without replacement q is
    renormalized after each rejection (arXiv 2402.12374).
    """
    draws = proposal.draws
    assert draws is not None

    def step(walk: TreeWalk) -> TreeWalk:
        attempted = next_attempt(walk, logits, proposal.tokens, draws, sampling, axis_names)
        u = uniforms(sampling.keys, root_position, Purpose.ACCEPT, attempted.draw)[..., 0]
        accept = u < attempted.accept_prob

        def choose(old, if_accepted, if_rejected):
            def per_row(x):
                return x.reshape(-1, *[1] * (old.ndim - 1))

            new = jnp.where(per_row(accept), if_accepted, if_rejected)
            return jnp.where(per_row(attempted.active), new, old)

        return jax.tree.map(choose, walk, attempted.if_accepted, attempted.if_rejected)

    walk = start_walk(logits, depth, sampling, axis_names)
    walk = jax.lax.while_loop(lambda walk: walk.remaining(draws).any(), step, walk)
    u = uniforms(sampling.keys, root_position + walk.accepted + 1, Purpose.TARGET)
    return VerifyResult(walk.path, walk.accepted, sample(walk.p, u, axis_names), walk.ranks)
