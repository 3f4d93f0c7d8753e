"""Suffix lookup proposes the trees of a slow search in the row's own text and in its store."""

import dataclasses
import functools
import types
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.drafters import suffix_lookup
from magicjax.drafters.simulated_rounds import SimulatedRounds
from magicjax.drafters.text_lookup import TextState
from tests.magicjax import keywords, tiny
from tests.magicjax.trees.test_merge import sequences
from tests.quick import quick

CAPACITY = 64
ROWS = 16
Paths = list[tuple[int, ...]]


def slow_matches(texts, own, drafter, depth: int) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the lengths and usable continuations of the best matches, the best first."""
    found = []
    for age, text in enumerate([*texts, own]):
        for at in range(1, len(text)):
            shared = 0
            while shared < min(drafter.max_match, at, len(own)):
                if text[at - 1 - shared] != own[-1 - shared]:
                    break
                shared += 1
            if shared:
                found.append((shared, age, at))
    matches = []
    for shared, age, at in sorted(found, reverse=True)[: suffix_lookup.CANDIDATES]:
        known = list([*texts, own][age][at:])
        if age == len(texts):
            known *= depth  # its own text repeats its period
        matches.append((shared, tuple(known[: min(depth, int(drafter.max_factor * shared))])))
    return matches


def slow_tree(texts, own, drafter, shape) -> Paths:
    """Returns the paths of the chosen nodes, parents first and siblings best first."""
    matches = slow_matches(texts, own, drafter, shape.depth)
    score, first = {}, {}
    for number, (shared, tokens) in enumerate(matches):
        for depth in range(1, len(tokens) + 1):
            path = tokens[:depth]
            score[path] = score.get(path, 0) + Fraction(4) ** shared
            first.setdefault(path, number)
    least = Fraction(str(drafter.min_score)) * sum(Fraction(4) ** shared for shared, _ in matches)
    kept: Paths = []
    for depth in range(1, shape.depth + 1):
        for parent in [path for path in kept if len(path) == depth - 1] if depth > 1 else [()]:
            children = [path for path in score if path[:-1] == parent]
            children.sort(key=lambda path: (-score[path], first[path]))
            kept += [path for path in children[: shape.width] if score[path] >= least]
    kept.sort(key=lambda path: (-score[path], len(path), first[path]))
    return sorted(
        kept[: shape.num_nodes - 1], key=lambda path: (len(path), -score[path], first[path])
    )


def stored(drafter) -> list[list[int]]:
    """Returns the texts of the store, the oldest first."""
    if drafter.store is None:
        return []
    joined = " ".join(map(str, drafter.store.tolist()))
    return [[int(token) for token in text.split()] for text in joined.split("-1")]


@functools.cache
def proposing(tree):
    settings = types.SimpleNamespace(tree=tree, capacity=CAPACITY)
    return jax.jit(
        lambda drafter, state, root: drafter.propose(None, state, root, None, None, settings)[0]
    )


def proposals(drafter, tree, texts, vocab_size=99) -> list[Paths]:
    """Returns what the compiled drafter proposes for each text, whose last token is the root."""
    state = np.zeros((len(texts), CAPACITY), np.int32)
    state += vocab_size - 1  # of no meaning after a row's end
    for row, text in zip(state, texts, strict=True):
        row[: len(text) - 1] = text[:-1]
    counts, roots = zip(*[(len(text) - 1, text[-1]) for text in texts], strict=True)
    simulated = SimulatedRounds.create(len(counts), 0)
    state = TextState(jnp.asarray(state), jnp.int32(counts), simulated)
    found = proposing(tree)(drafter.for_target(None), state, jnp.int32(roots))
    tokens, parents = np.asarray(found.tokens), np.asarray(found.parents)
    assert tokens.shape == parents.shape == (len(texts), tree.num_nodes)
    assert tokens[:, 0].tolist() == list(roots)
    for row in parents:  # padding comes last
        assert sorted(row[1:] < 0) == (row[1:] < 0).tolist()
        assert all(row[n] < n for n in range(len(row)))
    return [sequences(*row) for row in zip(tokens, parents, strict=True)]


def check(tree, **options) -> None:
    """Compares proposals in random stores and texts with the slow search."""
    rng, counted = np.random.default_rng(len(str(tree))), []
    for vocab_size in (2, 3, 6, 30):
        drafter = magicjax.SuffixLookup(**dict(store_tokens=90) | options)
        for length in rng.integers(1, 30, 8):  # more than fit
            drafter = drafter.remember(rng.integers(0, vocab_size, length))
        lengths = [1, 2, 3, CAPACITY, *rng.integers(1, CAPACITY, ROWS - 4)]
        texts = [rng.integers(0, vocab_size, n).tolist() for n in lengths]
        texts[0] = [vocab_size]  # occurs nowhere
        for text, found in zip(texts, proposals(drafter, tree, texts, vocab_size), strict=True):
            assert found == slow_tree(stored(drafter), text, drafter, tree.shape), text
            counted.append(len(found))
    assert 0 in counted and tree.num_nodes - 1 in counted


CASES = {
    "a chain": (magicjax.chain(5), {}),
    "a dynamic tree": (magicjax.DynamicTree(12, 4, 3), {}),
    "narrow": (magicjax.DynamicTree(9, 4, 2), dict(max_match=3, max_factor=1.5, min_score=0.2)),
    "all": (magicjax.DynamicTree(30, 3, 9), dict(max_match=14, max_factor=9.0, min_score=0.0)),
    "own text": (magicjax.chain(4), dict(store_tokens=0)),
}


@pytest.mark.parametrize("case", quick(CASES, "a chain", "a dynamic tree"))
def test_proposals_are_those_of_a_slow_search(case):
    tree, options = CASES[case]
    check(tree, **options)


def wrong_rule(monkeypatch, rule: str) -> None:
    """Breaks one rule of the choice."""
    matches, scores, nodes = (
        getattr(suffix_lookup, name) for name in ("match_lengths", "path_scores", "best_nodes")
    )
    if rule == "matches of all lengths weigh the same":
        name, wrong = "path_scores", lambda c: scores(c.replace(length=jnp.minimum(c.length, 1)))
    elif rule == "a match spans two texts":
        name, wrong = "match_lengths", lambda text, newest: matches(jnp.abs(text), newest)
    else:
        assert rule == "a node has the parent before its own"

        def wrong(*arguments):
            tokens, parents = nodes(*arguments)
            return tokens, jnp.where(parents > 0, parents - 1, parents)

        name = "best_nodes"
    monkeypatch.setattr(suffix_lookup, name, wrong)


@pytest.mark.parametrize(
    "rule",
    quick(
        [
            "matches of all lengths weigh the same",
            "a match spans two texts",
            "a node has the parent before its own",
        ],
        "a node has the parent before its own",
    ),
)
def test_a_wrong_rule_is_found(rule, monkeypatch, request):
    proposing.cache_clear()
    request.addfinalizer(proposing.cache_clear)
    wrong_rule(monkeypatch, rule)
    with pytest.raises(AssertionError):
        check(*CASES["a dynamic tree"][:1])


def test_the_example_of_the_docstring():
    drafter = magicjax.SuffixLookup(store_tokens=16).remember([1, 2, 3, 4]).remember([1, 2, 3, 5])
    own = [9, 2, 6, 1, 2]
    tree = magicjax.DynamicTree(5, 2, 2)
    assert proposals(drafter, tree, [own]) == [[(3,), (6,), (3, 5), (3, 4)]]
    stricter = dataclasses.replace(drafter, min_score=0.2)
    assert proposals(stricter, tree, [own]) == [[(3,), (3, 5), (3, 4)]]
    assert proposals(drafter, magicjax.chain(3), [own]) == [[(3,), (3, 5)]]


def test_the_period_of_a_repeated_text_is_continued():
    text = np.resize([7, 8, 9], 31).tolist()
    (found,) = proposals(magicjax.SuffixLookup(store_tokens=0), magicjax.chain(5), [text])
    assert found[-1] == (8, 9, 7, 8, 9)


def test_answers_are_remembered_with_the_end_of_their_prompts():
    drafter = magicjax.SuffixLookup(2, store_tokens=8)
    assert drafter.remember([1, 2, 3, 4, 5], prompt=3).store.tolist() == [
        -1,
        -1,
        -1,
        2,
        3,
        4,
        5,
        -1,
    ]
    assert drafter.remember([1, 2, 3], prompt=1).store.tolist() == [-1, -1, -1, -1, 1, 2, 3, -1]
    assert drafter.store is None
    ensemble = magicjax.Ensemble([magicjax.PromptLookup(), drafter])
    assert ensemble.remembers and not magicjax.Ensemble([magicjax.PromptLookup()]).remembers
    assert ensemble.remember([1, 2], 0).drafters[1].store.tolist() == [-1] * 5 + [1, 2, -1]


def test_documents_are_tokenized_once(directory, tmp_path):
    target = magicjax.load(directory, dtype="float32")
    path = tmp_path / "documents.txt"
    path.write_text(tiny.SOURCE, "utf-8")
    ids = target.tokenizer(tiny.SOURCE)["input_ids"]
    drafter = magicjax.SuffixLookup(store_tokens=len(ids) + 1, documents=str(path))
    for given in (drafter, drafter.for_target(target)):
        request = keywords.prepare(target, [[1]], drafter=given, max_tokens=1)
        assert stored(request.drafter) == [ids, []]
    drafter = dataclasses.replace(drafter, store_tokens=len(ids))
    with pytest.raises(
        ValueError, match=f"has {len(ids)} tokens, .*: use store_tokens={len(ids) + 1}"
    ):
        drafter.for_target(target)
