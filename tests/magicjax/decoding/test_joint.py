"""Texts sampled through the whole compiled loop have the target's joint distribution.

Texts of four tokens, some ended by EOS, are compared with the exact distribution of a tiny target:
200,000 texts for every drafter, tree and verifier in the slow tests, 10,000 for a few in the quick
ones. The negative controls break one rule inside the loop; `test_exact_sampling` has each of them
outside the loop.
"""

import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import struct

import magicjax
import models
from magicjax.decoding import program_cache
from magicjax.drafters import cascade, draft_pass
from magicjax.kv_cache import full_cache, state_layers
from magicjax.trees import token_tree
from magicjax.trees.token_tree import ROOT_ONLY
from magicjax.verification import logits_processor, verify
from pallas_kernels.cpu import build
from tests.magicjax import keywords, oracle, tiny
from tests.magicjax.grammars import spelled
from tests.magicjax.processing import processed
from tests.models.conftest import logits_of
from tests.quick import quick

VOCAB, LENGTH, EOS = 5, 4, 0
PROMPT = [1, 4, 2, 3, 3, 1, 2, 4, 1]
ROWS, ONE_CALL, FEW_CALLS, MANY_CALLS = 10_000, 1, 4, 20
WARPED = dict(temperature=0.8, top_k=4, top_p=0.9, min_p=0.05)
NEAR = dict(temperature=1.5, top_n_sigma=2.6)
PROCESSED = dict(
    temperature=0.9,
    repetition_penalty=1.3,
    frequency_penalty=0.7,
    presence_penalty=-0.4,
    logit_bias=((2, 0.5), (0, -0.5)),
    bad_words=("ab", "c"),
    min_tokens=2,
)
# PROMPT ends with the first marker of `MARKERS`, so it ends in reasoning.
BUDGETED = dict(temperature=0.9, frequency_penalty=0.7, thinking_token_budget=2)
PLAIN = dict(temperature=1.0)


@functools.cache
def model(seed: int, layers: int = 1) -> magicjax.Model:
    """Returns a random model whose logits depend on all earlier tokens."""
    shape = tiny.config(
        vocab_size=VOCAB,
        num_layers=layers,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        max_positions=64,
    )
    params = tiny.loud(tiny.drawn(shape, seed), np.random.default_rng(seed), noise=0.0, never=None)
    return magicjax.Model(models.build(shape), tiny.put(params), name=f"tiny {seed}")


def small(seed: int, **options) -> magicjax.SmallModel:
    return magicjax.SmallModel(model(seed), **options)


def eagle(budget: int | None = None, **options) -> magicjax.Eagle:
    return magicjax.Eagle(tiny.head(model(0)), budget, sinks=1, **options)


def self_speculation(**options) -> magicjax.SelfSpeculation:
    return magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=1), budget=5, **options)


@functools.cache
def joint(
    options: tuple[tuple[str, float], ...], layers: int = 1, kv_bits: int | None = None
) -> dict[tuple[int, ...], float]:
    """Returns the probability of every text, computed by the oracle and a plain warping."""
    target = dataclasses.replace(model(0, layers), kv_bits=kv_bits)
    finished, open_ = {}, {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, mass in open_.items():
            logits = oracle.logits(target, [*PROMPT, *text])[-1]
            given = dict(options)
            rules = {name: given.pop(name) for name in [*given] if name not in WARPED | NEAR}
            words = rules.pop("bad_words", ())
            sequences = [["-abcd".index(letter) for letter in word] for word in words]
            logits = processed(logits, PROMPT, text, [EOS], sequences=sequences, **rules)
            for token, p in enumerate(warped(logits, **given)):
                (finished if token == EOS else longer)[(*text, token)] = mass * p
        open_ = longer
    return finished | open_


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=0.0) -> np.ndarray:
    """Returns the probabilities after temperature and filters, by definition."""
    p = np.exp((logits - logits.max()) / temperature)
    if top_n_sigma:
        p[logits < logits.max() - top_n_sigma * np.std(logits[logits > -np.inf])] = 0
    p[p < min_p * p.max()] = 0
    best = np.argsort(-p)
    p[best[top_k or len(p) :]] = 0
    p /= p.sum()
    while p.sum() - min(x for x in p if x > 0) >= top_p:
        p[p == min(x for x in p if x > 0)] = 0
    return p / p.sum()


