"""Drafts are what they claim to be. A bad draft leaves the text exact, so only these tests see it:
each node's children are its model's best next tokens, seen through the draft's cache.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.drafters.draft_pass import Source
from magicjax.drafters.static_tree import draft_levels, top_tokens
from tests.magicjax import oracle, tiny
from tests.magicjax.test_loop_caches import positions_held, prompts_around_the_budget, rounds


@functools.cache
def proposing(tree: str):
    """Returns one compiled function for each tree: the proposal of a state."""
    settings = types.SimpleNamespace(tree=tiny.TREES[tree], backend=None, index=0)

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


def logits_behind(model, text, path, positions) -> np.ndarray:
    """Returns the logits behind a path whose nodes see only some positions of the text.

    The text itself is run whole, as the target verified it; the path's nodes see the keys and
    values at `positions` (None: all), and one another.
    """
    whole = np.concatenate([text, path]).astype(int)
    sees = np.tril(np.ones((len(whole), len(whole)), bool))
    if positions is not None:
        sees[len(text) :, : len(text)] = np.isin(np.arange(len(text)), positions)
    return oracle.logits(model, whole, sees)[-1]


def check_children(tokens, tree, model, text, positions=None) -> None:
    """Asserts that the children of every node are the best tokens behind it, best first.

    Args:
      tokens: of the nodes.
      tree: its name.
      model: the drafter's.
      text: the row's committed tokens.
      positions: those that the drafter sees; None: all.
    """
    parents = tiny.TREES[tree].parents
    for node in sorted(set(parents) - {-1}):
        there = logits_behind(model, text, tokens[path_to(node, parents)], positions)
        best = np.argsort(-there, kind="stable")
        children = [child for child, parent in enumerate(parents) if parent == node]
        assert tokens[children].tolist() == best[: len(children)].tolist(), f"node {node}"


@pytest.mark.parametrize("kind", ["near", "other"])
def test_a_small_model_drafts_its_own_best_continuations(kind):
    tree = "irregular"
    played = list(rounds(kind, tree, tiny.prompts(8), "float32"))
    lacking = 0
    for request, state in played[:4]:
        tokens = np.asarray(
            proposing(tree)(
                request.drafter, request.target, state.drafter, state.pending, state.cache
            )
        )
        lacking += int((state.drafter.lead.count > 0).sum())
        for row, prompt in enumerate(tiny.prompts(8)):
            text = [*prompt, *state.output[row, : state.emitted[row] - 1]]

            assert tokens[row, 0] == state.pending[row]
            check_children(tokens[row], tree, request.drafter.model, text)
    assert lacking > 0 or kind == "other"  # rows whose last leaf had to be run again


def test_self_speculation_drafts_through_its_pins_and_its_newest_tokens_only():
    tree, prompts = "irregular", prompts_around_the_budget()
    differing = 0
    for request, state in list(rounds("self", tree, prompts, "float32"))[:4]:
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
    assert differing > 0  # what is not seen matters: the view is a sparse one


def test_the_best_tokens_come_best_first():
    logits = jnp.array([[[0.1, 3.0, 2.0, -1.0], [5.0, 0.0, 4.0, 4.5]]])
    assert top_tokens(logits, 1, ()).tolist() == [[[1], [0]]]
    assert top_tokens(logits, 3, ()).tolist() == [[[1, 2, 0], [0, 3, 2]]]


def test_drafting_a_level_is_the_same_program_however_deep_the_chain():
    """Levels are scanned: a deeper chain has no more operations."""

    def operations(length):
        tree, target = magicjax.chain(length), tiny.model()
        cache = jax.eval_shape(lambda: _empty(target))
        root = jnp.zeros(2, jnp.int32)

        def draft(model, cache, root):
            return draft_levels(
                Source(model, model, cache, root, root, None, None, "top", None, 0), tree
            )

        return jax.jit(draft).lower(target, cache, root).as_text().count("dot_general")

    assert operations(2) == operations(8) > 0


def _empty(target):
    from magicjax.kv_cache import full_cache

    return full_cache.empty(target.config.num_layers, 2, 2, 16, target.config.head_dim, jnp.float32)
