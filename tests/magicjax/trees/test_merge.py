"""Merged trees contain every root-to-node sequence once, and every draw."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from magicjax.trees.merge import merge
from magicjax.trees.proposal import ONE_HOT, Draws, Proposal
from tests.magicjax.trees.test_tree import parent_lists

SIZES, VOCAB, ROWS, DEPTH = (5, 7, 4), 2, 3, 6  # two tokens: prefixes are often shared


def draws_of(parents, first: int) -> Draws:
    """Returns a draw for each node; rows of q are numbered from `first`, by their values."""
    rows, count = parents.shape
    q = first + np.arange(count, dtype=np.float32)[:, None] + np.zeros((count, VOCAB), np.float32)
    return Draws(
        parent=parents[:, 1:],
        node=np.broadcast_to(np.arange(1, count, dtype=np.int32), (rows, count - 1)),
        q_index=np.where(np.arange(count - 1) % 3 == 2, np.int32(ONE_HOT), parents[:, 1:]),
        q=np.broadcast_to(q, (rows, count, VOCAB)),
    )


def proposal_of(rows, seed: int, first: int) -> Proposal:
    parents = np.array(rows, np.int32)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, parents.shape).astype(np.int32)
    tokens[:, 0] = 9
    return Proposal(tokens, parents, draws_of(parents, first))


def sequence(tokens, parents, node: int) -> tuple[int, ...]:
    path = []
    while node > 0:
        path.insert(0, int(tokens[node]))
        node = parents[node]
    return tuple(path)


def sequences(tokens, parents) -> list[tuple[int, ...]]:
    """Returns the token sequences of all nodes but the root and padding."""
    return [sequence(tokens, parents, n) for n in range(1, len(parents)) if parents[n] >= 0]


merged = jax.jit(lambda proposals: merge(proposals, DEPTH))
batches = [st.lists(parent_lists(n), min_size=ROWS, max_size=ROWS) for n in SIZES]


@given(st.tuples(*batches), st.integers(0, 999))
def test_the_merged_tree_is_the_union_of_sequences_and_keeps_every_draw(rows, seed):
    proposals = [proposal_of(r, seed + i, 100 * i) for i, r in enumerate(rows)]
    found, node_of = jax.device_get(merged(proposals))
    assert found.tokens.shape == (ROWS, 1 + sum(n - 1 for n in SIZES))
    for row in range(ROWS):
        parents, tokens = found.parents[row], found.tokens[row]
        union = set()
        for proposal, numbers in zip(proposals, node_of, strict=True):
            own_tokens, own_parents = proposal.tokens[row], np.asarray(proposal.parents)[row]
            union |= set(sequences(own_tokens, own_parents))
            for node in range(len(own_parents)):
                if node and own_parents[node] < 0:
                    assert numbers[row, node] == -1
                    continue
                same = sequence(tokens, parents, numbers[row, node])
                assert same == sequence(own_tokens, own_parents, node)
        listed = sequences(tokens, parents)
        assert len(listed) == len(set(listed)) and set(listed) == union
        real = np.flatnonzero(parents[1:] >= 0)
        assert real.tolist() == list(range(len(union)))  # padding comes last
        assert all(parents[n] < n for n in range(1, len(parents)))
        assert parents[0] == -1 and tokens[0] == 9
        check_draws(found, proposals, row)


def check_draws(found, proposals, row) -> None:
    """Asserts that all draws are kept in order, with their prefix, token and distribution."""

    def draws_in(proposal, row):
        draws, tokens = proposal.draws, np.asarray(proposal.tokens)[row]
        parents = np.broadcast_to(np.asarray(proposal.parents), proposal.tokens.shape)[row]
        for j in range(draws.parent.shape[1]):
            if draws.parent[row, j] < 0:
                continue
            q_index = int(draws.q_index[row, j])
            q = None if q_index == ONE_HOT else float(draws.q[row, q_index, 0])
            yield (
                sequence(tokens, parents, draws.parent[row, j]),
                sequence(tokens, parents, draws.node[row, j]),
                q,
            )

    wanted = [draw for proposal in proposals for draw in draws_in(proposal, row)]
    assert list(draws_in(found, row)) == wanted
