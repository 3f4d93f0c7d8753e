"""Verifiers: given what the target says at every node, which path is the target's own."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax import tree as trees
from magicjax.proposal import ONE_HOT, Draws, Proposal
from magicjax.sampling import Purpose, Sampling, attempt, sample, uniforms, warp, without

# Verifier by name -> whether it samples. The three names that begin with mss are one rule, which
# follows how each child was drawn; the longer ones insist on it.
VERIFIERS = {
    "greedy": False,
    "naive": True,
    "mss": True,
    "mss_with_replacement": True,
    "mss_without_replacement": True,
    "one_hot": True,
}


@struct.dataclass
class Verdict:
    """What the target made of a proposal.

    Attributes:
      path: int32 [B, A], the accepted nodes, the root first; the last one repeats to the end.
      accepted: int32 [B], how many speculated tokens lie on the path: 0..A-1.
      bonus: int32 [B], the target's token behind the path.
      ranks: int32 [B, A-1], how many tries failed before each accepted node; -1 behind the path.
    """

    path: Int[Array, "B A"]
    accepted: Int[Array, "B"]
    bonus: Int[Array, "B"]
    ranks: Int[Array, "B D"]


def judge(
    verifier: str,
    logits: Float[Array, "B N V"],
    proposal: Proposal,
    depth: int,
    sampling: Sampling | None,
    root_position: Int[Array, "B"],
) -> Verdict:
    """Returns the verdict of the verifier of that name (a key of `VERIFIERS`).

    Args:
      logits: the target's, at every node.
      proposal: what was drafted; mss reads its draws.
      depth: the most edges of a path.
      sampling: of the rows; None for greedy.
      root_position: of the rows' pending tokens.
    """
    if verifier == "greedy":
        return greedy(logits, proposal.tokens, proposal.parents, depth)
    assert sampling is not None
    if verifier == "naive":
        tokens, parents = proposal.tokens, proposal.parents
        return naive(logits, tokens, parents, depth, sampling, root_position)
    assert proposal.draws is not None
    return mss(logits, proposal.tokens, proposal.draws, depth, sampling, root_position)


def greedy(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: trees.Parents,
    depth: int,
) -> Verdict:
    """Returns the path that greedy decoding takes through the tree.

    From the root on, the child that carries the target's own choice is accepted (the first one,
    should siblings carry the same token); where no child does, the choice is the bonus.

    Args:
      logits: the target's, at every node.
      tokens: of the nodes.
      parents: of the nodes, [N] or [B, N].
      depth: the most edges of a path.
    """
    return _follow(logits.argmax(-1).astype(jnp.int32), tokens, parents, depth)


def naive(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: trees.Parents,
    depth: int,
    sampling: Sampling,
    root_position: Int[Array, "B"],
) -> Verdict:
    """Returns the path of tokens that the target samples, each followed where a child carries it.

    SpecInfer's baseline. The text is the one of plain sampling with the same keys, token for token.
    """
    following = root_position[:, None] + jnp.asarray(trees.depths(parents)) + 1
    u = uniforms(sampling.keys, jnp.broadcast_to(following, tokens.shape), Purpose.TARGET)
    return _follow(sample(warp(sampling, logits), u), tokens, parents, depth)


def _follow(
    choice: Int[Array, "B N"], tokens: Int[Array, "B N"], parents: trees.Parents, depth: int
) -> Verdict:
    """Returns the path that leads from each node to its first child with the node's choice."""
    parents = jnp.broadcast_to(jnp.asarray(parents), tokens.shape)
    rows, nodes = jnp.arange(tokens.shape[0]), jnp.arange(tokens.shape[1])
    node = accepted = jnp.zeros(tokens.shape[0], jnp.int32)
    path, ranks = [node], []
    for step in range(depth):
        children = parents == node[:, None]
        fits = children & (tokens == choice[rows, node][:, None])
        child = fits.argmax(-1).astype(jnp.int32)
        going = fits.any(-1) & (accepted == step)
        before = (children & (nodes < child[:, None])).sum(-1, dtype=jnp.int32)
        ranks.append(jnp.where(going, before, -1))
        node = jnp.where(going, child, node)
        accepted = accepted + going
        path.append(node)
    shape = (tokens.shape[0], depth)
    return Verdict(
        jnp.stack(path, 1),
        accepted,
        choice[rows, node],
        jnp.stack(ranks, 1) if ranks else jnp.zeros(shape, jnp.int32),
    )


