"""One round's output, enumerated over all draws and outcomes, has the target's joint distribution.

Wrong rules, each a small change of the right one, fail the same test.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from tests.magicjax import enumeration
from tests.magicjax.enumeration import Draft, World, distance, emitted, propose
from tests.quick import quick

EXACT, WRONG = 1e-6, 5e-3
CHAIN, PAIRS = magicjax.chain(2), magicjax.expansion((2, 2))
THREE = magicjax.expansion((1, 1, 3))
IRREGULAR = magicjax.TokenTree.from_parents((-1, 0, 0, 1, 0, 1))
STAR, FORK = magicjax.expansion((2,)), magicjax.expansion((2, 1))
WARPED = (0.7, 3, 0.85)  # temperature, top_k, top_p
SETTINGS = {"plain": (1.0, 0, 1.0), "warped": WARPED}
DRAW_METHODS = ("with_replacement", "without_replacement", "top")

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
    return distance(world, found, depth + 1)


def drafts_of(trees, drawing: str) -> list[Draft]:
    return [Draft(i, tree, drawing) for i, tree in enumerate(trees)]


ROUNDS = list(itertools.product(TREES, DRAW_METHODS, SETTINGS))
# Every tree, and every draw method in both settings.
QUICK = [ROUNDS[6 * tree + 2 * (tree % 3) + tree // 3] for tree in range(len(TREES))]


@pytest.mark.parametrize(("tree", "drawing", "setting"), quick(ROUNDS, *QUICK))
def test_a_round_emits_the_targets_own_distribution(tree, drawing, setting):
    vocab, trees = TREES[tree]
    world = World(vocab, SETTINGS[setting], seed=len(tree))
    found = total_variation(world, drafts_of(trees, drawing))
    print(f"{tree}, {drawing}: total variation {found:.1e}")
    assert found < EXACT


@pytest.mark.parametrize(
    "drawing", quick(["with_replacement", "without_replacement"], "without_replacement")
)
def test_random_draws_merged_with_prompt_lookup_are_exact(drawing):
    """Prompt lookup has one-hot draws, after or before those of a draft model."""
    world = World(3, seed=5)
    draft, prompt_lookup = Draft(0, PAIRS, drawing), Draft(1, CHAIN, "top")
    assert total_variation(world, [draft, prompt_lookup]) < EXACT
    assert total_variation(world, [prompt_lookup, draft]) < EXACT


def test_a_draft_that_is_the_target_is_always_accepted():
    class Same(World):
        def probs(self, who, text):
            return super().probs(-1, text)

    world = Same(3)
    weights, proposal = propose(world, drafts_of([CHAIN], "with_replacement"))
    found = emitted(world, weights, proposal, 2)
    assert sum(mass for text, mass in found.items() if len(text) == 3) == pytest.approx(1)


# The wrong rules. Each returns the draws that the verifier tries under that rule.


def skip_repeated(proposal):
    """Tries a token once even if it was drawn several times."""
    draws, parent = proposal.draws, np.array(proposal.draws.parent)
    for row in range(len(parent)):
        tried = set()
        for j in range(parent.shape[1]):
            token = int(proposal.tokens[row, draws.node[row, j]])
            parent[row, j] = -1 if (parent[row, j], token) in tried else parent[row, j]
            tried.add((int(parent[row, j]), token))
    return draws.replace(parent=jnp.asarray(parent))


def not_renormalized(proposal):
    """Does not renormalize q after a draw without replacement."""
    return proposal.draws.replace(replacement=True)


def as_if_drawn(q_index):
    """Verifies the most likely children as if they were drawn at random."""

    def change(proposal):
        shape = proposal.draws.q_index.shape
        return proposal.draws.replace(q_index=jnp.broadcast_to(jnp.asarray(q_index), shape))

    return change


def _by_q(proposal):
    """Returns the probability of each draw, [B, J]."""
    draws = proposal.draws
    rows = np.arange(len(draws.parent))[:, None]
    token = np.asarray(proposal.tokens)[rows, draws.node]
    return np.asarray(draws.q)[rows, draws.q_index, token]


def reordered(proposal):
    """Tries the draws of several drafters in the order of their probability."""
    draws, rows = proposal.draws, np.arange(len(proposal.draws.parent))[:, None]
    order = np.argsort(-_by_q(proposal), axis=1, kind="stable")
    parent, node, q_index = (
        np.asarray(x)[rows, order] for x in (draws.parent, draws.node, draws.q_index)
    )
    return draws.replace(
        parent=jnp.asarray(parent), node=jnp.asarray(node), q_index=jnp.asarray(q_index)
    )


def pruned(proposal):
    """Drops the draw of the lowest probability."""
    parent = np.array(proposal.draws.parent)
    parent[np.arange(len(parent)), _by_q(proposal).argmin(1)] = -1
    return proposal.draws.replace(parent=jnp.asarray(parent))


WRONG_RULES = {
    "the second draw of a repeated token skipped": (
        drafts_of([magicjax.expansion((3,))], "with_replacement"),
        dict(change=skip_repeated),
    ),
    "the same, two drafters": (
        drafts_of([STAR, STAR], "with_replacement"),
        dict(change=skip_repeated),
    ),
    "without replacement, not renormalized": (
        drafts_of([magicjax.expansion((3,))], "without_replacement"),
        dict(change=not_renormalized),
    ),
    "the most likely children scored with p / q": (
        drafts_of([STAR], "top"),
        dict(change=as_if_drawn([0, 0])),
    ),
    "draws of two drafters reordered by q": (
        drafts_of([STAR, STAR], "with_replacement"),
        dict(change=reordered),
    ),
    "drawn children pruned by their probability": (
        drafts_of([magicjax.expansion((3,))], "with_replacement"),
        dict(change=pruned),
    ),
    "two draws sharing a random number": (
        drafts_of([magicjax.expansion((3,))], "with_replacement"),
        dict(noise="shared"),
    ),
}


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_rule_is_detected(rule):
    drafts, wrong = WRONG_RULES[rule]
    world = World(4, seed=2, spread=1.0)
    found = total_variation(world, drafts, **wrong)
    print(f"{rule}: total variation {found:.3f}")
    assert found > WRONG
    assert total_variation(world, drafts) < EXACT  # the right rule is exact


@pytest.mark.parametrize("factor", [0.0, np.nan, np.inf])
def test_a_rule_without_a_distribution_has_a_distance(factor, monkeypatch):
    right = enumeration._next_attempt

    def wrong(*arguments):
        one = right(*arguments)
        rejected = one.if_rejected.replace(p=one.if_rejected.p * factor)
        return one.replace(accept_prob=one.accept_prob * factor, if_rejected=rejected)

    monkeypatch.setattr(enumeration, "_next_attempt", wrong)
    found = total_variation(World(4, seed=2, spread=1.0), drafts_of([STAR], "with_replacement"))
    assert WRONG < found <= 1
