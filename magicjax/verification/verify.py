"""Verifiers: given what the target says at every node, which path is the target's own."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.trees import token_tree
from magicjax.trees.proposal import ONE_HOT, Draws, Proposal
from magicjax.verification.sampling import (
    Purpose,
    Sampling,
    attempt,
    sample,
    uniforms,
    warp,
    without,
)
from sharding import collectives
from sharding.collectives import Over

# The last four are one rule, which follows how each child was drawn; all but mss insist on a way.
VERIFIERS = (
    "greedy",
    "naive",
    "mss",
    "mss_with_replacement",
    "mss_without_replacement",
    "one_hot",
)


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
    over: Over = (),
) -> Verdict:
    """Returns the verdict of the verifier of that name (one of `VERIFIERS`).

    Args:
      logits: the target's, at every node.
      proposal: what was drafted; mss reads its draws.
      depth: the most edges of a path.
      sampling: of the rows; None for greedy.
      root_position: of the rows' pending tokens.
      over: the mesh axes that divide the vocabulary of logits and drafts; so in all functions here.
    """
    if verifier == "greedy":
        return greedy(logits, proposal.tokens, proposal.parents, depth, over)
    assert sampling is not None
    if verifier == "naive":
        tokens, parents = proposal.tokens, proposal.parents
        return naive(logits, tokens, parents, depth, sampling, root_position, over)
    assert proposal.draws is not None
    return mss(logits, proposal.tokens, proposal.draws, depth, sampling, root_position, over)


def greedy(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: token_tree.Parents,
    depth: int,
    over: Over = (),
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
    return _follow(collectives.argmax(logits, over), tokens, parents, depth)


def naive(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: token_tree.Parents,
    depth: int,
    sampling: Sampling,
    root_position: Int[Array, "B"],
    over: Over = (),
) -> Verdict:
    """Returns the path of tokens that the target samples, each followed where a child carries it.

    SpecInfer's baseline. The text is the one of plain sampling with the same keys, token for token.
    """
    following = root_position[:, None] + jnp.asarray(token_tree.depths(parents)) + 1
    u = uniforms(sampling.keys, jnp.broadcast_to(following, tokens.shape), Purpose.TARGET)
    choice = sample(warp(sampling, logits, over), u, over)
    return _follow(choice, tokens, parents, depth)


def _follow(
    choice: Int[Array, "B N"], tokens: Int[Array, "B N"], parents: token_tree.Parents, depth: int
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
class Walk:
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


@struct.dataclass
class Try:
    """A row's next try, and what becomes of it either way.

    Attributes:
      trying: bool [B]; a row without open draws has none, and its walk is over.
      draw: int32 [B], which draw it is.
      accept: [B], the probability of accepting it.
      taken, refused: the walk after either.
    """

    trying: Bool[Array, "B"]
    draw: Int[Array, "B"]
    accept: Float[Array, "B"]
    taken: Walk
    refused: Walk


def begin_walk(
    logits: Float[Array, "B N V"], depth: int, sampling: Sampling, over: Over = ()
) -> Walk:
    """Returns the walk that stands on the root."""
    batch = logits.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    p = warp(sampling, logits[:, 0], over)
    return Walk(
        node=zeros,
        tried=zeros - 1,
        failed=zeros,
        p=p,
        q_of=zeros + ONE_HOT,
        q=jnp.zeros_like(p),
        path=jnp.zeros((batch, depth + 1), jnp.int32),
        ranks=jnp.full((batch, depth), -1, jnp.int32),
        accepted=zeros,
    )


def next_try(
    walk: Walk,
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    draws: Draws,
    sampling: Sampling,
    over: Over = (),
) -> Try:
    """Returns the first open draw of each row, the rule applied to it, and both ways on."""
    rows = jnp.arange(tokens.shape[0])
    open_ = walk.open(draws)
    draw = open_.argmax(-1).astype(jnp.int32)
    child, q_of = draws.node[rows, draw], draws.q_of[rows, draw]
    token = tokens[rows, child]
    q = draws.q[rows, jnp.maximum(q_of, 0)].astype(walk.p.dtype)
    if not draws.replacement:
        q = jnp.where((q_of == walk.q_of)[:, None], walk.q, q)
    one_hot = (collectives.places(q, over) == token[:, None]).astype(q.dtype)
    q = jnp.where((q_of == ONE_HOT)[:, None], one_hot, q)
    accept, rest = attempt(walk.p, q, token, over)
    places = jnp.arange(walk.path.shape[1])
    onward = places > walk.accepted[:, None]
    here = places[:-1] == walk.accepted[:, None]
    taken = Walk(
        node=child,
        tried=jnp.full_like(walk.tried, -1),
        failed=jnp.zeros_like(walk.failed),
        p=warp(sampling, logits[rows, child], over),
        q_of=jnp.full_like(walk.q_of, ONE_HOT),
        q=walk.q,
        path=jnp.where(onward, child[:, None], walk.path),
        ranks=jnp.where(here, walk.failed[:, None], walk.ranks),
        accepted=walk.accepted + 1,
    )
    refused = walk.replace(  # type: ignore[attr-defined]
        tried=draw, failed=walk.failed + 1, p=rest, q_of=q_of, q=without(q, token, over)
    )
    return Try(open_.any(-1), draw, accept, taken, refused)


def mss(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    draws: Draws,
    depth: int,
    sampling: Sampling,
    root_position: Int[Array, "B"],
    over: Over = (),
) -> Verdict:
    """Returns a path of the target's own joint distribution: multi-step speculative sampling.

    At a node every draw is tried in order (`sampling.attempt`). An accepted one is the next node;
    when all have failed, the bonus comes from what is left of the target's distribution. One turn
    of the loop is one try of every row. Source: SpecInfer, algorithm 2 and theorem 4.2; without
    replacement q is renormalised after each try (arXiv 2402.12374).
    """

    def turn(walk: Walk) -> Walk:
        one = next_try(walk, logits, tokens, draws, sampling, over)
        u = uniforms(sampling.keys, root_position, Purpose.ACCEPT, one.draw)[..., 0]

        def choose(old, taken, refused):
            def of_row(x):
                return x.reshape(-1, *[1] * (old.ndim - 1))

            new = jnp.where(of_row(u < one.accept), taken, refused)
            return jnp.where(of_row(one.trying), new, old)

        return jax.tree.map(choose, walk, one.taken, one.refused)

    walk = begin_walk(logits, depth, sampling, over)
    walk = jax.lax.while_loop(lambda walk: walk.open(draws).any(), turn, walk)
    u = uniforms(sampling.keys, root_position + walk.accepted + 1, Purpose.TARGET)
    return Verdict(walk.path, walk.accepted, sample(walk.p, u, over), walk.ranks)
