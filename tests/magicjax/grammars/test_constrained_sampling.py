"""Sampled texts under a grammar have the joint distribution of constrained plain sampling.

The distribution of one round is enumerated over all draws and outcomes, and texts of the compiled
loop are counted. The wrong rule masks the logits of the root only.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.decoding import decoder
from magicjax.grammars import masking
from magicjax.grammars.matcher import ALL, Matcher, tree_masks
from tests.magicjax import enumeration, oracle
from tests.magicjax.decoding import test_joint
from tests.magicjax.enumeration import World
from tests.magicjax.grammars import spelled
from tests.magicjax.verification import test_exact_sampling
from tests.magicjax.verification.test_exact_sampling import TREES, drafts_of, total_variation
from tests.quick import quick

PATTERN = "(ab|a?c)+b*"  # after b, more b or the end
TEXTS = (spelled.END, "a", "b", "c", "ab")


@functools.cache
def target(vocab: int = len(TEXTS)) -> magicjax.Model:
    model = test_joint.model(0)
    tokenizer = spelled.tokenizer(TEXTS[:vocab])
    return dataclasses.replace(model, tokenizer=tokenizer, eos_token_ids=(0,))


@functools.cache
def matcher(vocab: int) -> Matcher:
    """Returns the matcher of an empty text of the first tokens."""
    config = dataclasses.replace(target(vocab).config, vocab_size=vocab)
    model = dataclasses.replace(target(vocab), module=target(vocab).module.clone(config=config))
    return Matcher(model, magicjax.Grammar.regex(PATTERN), (0,))


@dataclasses.dataclass(frozen=True)
class Constrained(World):
    """A target whose logits are masked by the oracle, and in the rounds by the matcher.

    Attributes:
      only_root: the wrong rule.
    """

    only_root: bool = False

    @functools.cache  # noqa: B019
    def probs(self, who, text):
        if who >= 0:
            return super().probs(who, text)
        may_follow = spelled.allowed(PATTERN, TEXTS[: self.vocab], text)
        logits = np.where(may_follow, self.logits(who, text), -np.inf).astype(np.float32)
        return np.asarray(enumeration._warp(self.sampling(1), jnp.asarray(logits)[None])[0], float)

    def masked(self, logits, proposal):
        tokens = np.asarray(proposal.tokens)
        parents = np.broadcast_to(proposal.parents, tokens.shape)
        rows = zip(tokens[:, None], parents[:, None], strict=True)  # they share a matcher
        allowed = np.concatenate(
            [tree_masks([matcher(self.vocab)], *row, self.vocab) for row in rows]
        )
        found = np.array(masking.mask(jnp.asarray(logits), jnp.asarray(allowed), self.vocab))
        return np.concatenate([found[:, :1], logits[:, 1:]], 1) if self.only_root else found


@pytest.mark.parametrize(
    ("tree", "drawing", "setting"),
    quick(
        test_exact_sampling.ROUNDS,
        ("2,2", "without_replacement", "plain"),
        ("irregular", "top", "warped"),
        ("chain", "without_replacement", "warped"),
    ),
)
def test_a_round_emits_the_constrained_distribution(tree, drawing, setting):
    vocab, trees = TREES[tree]
    world = Constrained(vocab, test_exact_sampling.SETTINGS[setting], seed=len(tree))
    found = total_variation(world, drafts_of(trees, drawing))
    print(f"{tree}, {drawing}: total variation {found:.1e}")
    assert found < test_exact_sampling.EXACT


def test_a_mask_of_the_root_only_is_detected():
    vocab, trees = TREES["irregular"]
    world = Constrained(vocab, seed=1, only_root=True)
    found = total_variation(world, drafts_of(trees, "top"))
    assert found > test_exact_sampling.WRONG


@functools.cache
def joint(options: tuple[tuple[str, float], ...]) -> dict[tuple[int, ...], float]:
    """Returns the probability of every text of constrained plain sampling, by the oracle."""
    finished, open_ = {}, {(): 1.0}
    for _ in range(test_joint.LENGTH):
        longer = {}
        for text, mass in open_.items():
            logits = oracle.logits(target(), [*test_joint.PROMPT, *text])[-1]
            logits = np.where(spelled.allowed(PATTERN, TEXTS, text), logits, -1e9)
            for token, p in enumerate(test_joint.warped(logits, **dict(options))):
                if p > 0:
                    (finished if token == 0 else longer)[(*text, token)] = mass * p
        open_ = longer
    return finished | open_


CASES = {
    "small, 2,2": (test_joint.small(1), test_joint.PAIRS, {}),
    "plain": (None, None, {}),
    "small, naive": (test_joint.small(1), test_joint.PAIRS, dict(verifier="naive")),
    "small, dynamic": (test_joint.small(1), test_joint.DYNAMIC, {}),
    "with replacement": (test_joint.small(1, draw="with_replacement"), test_joint.IRREGULAR, {}),
    "top": (test_joint.small(1, draw="top"), test_joint.DEEP, {}),
    "prompt lookup": (magicjax.PromptLookup(), test_joint.BRANCHES, {}),
    "self": (test_joint.self_speculation(), test_joint.IRREGULAR, {}),
    "ensemble": (test_joint.ensemble(), test_joint.PAIRS, {}),
    "forced": (magicjax.ForcedTokens(), test_joint.CHAIN, {}),
    "forced and a small one": (
        magicjax.Ensemble([magicjax.ForcedTokens(), test_joint.small(1)]),
        test_joint.CHAIN,
        {},
    ),
}


def p_value(case: str, calls: int, settings: dict[str, float], grammar) -> float:
    drafter, tree, options = CASES[case]
    options = options | settings | dict(grammar=grammar)
    counts = test_joint.sampled(drafter, tree, calls, target(), **options)
    return test_joint.p_value(counts, joint(tuple(settings.items())))


@pytest.mark.parametrize("case", quick(CASES))
def test_texts_of_the_loop_have_the_constrained_distribution(case):
    grammar = magicjax.Grammar.regex(PATTERN)
    settings = test_joint.WARPED if list(CASES).index(case) % 2 else test_joint.PLAIN
    p = p_value(case, test_joint.FEW_CALLS, settings, grammar)
    print(f"{case}: p = {p:.3f}")
    assert p > 0.001


def test_a_mask_of_the_root_only_in_the_rounds_is_detected(monkeypatch):
    """The text leaves the grammar."""
    whole = decoder.tree_masks

    def only_root(*arguments):
        masks = whole(*arguments)
        masks[:, 1:] = ALL
        return masks

    monkeypatch.setattr(decoder, "tree_masks", only_root)
    monkeypatch.setattr(test_joint, "ROWS", 200)
    with pytest.raises(RuntimeError, match="the grammar cannot be followed"):
        p_value("small, 2,2", 1, test_joint.PLAIN, magicjax.Grammar.regex(PATTERN))
