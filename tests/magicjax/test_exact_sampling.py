"""One round's output, enumerated over all draws and outcomes, has the target's joint distribution.

And the wrong rules, each a small change of the right one, do not: the same test catches them.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from tests.magicjax.enumeration import Draft, World, distance, emitted, propose
from tests.quick import quick

EXACT, WRONG = 1e-6, 5e-3
CHAIN, PAIRS = magicjax.chain(2), magicjax.expansion((2, 2))
THREE = magicjax.expansion((1, 1, 3))
IRREGULAR = magicjax.TokenTree.from_parents((-1, 0, 0, 1, 0, 1))
STAR, FORK = magicjax.expansion((2,)), magicjax.expansion((2, 1))
WARPED = (0.7, 3, 0.85)  # temperature, top_k, top_p
SETTINGS = {"plain": (1.0, 0, 1.0), "warped": WARPED}
DRAWINGS = ("with_replacement", "without_replacement", "top")

TREES = {
    "chain": (4, [CHAIN]),
    "2,2": (3, [PAIRS]),
    "1,1,3": (3, [THREE]),
    "irregular": (4, [IRREGULAR]),
    "two drafts": (3, [FORK, CHAIN]),
    "three drafts": (3, [CHAIN, STAR, CHAIN]),
}


def total_variation(world: World, drafts, change=None, **options) -> float:
    """Returns how far a round's output is from the target's own distribution of texts."""
    weights, proposal = propose(world, drafts)
    if change is not None:
        proposal = dataclasses.replace(proposal, draws=change(proposal))
    depth = max(draft.tree.depth for draft in drafts)
    found = emitted(world, weights, proposal, depth, **options)
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    return distance(world, found, depth + 1)


def drafts_of(trees, drawing: str) -> list[Draft]:
    return [Draft(i, tree, drawing) for i, tree in enumerate(trees)]


ROUNDS = list(itertools.product(TREES, DRAWINGS, SETTINGS))
# Those that take longest have their like among the others.
LONG = [
    ("1,1,3", "with_replacement", "plain"),
    ("1,1,3", "with_replacement", "warped"),
    ("2,2", "with_replacement", "plain"),
    ("irregular", "with_replacement", "plain"),
    ("irregular", "without_replacement", "plain"),
    ("two drafts", "with_replacement", "warped"),
    ("two drafts", "without_replacement", "plain"),
    ("three drafts", "with_replacement", "warped"),
    ("three drafts", "without_replacement", "warped"),
]


@pytest.mark.parametrize(
    ("tree", "drawing", "setting"), quick(ROUNDS, *(case for case in ROUNDS if case not in LONG))
)
def test_a_round_emits_the_targets_own_distribution(tree, drawing, setting):
    vocab, trees = TREES[tree]
    world = World(vocab, SETTINGS[setting], seed=len(tree))
    found = total_variation(world, drafts_of(trees, drawing))
    print(f"{tree}, {drawing}: total variation {found:.1e}")
    assert found < EXACT


@pytest.mark.parametrize("drawing", ["with_replacement", "without_replacement"])
def test_draws_and_a_look_up_together_are_exact(drawing):
    """A look-up's chain is deterministic: one-hot tries behind, or before, those of a draft."""
    world = World(3, seed=5)
    draft, look_up = Draft(0, PAIRS, drawing), Draft(1, CHAIN, "top")
    assert total_variation(world, [draft, look_up]) < EXACT
    assert total_variation(world, [look_up, draft]) < EXACT


def test_a_draft_that_is_the_target_is_always_accepted():
    class Same(World):
        def probs(self, who, text):
            return super().probs(-1, text)

    world = Same(3)
    weights, proposal = propose(world, drafts_of([CHAIN], "with_replacement"))
    found = emitted(world, weights, proposal, 2)
    assert sum(mass for text, mass in found.items() if len(text) == 3) == pytest.approx(1)


# The wrong rules. Each returns the draws as that rule would have the verifier try them.


def skip_repeated(proposal):
    """Tries a token once, however often it was drawn."""
    draws, parent = proposal.draws, np.array(proposal.draws.parent)
    for row in range(len(parent)):
        tried = set()
        for j in range(parent.shape[1]):
            token = int(proposal.tokens[row, draws.node[row, j]])
            parent[row, j] = -1 if (parent[row, j], token) in tried else parent[row, j]
            tried.add((int(parent[row, j]), token))
    return draws.replace(parent=jnp.asarray(parent))


def not_renormalised(proposal):
    """Keeps q as it was after a draw without replacement."""
    return proposal.draws.replace(replacement=True)


def as_if_drawn(q_of):
    """Scores the most likely children with the rule for draws."""

    def change(proposal):
        shape = proposal.draws.q_of.shape
        return proposal.draws.replace(q_of=jnp.broadcast_to(jnp.asarray(q_of), shape))

    return change


def _by_q(proposal):
    """Returns each draw's own probability, [B, J]."""
    draws = proposal.draws
    rows = np.arange(len(draws.parent))[:, None]
    token = np.asarray(proposal.tokens)[rows, draws.node]
    return np.asarray(draws.q)[rows, draws.q_of, token]


def reordered(proposal):
    """Tries the draws of several drafters in the order of their probability."""
    draws, rows = proposal.draws, np.arange(len(proposal.draws.parent))[:, None]
    order = np.argsort(-_by_q(proposal), axis=1, kind="stable")
    parent, node, q_of = (
        np.asarray(x)[rows, order] for x in (draws.parent, draws.node, draws.q_of)
    )
    return draws.replace(parent=jnp.asarray(parent), node=jnp.asarray(node), q_of=jnp.asarray(q_of))


def pruned(proposal):
    """Drops the draw of the lowest probability."""
    parent = np.array(proposal.draws.parent)
    parent[np.arange(len(parent)), _by_q(proposal).argmin(1)] = -1
    return proposal.draws.replace(parent=jnp.asarray(parent))


WRONG_RULES = {
    "the second try of a repeated token skipped": (
        drafts_of([magicjax.expansion((3,))], "with_replacement"),
        dict(change=skip_repeated),
    ),
    "the same, two drafters": (
        drafts_of([STAR, STAR], "with_replacement"),
        dict(change=skip_repeated),
    ),
    "without replacement, not renormalised": (
        drafts_of([magicjax.expansion((3,))], "without_replacement"),
        dict(change=not_renormalised),
    ),
    "the most likely children scored with p / q": (
        drafts_of([STAR], "top"),
        dict(change=as_if_drawn([0, 0])),
    ),
    "tries of two drafters reordered by q": (
        drafts_of([STAR, STAR], "with_replacement"),
        dict(change=reordered),
    ),
    "drawn children pruned by their probability": (
        drafts_of([magicjax.expansion((3,))], "with_replacement"),
        dict(change=pruned),
    ),
    "two tries sharing a random number": (
        drafts_of([magicjax.expansion((3,))], "with_replacement"),
        dict(noise="shared"),
    ),
}


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_rule_is_caught(rule):
    drafts, wrong = WRONG_RULES[rule]
    world = World(4, seed=2, spread=1.0)
    found = total_variation(world, drafts, **wrong)
    print(f"{rule}: total variation {found:.3f}")
    assert found > WRONG
    assert total_variation(world, drafts) < EXACT  # and without it all is well
