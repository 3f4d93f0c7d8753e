"""The chain of a cascade is the middle model's own text, whatever the first drafter proposes.

A wrong chain still gives an exact text if the verifier is told how it was drawn, so only these
tests detect it.
"""

import collections
import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest
import scipy.stats

import magicjax
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.drafters import cascade
from magicjax.drafters.spec import make_drafter, resolve
from magicjax.trees.token_tree import NO_NODE
from magicjax.verification.verify import VerifyResult
from tests.magicjax import keywords, tiny
from tests.magicjax.decoding import test_joint as joint
from tests.magicjax.drafters.test_drafting import logits_after
from tests.magicjax.kv_cache.test_loop_caches import (
    positions_held,
    prompts_around_the_budget,
    rounds,
)
from tests.quick import quick

PROMPTS = prompts_around_the_budget()
FIRST = {
    "small": lambda: (tiny.drafter("near"), tiny.TREES["2,2,1"]),
    "small, dynamic": lambda: (tiny.drafter("near"), tiny.SPECIAL["dynamic"]),
    "wrong": lambda: (tiny.drafter("other"), tiny.TREES["chain3"]),
    "right": lambda: (tiny.drafter("same"), tiny.TREES["chain3"]),
    "prompt-lookup": lambda: (tiny.drafter("prompt-lookup"), tiny.SPECIAL["branches"]),
    "eagle": lambda: (tiny.drafter("eagle"), tiny.TREES["2,2,1"]),
    "ensemble": lambda: (tiny.drafter("ensemble"), tiny.TREES["chain2"]),
    "suffix": lambda: (tiny.drafter("suffix"), tiny.TREES["chain3"]),
}


@functools.cache
def proposing(settings):
    """Returns a compiled function that proposes from the state of a loop."""

    @jax.jit
    def propose(drafter, target, state):
        arguments = target, state.drafter, state.pending, state.cache, state.rows.sampling
        return drafter.propose(*arguments, settings)[0]

    return propose


def proposals(drafter, tree, count: int = 4):
    """Yields states of `drafter` between rounds, as numpy, each with its next proposal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "drafter", lambda *_: drafter)
        patch.setitem(tiny.SPECIAL, "own", tree)
        played = list(itertools.islice(rounds("own", "own", PROMPTS, "float32"), count))
    propose = proposing(played[0][0].settings)
    for request, state in played:
        found = propose(request.drafter, request.target, state)
        yield request, state, jax.tree.map(np.asarray, found)


def texts_of(state) -> list[np.ndarray]:
    """Returns each row's text without the pending token."""
    return [
        np.concatenate([prompt, output[: emitted - 1]])
        for prompt, output, emitted in zip(PROMPTS, state.output, state.emitted, strict=True)
    ]


def streaming_chain(target, text, root: int, length: int) -> list[int]:
    """Returns the greedy tokens after a root that see the pins and the ring of a text only."""
    positions = list(positions_held(len(text), range(tiny.SINKS), tiny.BUDGET).values())
    chain = [root]
    for _ in range(length):
        chain.append(int(logits_after(target, text, chain, positions).argmax()))
    return chain


@pytest.mark.parametrize("first", quick(FIRST, "small"))
@pytest.mark.slow
def test_a_greedy_chain_is_the_text_of_the_middle_model_on_its_sparse_cache(first):
    drafter, tree = FIRST[first]()
    length = 6
    made = magicjax.Cascade(drafter, tiny.drafter("self"), tree)
    for request, state, proposal in proposals(made, magicjax.chain(length)):
        np.testing.assert_array_equal(proposal.parents, [[NO_NODE, *range(length)]] * len(PROMPTS))
        for row, text in enumerate(texts_of(state)):
            wanted = streaming_chain(request.target, text, int(state.pending[row]), length)
            assert proposal.tokens[row].tolist() == wanted


@pytest.mark.parametrize("first", quick(FIRST, "prompt-lookup"))
@pytest.mark.slow
def test_one_tree_makes_chains_of_the_accepted_tokens_and_one_more(first):
    drafter, tree = FIRST[first]()
    made, lengths = magicjax.Cascade(drafter, tiny.drafter("self")), set()
    for request, state, proposal in proposals(made, tree):
        for row, text in enumerate(texts_of(state)):
            count = int((proposal.parents[row] != NO_NODE).sum())
            lengths.add(count)
            padding = [NO_NODE] * (tree.depth + 1 - count)
            assert proposal.parents[row].tolist() == [NO_NODE, *range(count), *padding]
            wanted = streaming_chain(request.target, text, int(state.pending[row]), count)
            assert proposal.tokens[row, : count + 1].tolist() == wanted
    assert min(lengths) >= 1
    assert len(lengths) > 1 or first in ("wrong", "eagle")


