"""A drafter with the plain text, which proposes right tokens exactly where its script says so."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax.drafters import Drafter, Proposal
from magicjax.settings import StatsSpec
from tests.magicjax import tiny


@struct.dataclass
class Scripted(Drafter):
    """A `Drafter` whose proposal in round r of row b is scripted.

    Attributes:
      text: int32 [B, M], the plain text, longer than any row's limit by the tree's depth.
      right: which nodes have the text's token, bool [B, R, N]; all others have another.
      depths: int32 [B, R, N].
      parents: int32 [B, R, N], a tree for each row and round; None: the settings' tree.
    """

    text: Int[Array, "B M"]
    right: Bool[Array, "B R N"]
    depths: Int[Array, "B R N"]
    parents: Int[Array, "B R N"] | None

    def check(self, target, tree, depth, context):
        pass

    def shape(self, tree):
        return tree.shape

    def draw_methods(self, tree):
        return {"top"}

    def stats_spec(self):
        return StatsSpec()

    def cache_bytes(self, target, batch, capacity):
        return 0

    def prefill(self, target, tokens, cache, seen, settings, previous=None):
        rows = tokens.shape[0]
        return jnp.ones(rows, jnp.int32), jnp.zeros((), jnp.int32)  # emitted, round

    def propose(self, target, state, root, cache, sampling, settings):
        emitted, now = state
        right = jnp.take(self.right, now, axis=1)
        at = emitted[:, None] + jnp.take(self.depths, now, axis=1) - 1
        following = jnp.take_along_axis(self.text, jnp.minimum(at, self.text.shape[1] - 1), 1)
        nodes = jnp.arange(right.shape[1])
        wrong = (following + 1 + nodes) % tiny.VOCAB
        tokens = jnp.where(right, following, wrong)
        tokens = tokens.at[:, 0].set(root)
        if self.parents is None:
            return Proposal(tokens, settings.tree.array), None
        return Proposal(tokens, jnp.take(self.parents, now, axis=1)), None

    def commit(self, target, state, draft, proposal, outcome):
        emitted, now = state
        return emitted + outcome.committed, now + 1


@dataclasses.dataclass(frozen=True)
class Script:
    """A drafter, the tokens each round must accept [B, R], and the trees' parents [B, R, N]."""

    drafter: Scripted
    accepts: np.ndarray
    trees: np.ndarray


def write(rng, text, trees, follow_the_tree: bool) -> Script:
    """Returns a script in which every round accepts a random number of tokens.

    A random path from the root is right down to a random depth. A padding node has the token after
    the root, which would be right if the node were a child of the root.

    Args:
      rng: numpy's.
      text: the plain text of each row, [B, M].
      trees: parents [B, R, N].
      follow_the_tree: propose the settings' tree, the same for all rows.
    """
    batch, rounds, nodes = trees.shape
    right, depths = np.zeros((2, batch, rounds, nodes), np.int32)
    accepts = np.zeros((batch, rounds), np.int32)
    for row, now in np.ndindex(batch, rounds):
        parents = trees[row, now]
        for node in range(1, nodes):
            depths[row, now, node] = 1 if parents[node] < 0 else depths[row, now, parents[node]] + 1
        path = [0]
        while below := [c for c in range(1, nodes) if parents[c] == path[-1]]:
            path.append(int(rng.choice(below)))
        accepted = int(rng.integers(0, len(path)))
        right[row, now, path[1 : accepted + 1]] = 1
        right[row, now, 1:] |= parents[1:] < 0
        accepts[row, now] = accepted
    drafter = Scripted(
        text=jnp.asarray(text, jnp.int32),
        right=jnp.asarray(right, bool),
        depths=jnp.asarray(depths, jnp.int32),
        parents=None if follow_the_tree else jnp.asarray(trees, jnp.int32),
    )
    return Script(drafter, accepts, trees)


def play(accepts, limit: int) -> list[int]:
    """Returns how many tokens each round accepts of one row, until it has `limit` tokens."""
    emitted, rounds = 1, []
    while emitted < limit:
        rounds.append(int(accepts[len(rounds)]))
        emitted += rounds[-1] + 1
    return rounds
