"""Trees: numpy for a static tree, JAX for a traced tree of each row, and the definition agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import magicjax
from magicjax.trees import token_tree
from tests.magicjax import tiny

NODES, WIDTH = 11, 4  # one shape, so that the traced functions compile once


@st.composite
def parent_lists(draw, nodes=NODES, padded=True):
    """Lists of parents; with `padded`, some nodes are padding and have no child."""
    parents, real = [-1], [0]
    for node in range(1, nodes):
        if padded and draw(st.integers(0, 4)) == 0:
            parents.append(-1)
        else:
            parents.append(draw(st.sampled_from(real)))
            real.append(node)
    return parents


def plain_ancestors(parents) -> np.ndarray:
    sees = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        up = node
        while up >= 0:
            sees[node, up] = True
            up = parents[up]
    return sees


def plain_children(parents, width) -> list[list[int]]:
    below = [[c for c in range(1, len(parents)) if parents[c] == n] for n in range(len(parents))]
    return [(found + [-1] * width)[:width] for found in below]


FUNCTIONS = {
    "ancestor_mask": (token_tree.ancestor_mask, plain_ancestors),
    "depths": (token_tree.depths, lambda parents: plain_ancestors(parents).sum(1) - 1),
    "padding": (token_tree.padding, lambda p: [n > 0 and up < 0 for n, up in enumerate(p)]),
    "children": (
        functools.partial(token_tree.children, width=WIDTH),
        functools.partial(plain_children, width=WIDTH),
    ),
}
TRACED = {name: jax.jit(function) for name, (function, _) in FUNCTIONS.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
@given(rows=st.lists(parent_lists(), min_size=3, max_size=3))
def test_static_and_traced_trees_follow_the_definition(name, rows):
    function, definition = FUNCTIONS[name]
    wanted = np.array([definition(row) for row in rows])
    traced = TRACED[name](jnp.asarray(rows, jnp.int32))
    assert isinstance(traced, jax.Array)
    np.testing.assert_array_equal(traced, wanted)
    for row, of_row in zip(rows, wanted, strict=True):
        static = function(np.array(row, np.int32))
        assert isinstance(static, np.ndarray)  # known while tracing
        assert static.dtype == traced.dtype
        np.testing.assert_array_equal(static, of_row)


@given(parents=st.integers(1, 40).flatmap(lambda n: parent_lists(n, padded=False)))
def test_the_properties_of_a_tree_follow_from_its_parents(parents):
    tree = magicjax.TokenTree.from_parents(parents)
    sees = plain_ancestors(parents)
    np.testing.assert_array_equal(tree.mask, sees)
    np.testing.assert_array_equal(tree.node_depths, sees.sum(1) - 1)
    assert tree.num_nodes == len(parents)
    assert tree.depth == sees.sum(1).max() - 1
    assert tree.width == max(parents.count(n) for n in range(len(parents)))
    assert tree.children.tolist() == plain_children(parents, max(1, tree.width))


@given(parents=st.integers(1, 40).flatmap(lambda n: parent_lists(n, padded=False)))
def test_levels_list_every_node_with_children_once_at_its_depth(parents):
    tree = magicjax.TokenTree.from_parents(parents)
    listed = [[n for n in level if n < tree.num_nodes] for level in tree.levels.tolist()]
    assert sorted(n for level in listed for n in level) == sorted(set(parents) - {-1})
    for depth, level in enumerate(listed):
        assert level  # every level has a node with children
        assert all(tree.node_depths[n] == depth for n in level)


def test_an_expansion_gives_each_node_of_a_level_its_children():
    tree = magicjax.expansion((2, 2, 1))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
    assert (tree.num_nodes, tree.depth, tree.width) == (11, 3, 2)
    deep = tiny.TREES["1,1,3,1,1,1,1,1"]
    assert (deep.num_nodes, deep.depth, deep.width) == (1 + 1 + 1 + 3 * 6, 8, 3)
    assert magicjax.expansion([1, 1, 1]) == magicjax.chain(3)


def test_a_truncated_tree_has_the_nodes_down_to_a_depth():
    tree = tiny.TREES["irregular"]
    assert token_tree.truncated(tree, 0) == token_tree.ROOT_ONLY
    assert token_tree.truncated(tree, tree.depth) == tree
    assert token_tree.truncated(magicjax.chain(5), 3) == magicjax.chain(3)
    found = token_tree.truncated(magicjax.TokenTree((-1, 0, 1, 2, 0, 4)), 2)
    assert found == magicjax.TokenTree((-1, 0, 1, 0, 3))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("chain:4", magicjax.chain(4)),
        ("expansion:2,2,1", magicjax.expansion((2, 2, 1))),
        ("parents:-1,0,0,1", magicjax.TokenTree((-1, 0, 0, 1))),
    ],
)
def test_parse_tree_reads_every_kind(text, tree):
    assert magicjax.parse_tree(text) == tree


def test_a_tree_prints_as_a_diagram():
    assert str(magicjax.TokenTree.from_parents((-1, 0, 0, 1, 0, 1, 3))) == "\n".join(
        ["7 nodes, depth 3", "0", "├─1", "│ ├─3", "│ │ └─6", "│ └─5", "├─2", "└─4"]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: magicjax.chain(0), "length=0: it must be an integer of at least 1"),
        (lambda: magicjax.chain("4"), "length='4': it must be an integer"),
        (lambda: magicjax.chain(True), "length=True: it must be an integer"),
        (lambda: magicjax.expansion(("2",)), "branches='2': it must be an integer"),
        (lambda: magicjax.chain(256), "257 nodes: at most 256"),
        (lambda: magicjax.expansion((16, 16)), r"expansion\(16, 16\) has more than 256 nodes"),
        (lambda: magicjax.TokenTree((0, 0)), r"parents=\(0, 0\) has no root"),
        (lambda: magicjax.TokenTree((-1, 2, 0)), "node 1 has parent 2: .* between 0 and 0"),
    ],
)
def test_an_invalid_tree_is_rejected_with_the_remedy(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
