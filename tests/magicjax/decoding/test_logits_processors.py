"""Penalties, biases and excluded tokens: each node of a tree has those of its own path."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.sampling_params import SamplingParams
from magicjax.trees import token_tree
from magicjax.verification import logits_processor
from magicjax.verification.logits_processor import ThinkingBudget
from tests.magicjax import keywords, oracle, tiny
from tests.magicjax.grammars import spelled
from tests.magicjax.processing import processed
from tests.quick import quick

VOCAB, EOS = 11, 7
PARAMS = {
    "repetition": dict(repetition_penalty=1.7),
    "frequency": dict(frequency_penalty=0.9),
    "presence": dict(presence_penalty=-0.6),
    "bias": dict(logit_bias=((2, 1.5), (4, -3.0))),
    "allowed": dict(allowed_token_ids=(0, 2, 3, 7, 9)),
    "min_tokens": dict(min_tokens=3),
    "sequences": dict(sequences=((3,), (1, 2), (2, 1, 2), (5, 5))),
    "nothing left": dict(allowed_token_ids=(7, 3), sequences=((3,),), min_tokens=99),
    "none": dict(),
}
PARAMS["all"] = (
    PARAMS["repetition"] | PARAMS["frequency"] | PARAMS["presence"] | PARAMS["bias"]
) | (PARAMS["allowed"] | PARAMS["min_tokens"] | PARAMS["sequences"])
PARENTS = np.array([-1, 0, 0, 1, 1, 3, 2, 5], np.int32)
PATHS = token_tree.ancestor_mask(PARENTS)


def rows_of(all_params, prompts) -> logits_processor.LogitsProcessor:
    given = [dict(each) for each in all_params]
    sequences = [each.pop("sequences", ()) for each in given]
    rows = logits_processor.rows_of(
        [SamplingParams(**each, max_tokens=None) for each in given],
        prompts,
        sequences,
        [ThinkingBudget()] * len(given),
        VOCAB,
    )
    return jax.tree.map(jnp.asarray, dataclasses.replace(rows, used=np.ones(len(given), bool)))


def check_nodes(seed: int) -> None:
    """Compares the logits of all nodes of random trees with those of plain decoding."""
    rng = np.random.default_rng(seed)
    cases = list(PARAMS.values())
    prompts = [rng.integers(0, 5, 4) for _ in cases]
    texts = [rng.integers(0, 6, n) for n in rng.integers(1, 5, len(cases))]
    rows = rows_of(cases, prompts)
    for t in range(max(map(len, texts))):
        tokens = np.array([[text[t] if t < len(text) else 0] for text in texts], np.int32)
        rows = logits_processor.with_tokens(rows, tokens, np.array([t < len(x) for x in texts]) * 1)
    nodes = rng.integers(0, 6, (len(cases), len(PARENTS))).astype(np.int32)
    nodes[:, 0] = [text[-1] for text in texts]
    logits = rng.normal(0, 2, (*nodes.shape, VOCAB)).astype(np.float32)
    emitted, eos = np.array([len(x) for x in texts]), np.full((len(cases), 1), EOS)
    given = rows, logits, nodes, PARENTS, emitted, eos
    found = jax.jit(lambda *given: logits_processor.process(*given))(*given)  # not cached
    for i, params in enumerate(cases):
        for n in range(len(PARENTS)):
            path = [int(nodes[i, a]) for a in range(1, len(PARENTS)) if PATHS[n, a]]
            text = [*map(int, texts[i]), *path]
            expected = processed(logits[i, n], prompts[i], text, [EOS], **params)
            np.testing.assert_allclose(found[i, n], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_each_node_has_the_penalties_of_its_own_path(seed):
    check_nodes(seed)


def test_penalties_of_the_root_only_are_detected(monkeypatch):
    def only_itself(parents):
        return jnp.broadcast_to(jnp.eye(parents.shape[-1], dtype=bool), (*parents.shape, 8))

    monkeypatch.setattr(logits_processor.token_tree, "ancestor_mask", only_itself)
    with pytest.raises(AssertionError):
        check_nodes(0)


def test_rows_without_processors_keep_their_logits():
    of_rows = [SamplingParams()] * 2, [np.arange(3)] * 2, [[], []], [ThinkingBudget()] * 2
    rows = logits_processor.rows_of(*of_rows, VOCAB)
    logits = np.random.default_rng(0).normal(size=(2, 8, VOCAB)).astype(np.float32)
    nodes = np.zeros((2, 8), np.int32)
    arguments = rows, logits, nodes, PARENTS, np.ones(2, int), np.full((2, 1), EOS)
    found = jax.jit(logits_processor.process)(*arguments)
    np.testing.assert_array_equal(found, logits)


TEXTS = {  # with the vocabulary of `spelled.target`
    "repetition": dict(repetition_penalty=2.5),
    "frequency and presence": dict(frequency_penalty=2.0, presence_penalty=1.0),
    "bias": dict(logit_bias=((3, 8.0), (17, 6.0)), frequency_penalty=1.0),
    "allowed": dict(allowed_token_ids=(0, 1, 2, 3, 4, 5, tiny.NEVER), frequency_penalty=0.5),
    "bad words": dict(bad_words=("a", "bc", "zz"), logit_bias=((0, 9.0), (1, 9.0), (2, 9.0))),
    "EOS": dict(min_tokens=9, logit_bias=((tiny.NEVER, 60.0),)),
    "EOS is ignored": dict(ignore_eos=True, logit_bias=((tiny.NEVER, 60.0),)),
}
DRAFTERS = {
    "plain": dict(),
    "tree": dict(drafter=magicjax.PromptLookup(), tree=magicjax.expansion((2, 1))),
    "ring": dict(drafter=magicjax.SelfSpeculation("streaming", 24), tree=magicjax.chain(3)),
}


def by_definition(prompt, new_tokens: int, **params) -> np.ndarray:
    """Returns the text of plain greedy decoding from the processed logits of the oracle."""
    words, ignored = params.pop("bad_words", ()), params.pop("ignore_eos", False)
    sequences = [[spelled.tiny_texts().index(letter) for letter in word] for word in words]
    text: list[int] = []
    while len(text) < new_tokens and (ignored or tiny.NEVER not in text):
        logits = oracle.logits(spelled.target(), [*prompt, *text])[-1]
        eos = [] if ignored else [tiny.NEVER]
        logits = processed(logits, prompt, text, eos, sequences=sequences, **params)
        text.append(int(logits.argmax()))
    return np.array(text)


@pytest.mark.parametrize("drafter", quick(DRAFTERS, "tree"))
def test_texts_equal_plain_decoding_from_processed_logits(drafter):
    prompts = [tiny.prompts(len(TEXTS))[i] for i in range(len(TEXTS))]
    params = [SamplingParams(max_tokens=16, **each) for each in TEXTS.values()]
    output = magicjax.generate(spelled.target(), prompts, params, **DRAFTERS[drafter])
    for i, each in enumerate(TEXTS.values()):
        expected = by_definition(prompts[i], 16, **each)
        np.testing.assert_array_equal(output.tokens[i, : output.lengths[i]], expected)
    reasons = dict(zip(TEXTS, output.finish_reasons, strict=True))
    assert (reasons["EOS"], reasons["EOS is ignored"]) == ("eos", "length")
    assert output.lengths[[*TEXTS].index("EOS")] == 10


def test_requests_of_an_engine_have_their_own_processors():
    target = spelled.target()
    config = magicjax.EngineConfig(slots=2, capacity=128, logits_processors=True)
    engine = magicjax.Engine(target, magicjax.PromptLookup(), magicjax.expansion((2, 1)), config)
    engine.warm_up()
    compiled = program_cache.totals()[0]
    prompts = [tiny.prompts(len(TEXTS))[i] for i in range(len(TEXTS))]
    handles = [
        engine.submit(prompt, SamplingParams(max_tokens=12, **each))
        for prompt, each in zip(prompts, TEXTS.values(), strict=True)
    ]
    plain = engine.submit(prompts[0], SamplingParams(max_tokens=12))
    engine.run()
    assert program_cache.totals()[0] == compiled
    for handle, prompt, each in zip(handles, prompts, TEXTS.values(), strict=True):
        np.testing.assert_array_equal(handle.result().tokens, by_definition(prompt, 12, **each))
    np.testing.assert_array_equal(plain.result().tokens, by_definition(prompts[0], 12))


@pytest.mark.slow
def test_log_probabilities_are_those_of_processed_logits():
    prompt, params = tiny.prompts(1)[0], TEXTS["frequency and presence"]
    output = magicjax.generate(
        spelled.target(),
        [prompt],
        SamplingParams(max_tokens=8, logprobs=2, **params),
        drafter=magicjax.PromptLookup(),
        tree=magicjax.expansion((2, 1)),
    )
    text = output.tokens[0].tolist()
    for t, token in enumerate(text):
        logits = processed(
            oracle.logits(spelled.target(), [*prompt, *text[:t]])[-1], prompt, text[:t], **params
        )
        expected = logits[token] - np.logaddexp.reduce(logits)
        assert abs(output.logprobs[0].chosen[t] - expected) < 1e-4


WRONG = {
    "min_p": (dict(min_p=1.5, temperature=1.0), "min_p=1.5: it must be a number from 0 to 1"),
    "repetition": (dict(repetition_penalty=0), "repetition_penalty=0: it must be a number above 0"),
    "infinite": (dict(presence_penalty=float("inf")), "presence_penalty=inf: its magnitude"),
    "bias": (dict(logit_bias={3: float("nan")}), "bias of 3 in logit_bias=nan: its magnitude"),
    "no token": (dict(allowed_token_ids=()), "allowed_token_ids is empty"),
    "pairs": (dict(logit_bias=[(3, 1.0), (3, 2.0)]), "logit_bias has token 3 2 times: pass one"),
    "token": (dict(logit_bias={-1: 2.0}), "a token of logit_bias=-1: it must be an integer of at"),
    "word": (dict(bad_words=("",)), "bad_words='': a string must have at least 1 character"),
    "longer": (dict(min_tokens=9, max_tokens=8), "min_tokens=9 exceeds the limit of 8 new tokens"),
    "EOS and a grammar": (
        dict(ignore_eos=True, grammar=magicjax.Grammar.regex("a+")),
        "ignore_eos with a grammar may leave no token",
    ),
    "grammar": (
        dict(min_tokens=9, grammar=magicjax.Grammar.json_object()),
        "min_tokens with a grammar may leave no token",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values_are_refused(what):
    params, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_what_a_target_or_an_engine_lacks_is_refused():
    def refused(message, params, make=None):
        with pytest.raises(ValueError, match=re.escape(message)):
            if make is None:
                keywords.generate(tiny.model(), [[1, 2]], **params)
            else:
                make.submit([1, 2], SamplingParams(max_tokens=8, **params))

    refused("logit_bias has the token 99, and the vocabulary has", dict(logit_bias={99: 1.0}))
    refused("stop_token_ids has the token 99, and the vocabul", dict(stop_token_ids=[99]))
    refused("has no tokenizer, which bad words need", dict(bad_words="a"))
    config = magicjax.EngineConfig(slots=1, capacity=64)
    engine = magicjax.Engine(spelled.target(), config=config)
    refused("create the engine with logits_processors=True", dict(min_tokens=2), engine)
    config = dataclasses.replace(config, logits_processors=True)
    engine = magicjax.Engine(spelled.target(), config=config)
    refused("at most 64 of at most 8 are supported", dict(bad_words="abcdefghijk"), engine)
    refused("allowed_token_ids has the token 99", dict(allowed_token_ids=[99]), engine)
    refused("stop_token_ids has the token 99", dict(stop_token_ids=[99]), engine)
    many = dict(stop_token_ids=range(17))
    refused("stop_token_ids has 17 tokens: at most 16 are supported", many, engine)
