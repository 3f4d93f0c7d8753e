"""The exact output distribution of one round, over all draws and both outcomes of every attempt.

The rule is the tested one: `verify.next_attempt` gives the probability of accepting a draw and the
walk after either outcome. The loop samples an outcome; here both are followed with their weights.
All possible draws are enumerated too, by the definition of each draw method (`test_sampling.py` and
`test_joint.py` test what the drafters draw). Target and draft models are tables of random logits
for every text.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np

from magicjax.decoding.rows import sampling_of
from magicjax.sampling_params import SamplingParams
from magicjax.trees.merge import merge
from magicjax.trees.proposal import ONE_HOT, Draws, Proposal
from magicjax.trees.token_tree import TokenTree
from magicjax.verification import sampling as sampling_
from magicjax.verification import verify
from magicjax.verification.sampling import Sampling

CHUNK = 1024  # rows of a compiled step; fewer are padded, to limit compilation
NOTHING = -1  # the token of a node without a draw


@dataclasses.dataclass(frozen=True)
class World:
    """A target and draft models over a vocabulary, as random tables (cached).

    Attributes:
      vocab: V.
      warped: temperature, top_k and top_p.
      seed: of the tables.
      spread: of the logits.
    """

    vocab: int
    warped: tuple[float, int, float] = (1.0, 0, 1.0)
    seed: int = 0
    spread: float = 1.5

    def sampling(self, rows: int) -> Sampling:
        temperature, top_k, top_p = self.warped
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        return sampling_of([params] * rows)

    @functools.cache  # noqa: B019
    def logits(self, who: int, text: tuple[int, ...]) -> np.ndarray:
        """Returns the logits after a text, of the target (-1) or a similar draft model."""
        of_target = np.random.default_rng([self.seed, 99, *text]).normal(0, self.spread, self.vocab)
        if who < 0:
            return of_target.astype(np.float32)
        noise = np.random.default_rng([self.seed, who, *text]).normal(0, self.spread, self.vocab)
        return (0.5 * of_target + noise).astype(np.float32)

    @functools.cache  # noqa: B019
    def probs(self, who: int, text: tuple[int, ...]) -> np.ndarray:
        """Returns the distribution after a text, with warping."""
        logits = self.logits(who, text)[None]
        return np.asarray(_warp(self.sampling(1), logits)[0], np.float64)

    def masked(self, logits: np.ndarray, proposal: Proposal) -> np.ndarray:
        """Returns the logits [B, N, V] at the nodes as the loop hands them to the verifier."""
        return logits

    def joint(self, length: int) -> dict[tuple[int, ...], float]:
        """Returns the target's distribution of texts of that length."""
        found = {(): 1.0}
        for _ in range(length):
            found = {
                (*text, token): mass * p
                for text, mass in found.items()
                for token, p in enumerate(self.probs(-1, text))
            }
        return found


_warp = jax.jit(sampling_.warp)
_merge = jax.jit(merge, static_argnums=1)
_remove_token = jax.jit(sampling_.remove_token)


