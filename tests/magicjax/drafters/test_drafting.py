"""Each node's children are the draft model's most likely next tokens, given the draft cache.

A wrong draft still gives an exact text, so only these tests detect it.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.drafters.draft_pass import DraftContext
from magicjax.drafters.static_tree import draft_static_tree, top_tokens
from magicjax.parallel.layouts import Resident
from tests.magicjax import oracle, tiny
from tests.magicjax.kv_cache.test_loop_caches import (
    positions_held,
    prompts_around_the_budget,
    rounds,
)
from tests.quick import quick


@functools.cache
def proposing(tree: str):
    """Returns a compiled function that proposes a tree."""
    settings = types.SimpleNamespace(tree=tiny.TREES[tree], backend=None, drafter_index=0)

    @jax.jit
    def propose(drafter, target, state, root, cache):
        return drafter.propose(target, state, root, cache, None, settings)[0].tokens

    return propose


def path_to(node: int, parents) -> list[int]:
    """Returns the nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def logits_after(model, text, path, positions) -> np.ndarray:
    """Returns the logits after a path whose nodes see only some positions of the text.

    The tokens of the text see all earlier ones, as in the target; the nodes of the path see the
    keys and values at `positions` (None: all), and earlier nodes.
    """
    whole = np.concatenate([text, path]).astype(int)
    sees = np.tril(np.ones((len(whole), len(whole)), bool))
    if positions is not None:
        sees[len(text) :, : len(text)] = np.isin(np.arange(len(text)), positions)
    return oracle.logits(model, whole, sees)[-1]


def check_children(tokens, tree, model, text, positions=None) -> None:
    """Asserts that the children of every node are its most likely tokens, best first.

    Args:
      tokens: of the nodes.
      tree: its name.
      model: the drafter's.
      text: the row's committed tokens.
      positions: the positions that the drafter sees; None: all.
    """
    parents = tiny.TREES[tree].parents
    for node in sorted(set(parents) - {-1}):
        there = logits_after(model, text, tokens[path_to(node, parents)], positions)
        best = np.argsort(-there, kind="stable")
        children = [child for child, parent in enumerate(parents) if parent == node]
        assert tokens[children].tolist() == best[: len(children)].tolist(), f"node {node}"


@pytest.mark.parametrize("kind", quick(["near", "other"], "near"))
def test_a_small_model_drafts_its_most_likely_tokens(kind):
    tree = "irregular"
    backlogged = 0
    for request, state in itertools.islice(rounds(kind, tree, tiny.prompts(8), "float32"), 4):
        tokens = np.asarray(
            proposing(tree)(
                request.drafter, request.target, state.drafter, state.pending, state.cache
            )
        )
        backlogged += int((state.drafter.backlog.count > 0).sum())
        for row, prompt in enumerate(tiny.prompts(8)):
            text = [*prompt, *state.output[row, : state.emitted[row] - 1]]

            assert tokens[row, 0] == state.pending[row]
            check_children(tokens[row], tree, request.drafter.model, text)
    assert backlogged > 0 or kind == "other"  # some rows had a backlog


def test_self_speculation_sees_only_its_pins_and_its_ring():
    tree, prompts = "irregular", prompts_around_the_budget()
    differing = 0
    for request, state in itertools.islice(rounds("self", tree, prompts, "float32"), 4):
        tokens = np.asarray(
            proposing(tree)(
                request.drafter, request.target, state.drafter, state.pending, state.cache
            )
        )
        for row, prompt in enumerate(prompts):
            text = np.concatenate([prompt, state.output[row, : state.emitted[row] - 1]])
            pins = list(range(tiny.SINKS))
            positions = list(positions_held(len(text), pins, tiny.BUDGET).values())

            check_children(tokens[row], tree, request.target, text, positions)
            full = oracle.logits(request.target, [*text, tokens[row, 0]])[-1]
            differing += int(full.argmax() != tokens[row, 1])
    assert differing > 0  # unseen positions change the draft


def test_the_best_tokens_come_best_first():
    logits = jnp.array([[[0.1, 3.0, 2.0, -1.0], [5.0, 0.0, 4.0, 4.5]]])
    assert top_tokens(logits, 1, ()).tolist() == [[[1], [0]]]
    assert top_tokens(logits, 3, ()).tolist() == [[[1, 2, 0], [0, 3, 2]]]


class OtherStage(Resident):
    """A layout whose last hidden states are others than those of this stage."""

    def last_hidden(self, hidden, split):
        return hidden[..., ::-1]


@pytest.mark.parametrize("kind", ["without", "small", "head"])
def test_the_best_rows_of_a_draft_vocabulary_are_the_best_tokens(kind):
    target = tiny.model()
    few, head = tiny.few(target, 20), tiny.head(target)
    model = {"without": target, "small": few, "head": head}[kind]
    model = dataclasses.replace(model, layout=OtherStage())
    hidden = jax.random.normal(jax.random.key(1), (2, 3, model.config.hidden_size))
    rows = top_tokens(model.draft_logits(hidden), 4, ())
    expected = top_tokens(model.unembed(hidden), 4, ())
    np.testing.assert_array_equal(model.draft_tokens(rows), expected)
    assert (rows != expected).any() == (kind == "head")


def test_the_size_of_the_program_does_not_depend_on_the_depth():
    """Levels are scanned: a deeper chain has no more operations."""

    def operations(length):
        tree, target = magicjax.chain(length), tiny.model().with_backend("xla")
        cache = jax.eval_shape(lambda: _empty(target))
        root = jnp.zeros(2, jnp.int32)

        def draft(model, cache, root):
            return draft_static_tree(
                DraftContext(model, model, cache, root, root, None, None, "top", None, 0), tree
            )

        return jax.jit(draft).lower(target, cache, root).as_text().count("dot_general")

    assert operations(2) == operations(8) > 0


def _empty(target):
    from magicjax.kv_cache import full_cache

    return full_cache.empty(target, 2, 16)