MIDDLE = {
    "copy": lambda: magicjax.FullCacheSpeculation("int4:8"),
    "pages": lambda: tiny.drafter("quest"),
    "skipped layers": lambda: magicjax.FullCacheSpeculation(layers="0"),
    "copy on a sparse cache": lambda: dataclasses.replace(tiny.drafter("self"), weights="int8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("middle", MIDDLE)
def test_a_greedy_chain_is_what_the_middle_drafter_proposes_itself(middle):
    own, tree = MIDDLE[middle](), magicjax.chain(5)
    made = magicjax.Cascade(tiny.drafter("near"), own, tiny.TREES["2,2,1"])
    for request, state, proposal in proposals(made, tree):
        own_state = state.replace(drafter=state.drafter.middle)
        propose = proposing(request.settings)
        alone = propose(request.drafter.middle, request.target, own_state)
        np.testing.assert_array_equal(proposal.tokens, alone.tokens)


ROWS = 20_000
SAMPLED = {
    "small, 2,2": lambda: (joint.small(1), joint.PAIRS),
    "small, chain": lambda: (joint.small(1), magicjax.chain(2)),
    "prompt-lookup": lambda: (magicjax.PromptLookup(), joint.BRANCHES),
    "ensemble": lambda: (joint.ensemble(), joint.PAIRS),
    "suffix": lambda: (joint.suffix(), joint.DYNAMIC),
    "eagle, dynamic": lambda: (joint.eagle(), joint.DYNAMIC),
}


def sampled_chains(drafter, tree) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of many chains after one prompt, and how many each row has."""
    request = keywords.prepare(
        joint.model(0),
        [joint.PROMPT] * ROWS,
        drafter=drafter,
        tree=tree,
        max_tokens=joint.LENGTH,
        eos_token_id=[],
        temperature=1.0,
    )
    state = Decoder(request).start()
    proposal = proposing(request.settings)(request.drafter, request.target, state)
    return np.asarray(proposal.tokens), (np.asarray(proposal.parents) != NO_NODE).sum(1)


def p_value_of_chains(tokens, counts, positions) -> float:
    """Returns the chi-square p-value of each token's distribution given those before it.

    A token counts where it exists. `positions` are those of the prompt that the middle model sees;
    tokens after prefixes with few rows are left out.
    """
    after: dict[tuple, collections.Counter] = collections.defaultdict(collections.Counter)
    for row, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        for i in range(1, count + 1):
            after[tuple(row[:i])][row[i]] += 1
    statistic = degrees = 0.0
    for prefix, found in after.items():
        p = joint.warped(logits_after(joint.model(0), joint.PROMPT, prefix, positions))
        expected = p * sum(found.values())
        if expected.min() >= 5:
            observed = np.array([found[token] for token in range(joint.VOCAB)])
            statistic += ((observed - expected) ** 2 / expected).sum()
            degrees += joint.VOCAB - 1
    assert degrees > 50
    return float(scipy.stats.chi2.sf(statistic, degrees))


@pytest.mark.parametrize("first", quick(SAMPLED, "small, 2,2"))
@pytest.mark.parametrize("once", quick([False, True], True))
def test_every_token_of_a_sampled_chain_has_the_middle_models_distribution(first, once):
    drafter, tree = SAMPLED[first]()
    middle = magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=1), budget=6)
    made = magicjax.Cascade(drafter, middle, None if once else tree)
    tokens, counts = sampled_chains(made, tree if once else magicjax.chain(3))
    assert (len(set(counts.tolist())) > 1) == once
    seen = list(positions_held(len(joint.PROMPT), [0], middle.budget).values())
    p = p_value_of_chains(tokens, counts, seen)
    print(f"{first}, once: {once}: p = {p:.3f}")
    assert p > 1e-3
    assert p_value_of_chains(tokens, counts, None) < 1e-9  # the target's on its whole cache


def test_the_first_trees_nodes_are_numbered_along_the_chain():
    path = np.array([[0, 2, 3], [0, 1, 1], [0, 0, 0]], np.int32)
    result = VerifyResult(path, np.array([2, 1, 0]), None, None)
    found = cascade._nodes_of_chain(result, 4)
    np.testing.assert_array_equal(found, [[0, -1, 1, 2], [0, 1, -1, -1], [0, -1, -1, -1]])


def of(first=None, middle=None, first_tree=None) -> magicjax.Cascade:
    first = magicjax.PromptLookup() if first is None else first
    return magicjax.Cascade(first, middle or tiny.drafter("self"), first_tree)


def check(drafter, tree, **options) -> None:
    keywords.prepare(tiny.model(), [[1, 2, 3]], drafter=drafter, tree=tree, **options)


class Plain(magicjax.PromptLookup):
    """A drafter that cannot draft within a round."""

    rewind = magicjax.Drafter.rewind


def middle_of_a_layer():
    return dataclasses.replace(tiny.drafter("self"), layers="0")


CHAIN = magicjax.chain
LOOKUP = magicjax.PromptLookup()
REFUSED = {
    "first": (lambda: of(tiny.drafter("self")), "first=SelfSpeculation: .* use PromptLookup, Suff"),
    "cascade": (lambda: of(of()), "first=Cascade: .* does not define `rewind`"),
    "member": (lambda: of(magicjax.Ensemble([LOOKUP, Plain()])), "first=Plain: it cannot draft"),
    "text": (lambda: of("prompt-lookup"), "first=str: it cannot draft within a round"),
    "middle": (lambda: of(middle=LOOKUP), "middle=PromptLookup: .* use SelfSpeculation, FullCache"),
    "draw": (
        lambda: of(middle=magicjax.FullCacheSpeculation(draw="top")),
        "draw='top' of the middle drafter has no effect, .*: omit draw",
    ),
    "trees": (
        lambda: of(magicjax.Ensemble([LOOKUP], [CHAIN(2)])),
        "the ensemble has a tree for each drafter, .*: omit its trees, and give first_tree",
    ),
    "no tree": (lambda: of(first_tree="chain:2"), "'chain:2' is not a tree: use magicjax.parse_tr"),
    "nested": (
        lambda: magicjax.Ensemble([of(), LOOKUP]),
        "a cascade within an ensemble is not supported: use the other drafters in an ensemble",
    ),
    "no chain": (
        lambda: check(of(first_tree=CHAIN(2)), tiny.TREES["2,2,1"]),
        "the target of a cascade verifies a chain: use chain:3 instead of",
    ),
    "a dynamic tree": (
        lambda: check(of(first_tree=CHAIN(2)), tiny.SPECIAL["dynamic"]),
        "the target of a cascade verifies a chain: use chain:4 instead of",
    ),
    "first deeper": (
        lambda: check(of(first_tree=CHAIN(5)), CHAIN(4)),
        "first drafter's tree has depth 5, and the target verifies a chain of 4: use at least ch",
    ),
    "first of a root": (
        lambda: check(of(first_tree=magicjax.TokenTree((-1,))), CHAIN(4)),
        "first_tree has only a root: give it a child",
    ),
    "a tree of the first": (
        lambda: check(of(first_tree=tiny.TREES["2,2,1"]), CHAIN(4)),
        "prompt lookup proposes chains, and this tree branches",
    ),
    "a ring of the middle": (
        lambda: check(of(first_tree=CHAIN(2)), CHAIN(10)),
        r"its ring has 10 slots .* needs at least tree depth \(10\) . 1 = 11",
    ),
    "a head and skipped layers": (
        lambda: check(of(tiny.drafter("eagle"), middle_of_a_layer()), CHAIN(2)),
        "a learned head, which reads inputs of all layers, .* layers='0' only: omit layers",
    ),
    "mixed draws": (
        lambda: check(
            of(
                magicjax.Ensemble(
                    [
                        magicjax.SmallModel(tiny.model("near"), "with_replacement"),
                        magicjax.SmallModel(tiny.model("other"), "without_replacement"),
                    ]
                )
            ),
            CHAIN(2),
            temperature=1.0,
        ),
        "mixes draws with and without replacement",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_a_cascade_is_an_error_before_anything_is_compiled(what):
    make, message = REFUSED[what]
    compiled = program_cache.totals()
    with pytest.raises((TypeError, ValueError), match=message):
        make()
    assert program_cache.totals() == compiled


@pytest.mark.parametrize(
    ("drafter", "tree", "first_tree", "own"),
    [
        ("prompt-lookup:3 -> self:streaming:64", "chain:2 -> chain:4", CHAIN(2), CHAIN(4)),
        ("prompt-lookup:3 -> full", "expansion:2,1->chain:3", "expansion:2,1", CHAIN(3)),
        ("prompt-lookup:3 -> full", "dynamic:6,3,2", None, magicjax.DynamicTree(6, 3, 2)),
    ],
)
def test_the_text_of_trees_is_one_or_that_of_both_drafters(drafter, tree, first_tree, own):
    made, found = resolve(drafter, tree, None)
    if isinstance(first_tree, str):
        first_tree = magicjax.parse_tree(first_tree)
    assert (made.first_tree, found) == (first_tree, own)


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        ("prompt-lookup -> self", "chain:1 + chain:2"),
        ("prompt-lookup -> self", "chain:1 -> chain:2 -> chain:3"),
        ("prompt-lookup + self", "chain:1 -> chain:2"),
        ("self", "chain:1 -> chain:2"),
    ],
)
def test_other_texts_of_trees_are_refused(drafter, tree):
    with pytest.raises(ValueError, match=f"tree='{re.escape(tree)}' does not fit the drafter: use"):
        resolve(drafter, tree, None)


def test_its_bytes_and_members_are_those_of_both_drafters():
    made = make_drafter("prompt-lookup + small:near -> self:streaming:64", lambda _: tiny.model())
    assert made.members() == (*made.first.drafters, made.middle)
    sizes = [each.cache_bytes(tiny.model(), 3, 128) for each in made.members()]
    assert made.cache_bytes(tiny.model(), 3, 128) == sum(sizes) and min(sizes[1:]) > 0
