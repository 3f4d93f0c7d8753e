"""Prompt lookup proposes the continuations that a slow search finds."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.drafters.text_lookup import TextState
from tests.magicjax.trees.test_merge import sequences

CAPACITY = 64


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
        state = TextState(jnp.asarray(text), jnp.asarray(lengths, jnp.int32))
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
    text = jnp.asarray(np.resize([7, 8, 9], CAPACITY)[None], jnp.int32)
    state = TextState(text, jnp.array([30], jnp.int32))
    found = proposing(drafter, tree)(state, jnp.array([7], jnp.int32))
    assert found.tokens[0].tolist() == [7, 8, 9, 7, 8, 9]


def test_tokens_after_the_end_of_a_row_never_match():
    text = np.full((1, CAPACITY), 3, np.int32)
    text[0, :4] = [0, 1, 2, 5]
    state = TextState(jnp.asarray(text), jnp.array([4], jnp.int32))
    found = proposing(magicjax.PromptLookup(), magicjax.chain(2))(state, jnp.array([3], jnp.int32))
    assert found.parents[0].tolist() == [-1, -1, -1]