@functools.cache
@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafter: its tables, its tree and its draw method."""

    who: int
    tree: TokenTree
    drawing: str


def drawn_trees(world: World, draft: Draft) -> list[tuple[float, tuple[int, ...]]]:
    """Returns the probability, and the tokens of all nodes but the root, of every possible tree."""
    trees = [(1.0, ())]
    parents = draft.tree.parents
    for node in range(1, draft.tree.num_nodes):
        longer = []
        for mass, tokens in trees:
            text = text_of(parents, tokens, parents[node])
            if min(text, default=0) < 0:  # below a node that was not drawn
                longer.append((mass, (*tokens, NOTHING)))
                continue
            q = world.probs(draft.who, text)
            siblings = [tokens[n - 1] for n in range(1, node) if parents[n] == parents[node]]
            if draft.drawing == "top":
                best = int(np.argsort(-q, kind="stable")[len(siblings)])
                longer.append((mass, (*tokens, best)))
                continue
            if draft.drawing == "without_replacement":
                for sibling in (t for t in siblings if t != NOTHING):
                    q = np.asarray(_remove_token(q, np.int32(sibling)))
            longer += [(mass * p, (*tokens, t)) for t, p in enumerate(q) if mass * p > 0]
            if q.sum() == 0:  # nothing was left to draw
                longer.append((mass, (*tokens, NOTHING)))
        trees = longer
    return trees


def text_of(parents, tokens, node: int) -> tuple[int, ...]:
    """Returns the tokens on the path from the root (not included) to a node."""
    path = []
    while node > 0:
        path.insert(0, tokens[node - 1])
        node = parents[node]
    return tuple(path)


def propose(world: World, drafts: list[Draft]) -> tuple[np.ndarray, Proposal]:
    """Returns weights [B], and a proposal with a row for every combination of the drafts' trees."""
    combined = list(itertools.product(*(drawn_trees(world, draft) for draft in drafts)))
    weights = np.array([np.prod([mass for mass, _ in rows]) for rows in combined])
    proposals = [
        _proposal(world, draft, np.array([rows[i][1] for rows in combined]))
        for i, draft in enumerate(drafts)
    ]
    if len(proposals) == 1:
        return weights, proposals[0]
    padded = [
        dataclasses.replace(one, tokens=_padded(one.tokens), draws=jax.tree.map(_padded, one.draws))
        for one in proposals
    ]
    merged = _merge(padded, max(draft.tree.depth for draft in drafts))[0]
    return weights, jax.tree.map(lambda x: np.asarray(x)[: len(weights)], merged)


def _proposal(world: World, draft: Draft, tokens: np.ndarray) -> Proposal:
    """Returns a draft's trees as a drafter would propose them."""
    rows, tree = len(tokens), draft.tree
    parents = np.broadcast_to(tree.array[1:], tokens.shape)
    alive = tokens >= 0
    q_index = np.searchsorted(tree.inner, tree.array[1:])
    if draft.drawing == "top":
        q_index = np.full_like(q_index, ONE_HOT)
    inner = range(len(tree.inner))
    q = np.array([[_q(world, draft, row, tree.inner[i]) for i in inner] for row in tokens.tolist()])
    draws = Draws(
        parent=np.where(alive, parents, -1).astype(np.int32),
        node=np.broadcast_to(np.arange(1, tree.num_nodes, dtype=np.int32), tokens.shape),
        q_index=np.broadcast_to(q_index.astype(np.int32), tokens.shape),
        q=q.astype(np.float32),
        replacement=draft.drawing == "with_replacement",
    )
    root = np.zeros((rows, 1), np.int32)
    joined = np.concatenate([root, np.maximum(tokens, 0)], 1).astype(np.int32)
    return Proposal(joined, np.asarray(tree.array), draws)


def _q(world: World, draft: Draft, tokens, node: int) -> np.ndarray:
    """Returns the draft distribution at a node; undefined for one that was not drawn."""
    text = text_of(draft.tree.parents, tokens, node)
    return world.probs(draft.who, text if min(text, default=0) >= 0 else ())


def target_logits(world: World, proposal: Proposal) -> np.ndarray:
    """Returns the target's logits at every node, [B, N, V]."""
    tokens = np.asarray(proposal.tokens)
    parents = np.broadcast_to(np.asarray(proposal.parents), tokens.shape)
    out = np.zeros((*tokens.shape, world.vocab), np.float32)
    for row in range(len(tokens)):
        of_row = tokens[row, 1:].tolist()
        for node in range(tokens.shape[1]):
            if node == 0 or parents[row, node] >= 0:
                out[row, node] = world.logits(-1, text_of(parents[row], of_row, node))
    return world.masked(out, proposal)


@functools.partial(jax.jit, static_argnums=1)
def _begin(logits, depth, sampling):
    return verify.start_walk(logits, depth, sampling)


_next_attempt = jax.jit(verify.next_attempt)


