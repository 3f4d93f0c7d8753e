"""Prompt lookup proposes the continuations that a slow search finds."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.drafters.simulated_rounds import SimulatedRounds
from magicjax.drafters.text_lookup import TextState
from magicjax.trees.token_tree import ROOT_ONLY
from tests.magicjax.trees.test_merge import sequences

CAPACITY = 64


def state_of(text, lengths, depth: int = 0) -> TextState:
    """Returns the state after a text; rounds of chains of `depth` are simulated."""
    simulated = SimulatedRounds.create(len(text), depth)
    return TextState(jnp.asarray(text), jnp.asarray(lengths, jnp.int32), simulated)


@functools.cache
def proposing(drafter, tree):
    settings = types.SimpleNamespace(tree=tree, capacity=CAPACITY)
    return jax.jit(lambda state, root: drafter.propose(None, state, root, None, None, settings)[0])


def slow(text, drafter, branches: int, depth: int) -> list[tuple[int, ...]]:
    """Returns the continuations of the longest matches of the newest tokens."""
    matches = []
    for at in range(1, len(text)):
        shared = 0
        while shared < min(drafter.max_ngram, at) and text[at - 1 - shared] == text[-1 - shared]:
            shared += 1
        if shared >= drafter.min_ngram:
            matches.append((shared, at))
    found = []
    for _, at in sorted(matches, reverse=True)[:branches]:
        known = list(text[at:])
        found.append(tuple(known[i % len(known)] for i in range(depth)))
    return found


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize(("most", "least"), [(4, 1), (2, 2), (6, 3)])
def test_proposals_are_those_of_a_slow_search(branches, most, least):
    drafter = magicjax.PromptLookup(max_ngram=most, min_ngram=least)
    tree = magicjax.chain(4) if branches == 1 else magicjax.expansion((branches, 1, 1, 1))
    rng = np.random.default_rng(most)
    lengths = np.array([1, 2, 5, 20, 40, 58])
    nothing = 0
    for vocab in (2, 4, 30):
        text = rng.integers(0, vocab, (len(lengths), CAPACITY)).astype(np.int32)
        root = rng.integers(0, vocab, len(lengths)).astype(np.int32)
        state = state_of(text, lengths)
        found = proposing(drafter, tree)(state, jnp.asarray(root))
        for row, length in enumerate(lengths):
            whole = [*text[row, :length].tolist(), int(root[row])]
            paths = slow(whole, drafter, branches, 4)
            wanted = {path[:n] for path in paths for n in range(1, 5)}
            parents = np.asarray(found.parents[row])
            assert set(sequences(np.asarray(found.tokens[row]), parents)) == wanted
            nothing += not wanted
    assert nothing  # rows without a match propose nothing


def test_the_period_of_a_repeated_text_is_continued():
    """The latest match is continued, even if the period is shorter than the tree is deep."""
    drafter, tree = magicjax.PromptLookup(), magicjax.chain(5)
    text = np.resize([7, 8, 9], CAPACITY)[None].astype(np.int32)
    state = state_of(text, [30])
    found = proposing(drafter, tree)(state, jnp.array([7], jnp.int32))
    assert found.tokens[0].tolist() == [7, 8, 9, 7, 8, 9]


def test_tokens_after_the_end_of_a_row_never_match():
    text = np.full((1, CAPACITY), 3, np.int32)
    text[0, :4] = [0, 1, 2, 5]
    state = state_of(text, [4])
    found = proposing(magicjax.PromptLookup(), magicjax.chain(2))(state, jnp.array([3], jnp.int32))
    assert found.parents[0].tolist() == [-1, -1, -1]


def simulated_slowly(text, newest, drafter, depth: int) -> list[int]:
    """Returns how many simulated rounds accepted 0, 1, ... tokens, given the roots of all rounds.

    A round that ends between two roots is followed by one that begins at the second root.
    """
    histogram, root, drafted = [0] * (depth + 1), None, ()
    for at in newest:
        if root is not None:
            after = text[root + 1 : at + 1][:depth]
            right = [a == b for a, b in zip(after, drafted, strict=False)]
            if not all(right) or len(right) == depth:
                histogram[[*right, False].index(False)] += 1
                root = None
        if root is None:
            found = slow(text[: at + 1], drafter, 1, depth)
            root, drafted = at, found[0] if found else (-1,) * depth
    return histogram


@pytest.mark.parametrize("longest", [1, 3])
def test_simulated_rounds_are_those_of_a_slow_search(longest):
    """While other drafters emit up to `longest` tokens per round."""
    drafter, depth, rng = magicjax.PromptLookup(), 3, np.random.default_rng(longest)
    text = np.stack([np.resize(rng.integers(0, 4, n), CAPACITY) for n in (3, 11, 64)])
    text = text.astype(np.int32)
    settings = types.SimpleNamespace(tree=ROOT_ONLY, capacity=CAPACITY)
    step = jax.jit(lambda state, root: drafter.propose(None, state, root, None, None, settings)[1])
    roots = 5 + np.cumsum(rng.integers(1, longest + 1, (20, len(text))), 0)
    state = state_of(text, roots[0], depth)
    for newest in roots:
        root = jnp.asarray(text[np.arange(len(text)), newest])
        count = jnp.asarray(newest, jnp.int32)
        state = dataclasses.replace(state, count=count)
        state = dataclasses.replace(state, simulated=step(state, root))
    found = drafter.simulated(state).tolist()
    assert found == [
        simulated_slowly(row.tolist(), roots[:, i], drafter, depth) for i, row in enumerate(text)
    ]
    assert all(sum(column) for column in zip(*found, strict=True))  # all outcomes occur


def test_rounds_in_which_it_drafts_are_not_simulated():
    simulated = SimulatedRounds.create(1, 2)
    text = jnp.array([[1, 2, 3, 4, 0, 0]])
    opened = simulated.continued(text, jnp.array([1]), lambda: jnp.array([[3, 4]]))
    ended = opened.continued(text, jnp.array([3]), lambda: jnp.array([[9, 9]]))
    assert ended.histogram.tolist() == [[0, 0, 1]]
    closed = opened.closed().continued(text, jnp.array([3]), lambda: jnp.array([[9, 9]]))
    assert closed.histogram.tolist() == [[0, 0, 0]]
