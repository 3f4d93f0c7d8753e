"""Greedy verification against a slow walk, one row at a time, and the numbers of sampled ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicjax.decoding.rows import sampling_of
from magicjax.sampling_params import SamplingParams
from magicjax.trees import token_tree
from magicjax.trees.proposal import Proposal, deterministic_draws
from magicjax.verification import verify
from tests.magicjax.trees.test_tree import parent_lists, plain_ancestors

NODES, VOCAB, ROWS = 9, 4, 3  # few tokens, so that siblings often have the same one
static = jax.jit(verify.greedy, static_argnums=3)


def walk(choice, tokens, parents):
    """Returns path and bonus of one row: each step takes the first child with the node's choice."""
    node, path = 0, [0]
    while True:
        matching = [
            child
            for child in range(1, len(parents))
            if parents[child] == node and tokens[child] == choice[node]
        ]
        if not matching:
            return path, choice[node]
        node = matching[0]
        path.append(node)


def check(verdict, logits, tokens, rows):
    for row, parents in enumerate(rows):
        path, bonus = walk(logits[row].argmax(-1), tokens[row], parents)
        assert verdict.accepted[row] == len(path) - 1
        assert verdict.bonus[row] == bonus
        padded = path + [path[-1]] * (verdict.path.shape[1] - len(path))
        assert verdict.path[row].tolist() == padded


def drawn(seed: int):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, NODES, VOCAB)).astype(np.float32)
    return logits, rng.integers(0, VOCAB, (ROWS, NODES)).astype(np.int32)


@given(rows=st.lists(parent_lists(NODES), min_size=ROWS, max_size=ROWS), seed=st.integers(0, 999))
def test_a_tree_for_each_row_is_verified_and_padding_never_accepted(rows, seed):
    logits, tokens = drawn(seed)
    # Any tree of 9 nodes: at most 8 deep and 8 wide.
    verdict = static(logits, tokens, jnp.asarray(rows, jnp.int32), NODES - 1)
    check(verdict, logits, tokens, rows)
    padding = np.asarray(token_tree.padding(np.array(rows)))
    assert not np.take_along_axis(padding, np.asarray(verdict.path), 1).any()


@given(parents=parent_lists(NODES, padded=False), seed=st.integers(0, 999))
@pytest.mark.slow
def test_a_shared_tree_is_verified(parents, seed):
    logits, tokens = drawn(seed)
    sees = plain_ancestors(parents)
    greedy = functools.partial(verify.greedy, depth=int(sees.sum(1).max() - 1))
    shared = np.array(parents, np.int32)
    verdict = greedy(jnp.asarray(logits), jnp.asarray(tokens), shared)
    check(verdict, logits, tokens, [parents] * ROWS)


def logits_that_choose(choices) -> jax.Array:
    """Returns logits [1, N, V] whose best token at each node is the given one."""
    return jnp.eye(VOCAB)[np.array([choices])]


@pytest.mark.parametrize("accepted", [0, 7, 8, 9, 16, 20])
def test_chains_deeper_than_what_is_unrolled(accepted):
    nodes = 2 * verify.UNROLLED + 5
    tokens = np.arange(nodes) % VOCAB
    choices = np.append(tokens[1:], 0)
    choices[accepted] = (choices[accepted] + 1) % VOCAB
    logits, parents = logits_that_choose(choices), [*range(-1, nodes - 1)]
    verdict = static(logits, jnp.asarray(tokens[None]), jnp.asarray(parents), nodes - 1)
    check(verdict, logits, tokens[None], [parents])
    assert verdict.accepted.tolist() == [accepted]


def test_among_siblings_with_the_same_token_the_first_is_accepted():
    parents = np.array([-1, 0, 0, 1, 2], np.int32)  # 0 -> 1 -> 3 and 0 -> 2 -> 4
    tokens = jnp.array([[0, 2, 2, 1, 3]])
    verdict = verify.greedy(logits_that_choose([2, 3, 3, 0, 0]), tokens, parents, 2)
    # Node 4 matches below node 2, but the path goes through node 1, the first sibling.
    assert verdict.path.tolist() == [[0, 1, 1]]
    assert (int(verdict.accepted[0]), int(verdict.bonus[0])) == (1, 3)


def test_a_tree_of_only_a_root_gives_the_bonus_token():
    verdict = verify.greedy(
        logits_that_choose([3]), jnp.array([[1]]), token_tree.ROOT_ONLY.array, depth=0
    )
    assert verdict.path.tolist() == [[0]]
    assert (int(verdict.accepted[0]), int(verdict.bonus[0])) == (0, 3)


def test_a_padding_node_with_the_right_token_is_not_accepted():
    parents = jnp.array([[-1, -1, 0]])
    tokens = jnp.array([[0, 2, 1]])
    verdict = verify.greedy(logits_that_choose([2, 2, 2]), tokens, parents, 2)
    assert (int(verdict.accepted[0]), int(verdict.bonus[0])) == (0, 2)
    # The same node is accepted as a child of the root.
    parents = jnp.array([[-1, 0, 0]])
    assert int(verify.greedy(logits_that_choose([2] * 3), tokens, parents, 2).accepted[0]) == 1


def test_the_bonus_token_does_not_depend_on_the_number_that_rejected_the_draft():
    rows, p = 4000, jnp.array([0.4, 0.2, 0.2, 0.2])
    zeros = jnp.zeros(rows, jnp.int32)
    sampling = sampling_of([SamplingParams(temperature=1.0)] * rows)
    draws = deterministic_draws(zeros[:, None], len(p))
    proposal = Proposal(jnp.zeros((rows, 2), jnp.int32), np.array([-1, 0]), draws)
    logits = jnp.broadcast_to(jnp.log(p), (rows, 2, len(p)))
    result = verify.verify_tree("mss", logits, proposal, 1, sampling, zeros)
    bonus = np.asarray(result.bonus)[np.asarray(result.accepted) == 0]
    assert 2200 < len(bonus) < 2600  # token 0 is accepted with probability 0.4
    shares = np.bincount(bonus, minlength=4) / len(bonus)
    np.testing.assert_allclose(shares, [0, *[1 / 3] * 3], atol=0.06)