def emitted(world: World, weights, proposal: Proposal, depth: int, noise: str = "own"):
    """Returns {tokens emitted by the round: probability}; texts are of 1 to depth + 1 tokens.

    Args:
      noise: "own" for independent attempts; "shared" by the attempts at a node is wrong.
    """
    found: dict[tuple[int, ...], float] = {}
    logits = target_logits(world, proposal)
    for start in range(0, len(weights), CHUNK):
        part = slice(start, start + CHUNK)
        rows = jax.tree.map(
            lambda x, part=part: np.asarray(x)[part], (proposal.tokens, proposal.draws)
        )
        _follow(world, weights[part], logits[part], *rows, depth, noise, found)
    return found


def _follow(world, weights, logits, tokens, draws, depth, noise, found) -> None:
    """Adds what the rows emit to `found`, following both outcomes of each attempt."""
    rows, padded = len(weights), _padded(logits)
    walk = jax.device_get(_begin(padded, depth, world.sampling(len(padded))))
    walk = jax.tree.map(lambda x: x[:rows], walk)
    state = (weights, np.zeros_like(weights), logits, tokens, draws, walk)
    while len(state[0]):
        weights, used, logits, tokens, draws, walk = state
        one = jax.device_get(_padded_attempt(world, walk, logits, tokens, draws))
        for row in np.flatnonzero(~one.active):
            _emit(found, weights[row], walk, tokens, row)
        # As in the loop, where no random number is below NaN.
        accept = np.clip(np.nan_to_num(one.accept_prob.astype(np.float64)), 0, 1)
        if noise == "shared":  # the number is known to be at least `used`
            accept = np.clip(accept - used, 0, None) / np.maximum(1 - used, 1e-30)
        accepted = one.active & (weights * accept > 0)
        rejected = one.active & (weights * (1 - accept) > 0)
        lowest = np.maximum(used, one.accept_prob)
        parts = [
            (weights * accept, np.zeros_like(used), logits, tokens, draws, one.if_accepted),
            (weights * (1 - accept), lowest, logits, tokens, draws, one.if_rejected),
        ]
        kept = [
            jax.tree.map(lambda x, keep=keep: x[keep], part)
            for part, keep in zip(parts, (accepted, rejected), strict=True)
        ]
        state = jax.tree.map(lambda a, b: np.concatenate([a, b]), *kept)


def _padded_attempt(world, walk, logits, tokens, draws):
    """Returns the next attempt of each row."""
    rows = len(tokens)
    walk, logits, tokens, draws = jax.tree.map(_padded, (walk, logits, tokens, draws))
    one = _next_attempt(walk, logits, tokens, draws, world.sampling(len(tokens)))
    return jax.tree.map(lambda x: np.asarray(x)[:rows], one)


def _padded(x) -> np.ndarray:
    """Returns the rows, and the first of them again up to a power of two, at least CHUNK."""
    x, rows = np.asarray(x), len(x)
    size = max(CHUNK, 1 << (rows - 1).bit_length())
    return np.concatenate([x, np.repeat(x[:1], size - rows, 0)])


def _emit(found, weight, walk, tokens, row) -> None:
    path = walk.path[row, 1 : walk.accepted[row] + 1]
    text = tuple(tokens[row, path].tolist())
    p = np.clip(np.nan_to_num(walk.p[row].astype(np.float64), posinf=0), 0, None)
    if not p.any():
        return  # a broken rule: the mass is lost, which `distance` counts
    for token, mass in enumerate(p / p.sum()):
        found[(*text, token)] = found.get((*text, token), 0.0) + weight * mass


def distance(world: World, found: dict, length: int) -> float:
    """Returns the total variation distance of the texts, completed by the target, from its own.

    Mass that a broken rule loses counts as one more text.
    """
    completed = {}
    for text in sorted(found, key=len):
        continuations = {text: found[text]}
        for _ in range(length - len(text)):
            continuations = {
                (*prefix, token): mass * p
                for prefix, mass in continuations.items()
                for token, p in enumerate(world.probs(-1, prefix))
            }
        for whole, mass in continuations.items():
            completed[whole] = completed.get(whole, 0.0) + mass
    wanted = world.joint(length)
    differences = [abs(completed.get(text, 0.0) - mass) for text, mass in wanted.items()]
    return 0.5 * (sum(differences) + abs(1 - sum(completed.values())))