def sampled(
    drafter: Any, tree: Any, calls: int, target: magicjax.Model | None = None, **options
) -> dict[tuple[int, ...], int]:
    """Returns how often the loop emitted each text."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(calls):
        output = keywords.generate(
            target or model(0),
            [PROMPT] * ROWS,
            drafter=drafter,
            tree=tree,
            max_tokens=LENGTH,
            seed=seed,
            eos_token_id=EOS,
            **dict(temperature=1.0) | options,
        )
        # A text shorter than LENGTH ends with EOS, which is also the padding.
        texts, times = np.unique(output.tokens, axis=0, return_counts=True)
        for text, count in zip(texts.tolist(), times.tolist(), strict=True):
            key = tuple(text[: text.index(EOS) + 1] if EOS in text else text)
            counts[key] = counts.get(key, 0) + count
    return counts


def p_value(counts: dict, wanted: dict) -> float:
    """Returns the chi-square p-value; texts expected fewer than 5 times are one cell."""
    total = sum(counts.values())
    impossible = [text for text in counts if wanted.get(text, 0.0) == 0.0]
    if impossible:
        return 0.0
    rare = [text for text, p in wanted.items() if p * total < 5]
    cells = [(counts.get(text, 0), p * total) for text, p in wanted.items() if p * total >= 5]
    cells.append((sum(counts.get(t, 0) for t in rare), sum(wanted[t] for t in rare) * total))
    observed, expected = np.array([cell for cell in cells if cell[1] > 0]).T
    return float(scipy.stats.chisquare(observed, expected * total / expected.sum()).pvalue)


LAYERS = "self, one of two layers"
CHAIN, PAIRS, DEEP = magicjax.chain(3), magicjax.expansion((2, 2)), magicjax.expansion((1, 1, 3))
IRREGULAR = magicjax.TokenTree.from_parents((-1, 0, 0, 1, 0, 1, 3))
DYNAMIC, BRANCHES = magicjax.DynamicTree(6, 3, 2), magicjax.expansion((2, 1))
EARLY = magicjax.DynamicTree(6, 3, 2, min_prob=0.3)  # most drafts end before the last depth


def ensemble(**options) -> magicjax.Ensemble:
    return magicjax.Ensemble([small(1, **options), small(2, **options)])


def refreshed(policy: str, **options) -> magicjax.SelfSpeculation:
    """Returns self-speculation whose pins change while it decodes."""
    return magicjax.SelfSpeculation(policy, budget=8, refresh_every=1, **options)


def suffix() -> magicjax.SuffixLookup:
    """Returns suffix lookup with texts in its store that the target often continues."""
    made = magicjax.SuffixLookup(store_tokens=32, min_score=0.05)
    return made.remember([*PROMPT, 2, 3, 1]).remember([4, 1, 3, 2, EOS])


def cascades() -> dict[str, tuple[magicjax.Cascade, Any, dict]]:
    """Returns cascades of each kind of first and middle drafter, with their trees."""
    copy, lookup = magicjax.FullCacheSpeculation("int4:channel"), magicjax.PromptLookup()
    pages, streaming = magicjax.PageRetrieval(4, page_size=1), self_speculation()
    replaced = ensemble(draw="with_replacement")
    made = {
        "small to streaming, 2,2 to a chain": (small(1), streaming, PAIRS, CHAIN),
        "small to streaming, 2,2": (small(1), streaming, None, PAIRS),
        "prompt-lookup to a copy, branches to a chain": (lookup, copy, BRANCHES, CHAIN),
        "prompt-lookup to streaming, chain": (lookup, streaming, None, magicjax.chain(2)),
        "ensemble to a copy, 2,2 to a chain": (replaced, copy, PAIRS, CHAIN),
        "ensemble to streaming, chain": (ensemble(), streaming, None, magicjax.chain(2)),
        "eagle to pages, dynamic to a chain": (eagle(), pages, DYNAMIC, CHAIN),
        "eagle to streaming, irregular to a chain": (eagle(), streaming, IRREGULAR, CHAIN),
    }
    found = {
        f"cascade, {name}": (magicjax.Cascade(first, middle, tree), of_target, {})
        for name, (first, middle, tree, of_target) in made.items()
    }
    drafter = magicjax.Cascade(small(1), streaming, PAIRS)
    return found | {"cascade, naive": (drafter, CHAIN, dict(verifier="naive"))}


CASCADE = "cascade, small to streaming, 2,2 to a chain"
ALL = {
    **cascades(),
    "small, 2,2": (small(1), PAIRS, {}),
    "ensemble and prompt-lookup": (
        magicjax.Ensemble(
            [small(1), magicjax.PromptLookup(), self_speculation()], [PAIRS, CHAIN, BRANCHES]
        ),
        None,
        {},
    ),
    "small with a draft vocabulary, 2,2": (magicjax.SmallModel(tiny.few(model(1), 4)), PAIRS, {}),
    "eagle, 2,2": (eagle(), PAIRS, {}),
    "eagle, dynamic": (eagle(), DYNAMIC, {}),
    "eagle on a ring, irregular": (eagle(4), IRREGULAR, {}),
    "eagle with replacement, 1,1,3": (eagle(draw="with_replacement"), DEEP, {}),
    "eagle and small": (magicjax.Ensemble([eagle(), small(1)]), PAIRS, {}),
    "small, dynamic": (small(1), DYNAMIC, {}),
    "small, dynamic that ends early": (small(1), EARLY, {}),
    "self snapkv refreshed, 2,2": (refreshed("snapkv"), PAIRS, {}),
    "self quest, 2,2": (magicjax.PageRetrieval(4, page_size=1), PAIRS, {}),
    "small top, 1,1,3": (small(1, draw="top"), DEEP, {}),
    "self with replacement, irregular": (self_speculation(draw="with_replacement"), IRREGULAR, {}),
    "self h2o refreshed int8, irregular": (refreshed("h2o", kv_dtype="int8"), IRREGULAR, {}),
    "small keydiff int4, 1,1,3": (
        small(1, policy=magicjax.policies.KeyDiff(), budget=14, kv_dtype="int4"),
        DEEP,
        {},
    ),
    "plain": (None, None, {}),
    "self, dynamic": (self_speculation(), DYNAMIC, {}),
    "self, quantized copy": (self_speculation(weights="int4:channel"), PAIRS, {}),
    LAYERS: (self_speculation(layers="1"), PAIRS, {}),
    "ensemble, dynamic": (ensemble(), DYNAMIC, {}),
    "prompt-lookup, chain": (magicjax.PromptLookup(), CHAIN, {}),
    "prompt-lookup, branches": (magicjax.PromptLookup(), BRANCHES, {}),
    "prompt-lookup, naive": (magicjax.PromptLookup(), BRANCHES, dict(verifier="naive")),
    "suffix, chain": (suffix(), CHAIN, {}),
    "suffix, dynamic": (suffix(), DYNAMIC, {}),
    "suffix, naive": (suffix(), DYNAMIC, dict(verifier="naive")),
}
ALL |= {
    f"{who}, {draw}, {name}, {verifier}": (make(draw=draw), tree, dict(verifier=verifier))
    for who, make in (
        ("small", functools.partial(small, 1)),
        ("self", self_speculation),
        ("ensemble", ensemble),
    )
    for draw in ("with_replacement", "without_replacement", "top")
    for name, tree in (("chain", CHAIN), ("2,2", PAIRS), ("1,1,3", DEEP), ("irregular", IRREGULAR))
    for verifier in ("mss", "naive")
}


def check(what: str, calls: int, settings: dict[str, float]) -> None:
    drafter, tree, options = ALL[what]
    layers = 2 if what == LAYERS else 1
    target = model(0, layers)
    if "bad_words" in settings:
        target = with_texts(target)
    if "thinking_token_budget" in settings:
        target = reasoning(target)
    counts = sampled(drafter, tree, calls, target, **settings, **options)
    p = p_value(counts, joint(tuple(settings.items()), layers))
    print(f"{what}, {settings}: p = {p:.3f}")
    assert p > 0.001


def joint_by_pass(target: magicjax.Model) -> dict[tuple[int, ...], float]:
    """Returns the probability of every text, by a pass over all of them without a cache."""
    texts = np.array([*itertools.product(range(VOCAB), repeat=LENGTH)])
    tokens = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], 1)
    logits = np.asarray(logits_of(target.module, target.params, tokens), float)
    steps = jax.nn.log_softmax(logits[:, len(PROMPT) - 1 : -1])
    chosen = np.take_along_axis(np.asarray(steps), texts[..., None], 2)[..., 0]
    wanted: dict[tuple[int, ...], float] = {}
    for text, logs in zip(texts.tolist(), chosen, strict=True):
        end = text.index(EOS) + 1 if EOS in text else LENGTH
        wanted[tuple(text[:end])] = float(np.exp(logs[:end].sum()))
    return wanted


def of_all_nodes(state, nodes, path, count):
    """Commits rejected nodes too, as a recurrence over the tree that is not rolled back."""
    every = jnp.broadcast_to(jnp.arange(nodes.x.shape[1]), nodes.x.shape[:2])
    return state_layers.commit(state, nodes, every, jnp.where(count > 0, every.shape[1], 0))


@pytest.mark.parametrize("rolled_back", [True, False])
def test_sampled_texts_of_a_target_with_states_have_its_joint_distribution(rolled_back, changed):
    shape = tiny.config(
        **tiny.HYBRID | dict(vocab_size=VOCAB, num_heads=2, num_kv_heads=1, max_positions=64)
    )
    params = tiny.loud(tiny.drawn(shape, 2), np.random.default_rng(2), noise=0.0, never=None)
    params["params"]["unembedding"] *= 0.3  # or most texts would be one token
    target = magicjax.Model(models.build(shape), tiny.put(params), name="hybrid")
    if not rolled_back:  # the control
        changed.setattr(full_cache, "_commit", of_all_nodes)
    counts = sampled(small(1), PAIRS, ONE_CALL, target)
    p = p_value(counts, joint_by_pass(target))
    print(f"p = {p:.1e}")
    assert p > 0.001 if rolled_back else p < 1e-6


@pytest.mark.slow
@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
def test_sampled_texts_of_a_packed_target_have_its_joint_distribution():
    shape = tiny.config(
        vocab_size=VOCAB, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=64, max_positions=64,
    )  # fmt: skip
    params = tiny.loud(tiny.drawn(shape, 0), np.random.default_rng(0), noise=0.0, never=None)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    target = tiny.packed(magicjax.Model(models.build(shape), params, name="packed"))
    assert len(target.weights.texts) == 7
    wanted = joint_by_pass(target)
    counts = sampled(small(1), PAIRS, FEW_CALLS, target)
    assert p_value(counts, wanted) > 0.001
    moved = {text: p * (1.1 if text[0] == EOS else 1) for text, p in wanted.items()}
    moved = {text: p / sum(moved.values()) for text, p in moved.items()}
    assert p_value(counts, moved) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [small(1), self_speculation()], ids=["small", "self"])
def test_sampled_texts_of_a_target_with_its_cache_in_8_bits_have_its_joint_distribution(drafter):
    settings = dict(temperature=0.3)  # rounding moves few tokens: the control needs sharp choices
    target = dataclasses.replace(model(0), kv_bits=8)
    counts = sampled(drafter, PAIRS, MANY_CALLS, target, **settings)
    assert p_value(counts, joint((*settings.items(),), kv_bits=8)) > 0.001
    assert p_value(counts, joint((*settings.items(),))) < 1e-4


@functools.cache
def padded(rows: int) -> magicjax.Model:
    """Returns a draft model with another number of rows of the vocabulary."""
    config = dataclasses.replace(model(1).config, vocab_size=rows)
    inner = dict(model(1).params["params"])
    for name in ("embedding", "unembedding"):
        more = 3 * np.random.default_rng(rows).standard_normal((max(0, rows - VOCAB), 16))
        inner[name] = jnp.concatenate([inner[name][:rows], jnp.asarray(more, jnp.float32)])
    module = models.build(config)
    return magicjax.Model(module, {"params": inner}, with_texts(model(0)).tokenizer, name="padded")


def with_texts(target: magicjax.Model) -> magicjax.Model:
    tokenizer = spelled.tokenizer((spelled.END, "a", "b", "c", "d"))
    return dataclasses.replace(target, tokenizer=tokenizer)


def reasoning(target: magicjax.Model) -> magicjax.Model:
    tokenizer = spelled.tokenizer((spelled.END, "<think>", "</think>", "c", "d"))
    tokenizer.chat_template = "{# </think> #}"
    return dataclasses.replace(target, tokenizer=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [PAIRS, DYNAMIC], ids=str)
@pytest.mark.parametrize("rows", [4, 8])
def test_vocabularies_of_other_sizes_have_the_joint_distribution(rows, tree):
    counts = sampled(magicjax.SmallModel(padded(rows)), tree, FEW_CALLS, with_texts(model(0)))
    assert p_value(counts, joint((*PLAIN.items(),))) > 0.001


@pytest.mark.slow
def test_drafts_of_tokens_that_the_target_lacks_are_detected(monkeypatch):
    def all_tokens(context, hidden):
        return context.model.draft_logits(hidden)

    monkeypatch.setattr(draft_pass.DraftContext, "logits", all_tokens)
    monkeypatch.setattr(program_cache, "_compiled", {})
    counts = sampled(magicjax.SmallModel(padded(8)), PAIRS, FEW_CALLS, with_texts(model(0)))
    assert p_value(counts, joint((*PLAIN.items(),))) < 1e-6


PENALIZED = ("small, 2,2", "ensemble, dynamic", "prompt-lookup, naive", CASCADE, "plain")


@pytest.mark.parametrize("what", quick(PENALIZED, "small, 2,2"))
def test_sampled_texts_with_penalties_have_the_joint_distribution(what):
    check(what, ONE_CALL, PROCESSED)


@pytest.mark.slow
@pytest.mark.parametrize("what", PENALIZED)
def test_sampled_texts_with_a_thinking_budget_have_the_joint_distribution(what):
    check(what, ONE_CALL, BUDGETED)


@pytest.mark.slow
def test_a_thinking_budget_counted_at_the_root_only_is_detected(monkeypatch):
    def of_root(parents):
        return jnp.zeros(parents.shape, jnp.int32)

    names = dict(vars(token_tree), depths=of_root)
    monkeypatch.setattr(logits_processor, "token_tree", types.SimpleNamespace(**names))
    monkeypatch.setattr(program_cache, "_compiled", {})
    drafter, tree, _ = ALL["small, 2,2"]
    settings = dict(temperature=1.0, thinking_token_budget=2)
    counts = sampled(drafter, tree, ONE_CALL, reasoning(model(0)), **settings)
    assert p_value(counts, joint((*settings.items(),))) < 1e-6


@pytest.mark.slow
def test_penalties_of_the_root_only_are_detected(monkeypatch):
    def only_itself(parents):
        nodes = parents.shape[-1]
        return jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (*parents.shape, nodes))

    names = dict(ancestor_mask=only_itself, depths=token_tree.depths, ROOT_ONLY=ROOT_ONLY)
    monkeypatch.setattr(logits_processor, "token_tree", types.SimpleNamespace(**names))
    monkeypatch.setattr(program_cache, "_compiled", {})
    settings = dict(temperature=1.0, frequency_penalty=2.0)
    p = p_value(sampled(*ALL["small, 2,2"][:2], FEW_CALLS, **settings), joint((*settings.items(),)))
    print(f"penalties of the root only: p = {p:.1e}")
    assert p < 1e-6


def test_sampled_texts_of_tokens_near_the_highest_have_the_joint_distribution():
    drafter, tree, options = ALL["small, 2,2"]
    counts = sampled(drafter, tree, ONE_CALL, **NEAR, **options)
    assert p_value(counts, joint((*NEAR.items(),))) > 0.001
    for other in (0.0, 2.4):
        wrong = joint((*(NEAR | dict(top_n_sigma=other)).items(),))
        assert p_value(counts, wrong) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, WARPED, NEAR], ids=["plain", "warped", "near"])
@pytest.mark.parametrize("what", ALL)
def test_every_drafter_verifier_and_tree_has_the_joint_distribution(what, settings):
    check(what, MANY_CALLS, settings)


@magicjax.Drafter.register
@struct.dataclass
class Broken:
    """A drafter that reports its draws wrongly."""

    drafter: Any
    how: str = struct.field(pytree_node=False)

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def for_target(self, target):
        return self.replace(drafter=self.drafter.for_target(target))

    def propose(self, target, state, root, cache, sampling, settings):
        proposal, draft = self.drafter.propose(target, state, root, cache, sampling, settings)
        draws, tokens = proposal.draws, proposal.tokens
        token = jnp.take_along_axis(tokens, draws.node, 1)
        if self.how == "not renormalized":
            draws = draws.replace(replacement=True)
        elif self.how == "repeated tokens skipped":
            same = (token[:, :, None] == token[:, None]) & (
                draws.parent[:, :, None] == draws.parent[:, None]
            )
            repeated = jnp.tril(same, -1).any(-1)
            draws = draws.replace(parent=jnp.where(repeated, -1, draws.parent))
        elif self.how == "pruned":
            own = draws.q[jnp.arange(len(tokens))[:, None], draws.q_index, token]
            worst = own == own.min(1, keepdims=True)
            draws = draws.replace(parent=jnp.where(worst, -1, draws.parent))
        elif self.how in ("top as if drawn", "suffix as if drawn"):
            q = jnp.full((len(tokens), 1, VOCAB), 1 / VOCAB)
            draws = draws.replace(q=q, q_index=jnp.zeros_like(draws.q_index))
        elif self.how == "q of other tokens":  # as by a wrong map of a draft vocabulary
            draws = draws.replace(q=jnp.roll(draws.q, 1, -1))
        return proposal.replace(draws=draws), draft


@pytest.mark.parametrize(
    ("how", "draw"),
    [
        pytest.param("q of other tokens", "without_replacement", marks=pytest.mark.slow),
        ("not renormalized", "without_replacement"),
        pytest.param("repeated tokens skipped", "with_replacement", marks=pytest.mark.slow),
        pytest.param("pruned", "with_replacement", marks=pytest.mark.slow),
        pytest.param("top as if drawn", "top", marks=pytest.mark.slow),
        pytest.param("suffix as if drawn", "top", marks=pytest.mark.slow),
    ],
)
def test_a_rule_broken_inside_the_loop_is_detected(how, draw):
    drafter, tree = Broken(small(1, draw=draw), how), magicjax.expansion((5,))
    if how == "q of other tokens":
        drafter, tree = Broken(eagle(draw=draw), how), magicjax.expansion((4,))  # all of the head's
    elif how == "suffix as if drawn":
        drafter, tree = Broken(suffix(), how), CHAIN
    calls = FEW_CALLS if how == "repeated tokens skipped" else ONE_CALL  # they are rare
    p = p_value(sampled(drafter, tree, calls, **PLAIN), joint(tuple(PLAIN.items())))
    print(f"{how}: p = {p:.1e}")
    assert p < 1e-6


@struct.dataclass
class ToldFirst(magicjax.Cascade):
    """Reports the distributions of the first drafter instead of the middle model's."""

    def _extend(self, setup, chain):
        q = self._draft(setup, chain)[0].draws.q
        longer, draft = super()._extend(setup, chain)
        return longer.replace(q=longer.q.at[:, : q.shape[1]].set(q)), draft


def greedily(verifier, logits, proposal, depth, *_):
    """Verifies greedily: the tokens are not drawn from the middle model's distributions."""
    return verify.greedy(logits, proposal.tokens, proposal.parents, depth)


BROKEN = ["q of the first drafter", "the target's random numbers", "greedy verification"]


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_rule_broken_within_a_cascades_round_is_detected(how, monkeypatch):
    monkeypatch.setattr(program_cache, "_compiled", {})
    drafter = magicjax.Cascade(small(1), self_speculation())
    if how == "q of the first drafter":
        drafter = ToldFirst(small(1), self_speculation())
    elif how == "the target's random numbers":
        monkeypatch.setattr(cascade, "keys_within_round", lambda keys, position: keys)
    else:
        monkeypatch.setattr(cascade, "verify", types.SimpleNamespace(verify_tree=greedily))
    counts = sampled(drafter, magicjax.chain(2), FEW_CALLS, **PLAIN)
    p = p_value(counts, joint(tuple(PLAIN.items())))
    print(f"{how}: p = {p:.1e}")
    assert p < 1e-6