@struct.dataclass
class _Walk:
    """Where each row stands in its tree.

    Attributes:
      node: the accepted node that it stands on.
      tried: the last draw that was tried there, -1 for none.
      failed: how many were.
      p: what is left of the target's distribution there.
      q_of, q: the distribution that the last try was drawn from, less that token.
      path, ranks, accepted: as in `Verdict`.
    """

    node: Int[Array, "B"]
    tried: Int[Array, "B"]
    failed: Int[Array, "B"]
    p: Float[Array, "B V"]
    q_of: Int[Array, "B"]
    q: Float[Array, "B V"]
    path: Int[Array, "B A"]
    ranks: Int[Array, "B D"]
    accepted: Int[Array, "B"]

    def open(self, draws: Draws) -> Bool[Array, "B J"]:
        """Returns which draws remain to be tried where each row stands."""
        later = jnp.arange(draws.parent.shape[1]) > self.tried[:, None]
        return (draws.parent == self.node[:, None]) & later


def mss(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    draws: Draws,
    depth: int,
    sampling: Sampling,
    root_position: Int[Array, "B"],
) -> Verdict:
    """Returns a path of the target's own joint distribution: multi-step speculative sampling.

    At a node every draw is tried in order (`sampling.attempt`). An accepted one is the next node;
    when all have failed, the bonus comes from what is left of the target's distribution. One turn
    of the loop is one try of every row. Source: SpecInfer, algorithm 2 and theorem 4.2; without
    replacement q is renormalised after each try (arXiv 2402.12374).
    """
    rows = jnp.arange(tokens.shape[0])

    def turn(walk: _Walk) -> _Walk:
        open_ = walk.open(draws)
        trying, draw = open_.any(-1), open_.argmax(-1).astype(jnp.int32)
        child, q_of = draws.node[rows, draw], draws.q_of[rows, draw]
        token = tokens[rows, child]
        q = draws.q[rows, jnp.maximum(q_of, 0)]
        if not draws.replacement:
            q = jnp.where((q_of == walk.q_of)[:, None], walk.q, q)
        one_hot = jax.nn.one_hot(token, q.shape[-1], dtype=q.dtype)
        q = jnp.where((q_of == ONE_HOT)[:, None], one_hot, q)
        accept, rest = attempt(walk.p, q, token)
        u = uniforms(sampling.keys, root_position, Purpose.ACCEPT, draw)
        taken, refused = trying & (u < accept), trying & (u >= accept)
        here = jnp.arange(depth + 1) == walk.accepted[:, None] + 1
        here_or_later = jnp.arange(depth + 1) > walk.accepted[:, None]
        return _Walk(
            node=jnp.where(taken, child, walk.node),
            tried=jnp.where(taken, -1, jnp.where(refused, draw, walk.tried)),
            failed=jnp.where(taken, 0, walk.failed + refused),
            p=jnp.where(
                taken[:, None],
                warp(sampling, logits[rows, child]),
                jnp.where(refused[:, None], rest, walk.p),
            ),
            q_of=jnp.where(taken, ONE_HOT, jnp.where(refused, q_of, walk.q_of)),
            q=without(q, token),
            path=jnp.where(taken[:, None] & here_or_later, child[:, None], walk.path),
            ranks=jnp.where((taken[:, None] & here)[:, 1:], walk.failed[:, None], walk.ranks),
            accepted=walk.accepted + taken,
        )

    zeros = jnp.zeros(tokens.shape[0], jnp.int32)
    p = warp(sampling, logits[:, 0])
    walk = _Walk(
        node=zeros,
        tried=zeros - 1,
        failed=zeros,
        p=p,
        q_of=zeros + ONE_HOT,
        q=jnp.zeros_like(p),
        path=jnp.zeros((tokens.shape[0], depth + 1), jnp.int32),
        ranks=jnp.full((tokens.shape[0], depth), -1, jnp.int32),
        accepted=zeros,
    )
    walk = jax.lax.while_loop(lambda walk: walk.open(draws).any(), turn, walk)
    u = uniforms(sampling.keys, root_position + walk.accepted + 1, Purpose.TARGET)
    return Verdict(walk.path, walk.accepted, sample(walk.p, u), walk.ranks)
