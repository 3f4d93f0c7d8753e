"""Dynamic trees contain the nodes of the highest path probability, by a beam search."""

import functools
import itertools
import types

import jax
import numpy as np
import pytest

import magicjax
from magicjax.decoding.rows import sampling_of
from tests.magicjax import keywords, oracle, tiny
from tests.magicjax.kv_cache.test_loop_caches import rounds
from tests.magicjax.trees.test_merge import sequences
from tests.quick import quick

TREE = tiny.SPECIAL["dynamic"]
EARLY = magicjax.DynamicTree(9, 4, 3, min_prob=0.1)
CHAIN = magicjax.DynamicTree(5, 4, 1, min_prob=0.5)
TREES = [TREE, EARLY, CHAIN, magicjax.DynamicTree(4, 5, 1), magicjax.DynamicTree(5, 1, 6)]


@functools.cache
def proposing(tree: magicjax.DynamicTree):
    settings = types.SimpleNamespace(tree=tree, backend=None, drafter_index=0)

    @jax.jit
    def propose(drafter, target, state, root, cache, warped):
        return drafter.propose(target, state, root, cache, warped, settings)[0]

    return propose


def grown(tree, model, text, temperature=1.0) -> dict[tuple[int, ...], float]:
    """Returns {path: log-probability} of the expected nodes, by a slow beam search."""

    def logp(path):
        logits = oracle.logits(model, [*text, *path])[-1] / temperature
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    found, newest = {}, {(): 0.0}
    least = np.log(tree.min_prob) if tree.min_prob else -np.inf
    for _ in range(tree.depth):
        if max(newest.values()) < least:
            break
        best = sorted(newest, key=newest.get, reverse=True)[: tree.width]
        level = {}
        for path in best:
            p = logp(path)
            for token in np.argsort(-p)[: tree.width]:
                level[(*path, int(token))] = newest[path] + p[token]
        found |= level
        newest = level
    kept = sorted(found, key=found.get, reverse=True)[: tree.nodes - 1]
    return {path: found[path] for path in kept}


@pytest.mark.parametrize("temperature", quick([None, 0.7], 0.7))
@pytest.mark.parametrize("tree", quick(TREES, EARLY))
def test_each_row_proposes_the_most_probable_paths(tree, temperature):
    shapes = set()
    for request, state in itertools.islice(
        rounds("near", "dynamic", tiny.prompts(8), "float32"), 3
    ):
        warped = None
        if temperature is not None:
            warped = sampling_of([magicjax.SamplingParams(temperature=temperature)] * 8)
        found = proposing(tree)(
            request.drafter, request.target, state.drafter, state.pending, state.cache, warped
        )
        assert found.tokens[:, 0].tolist() == state.pending.tolist()
        for row, prompt in enumerate(tiny.prompts(8)):
            text = [*prompt, *state.output[row, : state.emitted[row]]]
            wanted = grown(tree, request.drafter.model, text, temperature or 1.0)
            parents = np.asarray(found.parents[row])
            assert all(parents[n] < n for n in range(tree.nodes))
            is_node = np.asarray(parents >= 0) | (np.arange(tree.nodes) == 0)
            tokens = np.asarray(found.tokens[row])[is_node]
            assert set(sequences(tokens, parents[is_node])) == set(wanted)
            shapes.add(tuple(parents.tolist()))
    assert (
        len(shapes) > (1 if tree.min_prob else 4) or tree.width == 1 or tree.depth == 1
    )  # rows have different trees


@pytest.mark.slow
def test_a_draft_that_ends_early_does_not_depend_on_other_rows():
    """A row that goes on drafts more in a pass that others do not need."""
    prompts, options = tiny.prompts(8), dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    options |= dict(drafter=tiny.drafter("near"), tree=EARLY, temperature=0.7)
    together = keywords.generate(tiny.model(), prompts, **options)
    for rows in (1, 4):
        alone = keywords.generate(tiny.model(), prompts[:rows], **options)
        np.testing.assert_array_equal(alone.tokens, together.tokens[:rows])


def test_a_probability_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="min_prob=1.0: it must be at least 0 and below 1"):
        magicjax.DynamicTree(5, 4, 1, min_prob=1.0)
    with pytest.raises(TypeError, match="min_prob='a': it must be a number"):
        magicjax.DynamicTree(5, 4, 1, min_prob="a")
    assert magicjax.parse_tree("dynamic:9,4,3,0.1") == EARLY
    with pytest.raises(ValueError, match="'chain:4,0.5' is not a tree"):
        magicjax.parse_tree("chain:4,0.5")


@pytest.mark.slow
def test_tokens_removed_by_top_k_are_padding_and_never_proposed():
    request, state = next(rounds("near", "dynamic", tiny.prompts(8), "float32"))
    one_token = sampling_of([magicjax.SamplingParams(temperature=1.0, top_k=1)] * 8)
    found = proposing(TREE)(
        request.drafter, request.target, state.drafter, state.pending, state.cache, one_token
    )
    parents = np.asarray(found.parents)
    assert ((parents >= 0).sum(1) == TREE.depth).all()  # only a chain is left
    assert (np.asarray(found.draws.parent) == parents[:, 1:]).all()
