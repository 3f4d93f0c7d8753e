"""Invalid arguments raise before compilation; errors name the value, the limit, the remedy."""

import dataclasses

import numpy as np
import pytest

import magicjax
import models
from magicjax import policies
from magicjax.decoding import program_cache
from tests.magicjax import tiny

LIMIT = tiny.config().max_positions  # 512


class FakeTokenizer:
    """The part of a tokenizer that the checks use."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


def short_model(**changes) -> magicjax.Model:
    """Returns a model of another shape; the checks use its config only."""
    return magicjax.Model(models.build(tiny.config(**changes)), tiny.model().params)


def with_tokenizer(*words) -> magicjax.Model:
    return dataclasses.replace(tiny.model(), tokenizer=FakeTokenizer(*words))


def small(**changes):
    return dict(drafter=magicjax.SmallModel(short_model(**changes)))


def opt(num_heads=4) -> magicjax.Model:
    """Returns a model whose positions are learned; with 16 heads these have one element each."""
    config = models.family_config(
        "opt",
        vocab_size=tiny.VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=num_heads,
        max_positions=LIMIT,
    )
    return magicjax.Model(models.build(config), tiny.model().params)


def sparse(model=None, **options):
    return dict(drafter=magicjax.SmallModel(model or tiny.model("near"), **options))


def budget(slots, sinks=2, **options):
    return magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=sinks), budget=slots, **options)


REFUSED = {
    # prompts
    "one text": (dict(prompts="a text"), TypeError, "single text: pass a list"),
    "no prompt": (dict(prompts=[]), ValueError, "prompts is empty: pass at least one prompt"),
    "empty prompt": (dict(prompts=[[1], []]), ValueError, "prompt 1 is empty: .* at least 1 token"),
    "text without tokenizer": (
        dict(prompts=["a"]),
        ValueError,
        "prompt 0 is text and the target 'target' has no tokenizer: pass token ids",
    ),
    "no batch": (dict(prompts=[1, 2]), ValueError, r"prompt 0 has shape \(\).*ids; .* wrap it: "),
    "token too large": (
        dict(prompts=[[1], [0, tiny.VOCAB]]),
        ValueError,
        "prompt 1 has token 48, outside the target's vocabulary: .* between 0 and 47",
    ),
    "prompt too long": (
        dict(prompts=[[1], [0] * 489], max_new_tokens=24),
        ValueError,
        "prompt 1 has 489 tokens; with max_new_tokens=24 it needs 513 positions, and the target "
        r"has 512: shorten the prompt \(to at most 488 tokens\) or reduce max_new_tokens",
    ),
    "output too long": (
        dict(max_new_tokens=511),
        ValueError,
        "with max_new_tokens=511 .* needs 51",
    ),
    # lengths and ends
    "no new token": (dict(max_new_tokens=0), ValueError, "max_new_tokens=0 must be at least 1"),
    "limits of other rows": (
        dict(max_new_tokens=[3, 4]),
        ValueError,
        r"max_new_tokens has shape \(2,\) for 1 prompts: pass one int, or one per row",
    ),
    "half a token": (dict(max_new_tokens=2.5), TypeError, "max_new_tokens=2.5 must be an int"),
    "eos outside": (
        dict(eos_token_id=[3, 48]),
        ValueError,
        r"eos_token_id=48 must lie between 0 and 47; to disable early stopping, pass \[\]",
    ),
    "pad outside": (dict(pad_token_id=-1), ValueError, "pad_token_id=-1 must lie between 0 and 47"),
    # options
    "unknown option": (dict(temprature=0.7), TypeError, "temprature"),
    # sampling
    "temperature without sampling": (
        dict(temperature=0.7),
        ValueError,
        "temperature=0.7 has no effect in greedy decoding: pass do_sample=True or omit temperature",
    ),
    "temperature of zero": (
        dict(do_sample=True, temperature=0),
        ValueError,
        "temperature=0 must be above 0 and finite in float32; for greedy decoding, omit do_sample",
    ),
    "negative temperature": (
        dict(do_sample=True, temperature=[-1.0]),
        ValueError,
        "temperature=-1 must be above 0",
    ),
    "temperatures of other rows": (
        dict(do_sample=True, temperature=[1.0, 2.0]),
        ValueError,
        r"temperature has shape \(2,\) for 1 prompts: pass one number, or one per row",
    ),
    "top_p of zero": (
        dict(do_sample=True, top_p=0.0),
        ValueError,
        "top_p=0 must be above 0 and at most 1",
    ),
    "top_p above one": (dict(do_sample=True, top_p=1.5), ValueError, "top_p=1.5 must be"),
    "negative top_k": (
        dict(do_sample=True, top_k=-1),
        ValueError,
        r"top_k=-1 must be a whole number, 0 \(all tokens\) or more",
    ),
    "top_p of nothing": (
        dict(do_sample=True, top_p=1e-46),
        ValueError,
        "top_p=1e-46 must be above 0",
    ),
    "a temperature that float32 cannot represent": (
        dict(do_sample=True, temperature=1e-40),
        ValueError,
        "temperature=1e-40 must be above 0 and finite in float32",
    ),
    "a seed beyond 32 bits": (
        dict(do_sample=True, seed=2**32),
        ValueError,
        "seed=4294967296 must be a whole number between 0 and 4294967295",
    ),
    "half a seed": (dict(do_sample=True, seed=1.5), ValueError, "seed=1.5 must be a whole number"),
    "half a top_k": (
        dict(do_sample=True, top_k=2.5),
        ValueError,
        "top_k=2.5 must be a whole number",
    ),
    # verifiers
    "unknown verifier": (
        dict(do_sample=True, drafter=budget(12), verifier="mms"),
        ValueError,
        "verifier='mms' is unknown: use one of greedy, naive, mss",
    ),
    "sampling verifier without sampling": (
        dict(drafter=budget(12), verifier="mss"),
        ValueError,
        "verifier='mss' requires sampling: pass do_sample=True or omit verifier",
    ),
    "greedy verifier with sampling": (
        dict(drafter=budget(12), do_sample=True, verifier="greedy"),
        ValueError,
        "accepts only the most likely token, which does not follow the target's distribution",
    ),
    "verifier without drafter": (
        dict(do_sample=True, verifier="mss"),
        ValueError,
        "verifier='mss' has no effect without a drafter: pass one or omit verifier",
    ),
    "dynamic tree of draws": (
        dict(
            drafter=budget(12, draw="with_replacement"),
            tree=magicjax.DynamicTree(4, 2, 2),
            do_sample=True,
        ),
        ValueError,
        "children drawn with_replacement in a dynamic tree would be pruned .* use draw='top'",
    ),
    "dynamic tree of draws in an ensemble": (
        dict(
            drafter=magicjax.Ensemble(
                [budget(12, draw="with_replacement")], [magicjax.DynamicTree(4, 2, 2)]
            ),
            do_sample=True,
        ),
        ValueError,
        "children drawn with_replacement in a dynamic tree would be pruned",
    ),
    "mixed draws": (
        dict(
            drafter=magicjax.Ensemble(
                [budget(12, draw="with_replacement"), budget(12, draw="without_replacement")]
            ),
            do_sample=True,
        ),
        ValueError,
        "mixes draws with and without replacement, .* use the same draw for all drafters",
    ),
    # ensembles and prompt-lookup
    "a class for a drafter": (
        dict(drafter=magicjax.PromptLookup),
        TypeError,
        r"drafter is the class PromptLookup: pass an instance, PromptLookup\(\)",
    ),
    "more tokens than an int32 counts": (
        dict(max_new_tokens=2**32 + 5),
        ValueError,
        "prompt 0 has 3 tokens; with max_new_tokens=4294967301 it needs 4294967304 positions",
    ),
    "prompt lookup of a bush": (
        dict(drafter=magicjax.PromptLookup(), tree=magicjax.expansion((2, 2))),
        ValueError,
        "prompt lookup proposes chains, and this tree branches below the root",
    ),
    "unknown backend": (
        dict(backend="triton"),
        ValueError,
        r"backend='triton' is unknown: use one of \['cpu', 'mosaic', .*'xla'\], or omit backend",
    ),
    # trees and drafters
    "tree alone": (
        dict(tree=magicjax.chain(2)),
        ValueError,
        "tree has no effect without a drafter: pass drafter=... or omit tree",
    ),
    "a depth for a tree": (
        dict(drafter=budget(12), tree=4),
        TypeError,
        r"tree=4 is not a tree: pass a text such as 'chain:4' .*magicjax\.chain",
    ),
    "model for a drafter": (
        dict(drafter=tiny.model("near")),
        TypeError,
        r"drafter has type Model: .* magicjax.SmallModel\(model\)",
    ),
    "small budget": (
        dict(drafter=budget(6), tree=magicjax.chain(4)),
        ValueError,
        r"budget=6 is too small: its ring has 4 slots besides 2 pinned ones, "
        r"and needs at least tree depth \(4\) \+ 1 = 5; use a larger budget",
    ),
    "as many of the newest as slots": (
        dict(drafter=magicjax.SelfSpeculation(policies.SnapKV(recent=32), 32)),
        ValueError,
        "budget=32 leaves no pinned slots besides a ring of 32: .* a smaller `recent`",
    ),
    "sinks that move without rotation": (
        sparse(opt(), policy="streaming", budget=64, sink_positions="in_cache"),
        ValueError,
        "sink_positions='in_cache' needs a drafter with rotary positions, and those of this one "
        "are learned or ALiBi: use sink_positions='text' and at most 512 tokens",
    ),
    "a window beyond the drafter's positions": (
        sparse(
            short_model(max_positions=64), policy="streaming", budget=64, sink_positions="in_cache"
        ),
        ValueError,
        "budget=64 and a round need 73 positions and the drafter has 64: .* at most 55",
    ),
    "other vocabulary": (
        small(vocab_size=50),
        ValueError,
        "the drafter's vocabulary has 50 tokens and the target's 48: they must be the same",
    ),
    "short drafter": (
        dict(max_new_tokens=30) | small(max_positions=32),
        ValueError,
        "prompt and new tokens need 33 positions and the drafter has 32: use a drafter with",
    ),
    "other tokenizer": (
        dict(
            target=with_tokenizer("a", "b", "c"),
            drafter=magicjax.SmallModel(with_tokenizer("a", "c", "b")),
        ),
        ValueError,
        r"tokenizer differs from the target's in 2 tokens, such as 'b' \(id 2 and 1\)",
    ),
}


@pytest.mark.parametrize("call", [magicjax.generate, magicjax.stream])
@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_are_errors_before_compilation(what, call):
    options, error, message = REFUSED[what]
    options = dict(target=tiny.model(), prompts=[[1, 2, 3]], max_new_tokens=4) | options
    before = program_cache.totals()
    with pytest.raises(error, match=message):
        call(options.pop("target"), options.pop("prompts"), **options)
    assert program_cache.totals() == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: magicjax.StreamingLLM(sinks=0), "sinks=0: .* at least 1"),
        (
            lambda: magicjax.SelfSpeculation("streamin"),
            "policy='streamin' is unknown: use one of .*; did you mean 'streaming'",
        ),
        (
            lambda: magicjax.SelfSpeculation("snapkv", refresh_every=0),
            "refresh_every=0: it must be at least 1 round; omit it",
        ),
        (
            lambda: magicjax.SelfSpeculation("full", 64),
            "budget=64: with policy 'full' the draft reads the target's own cache; use another",
        ),
        (
            lambda: magicjax.SmallModel(None, budget=64),
            "budget=64: with policy 'full' the draft keeps all of its cache; use another policy",
        ),
        (
            lambda: magicjax.SmallModel(None, policy="snapkv", sink_positions="in_cache"),
            "sink_positions='in_cache' needs policy 'streaming' .* not policy=SnapKV",
        ),
        (lambda: magicjax.SelfSpeculation(kv_dtype="int2"), "kv_dtype='int2': .* int8 or int4"),
        (lambda: magicjax.SelfSpeculation(draw="beam"), "draw='beam': it must be with_replacement"),
        (lambda: magicjax.SelfSpeculation(budget=True), "budget=True: it must be an integer"),
        (lambda: policies.SnapKV(scaled=1), "scaled=1: it must be true or false"),
        (lambda: magicjax.Ensemble([]), "an ensemble of 0 drafters: give 1 to 64"),
        (lambda: magicjax.PromptLookup(min_ngram=0), "min_ngram=0 and max_ngram=4: .* at least 1"),
        (
            lambda: magicjax.DynamicTree(64, 2, 4),
            "width=4 draft 20 nodes; use at most 21, or more depth or width",
        ),
        (
            lambda: magicjax.load("opt-125m", dtype="fp32"),
            "dtype='fp32' is not supported: use float32",
        ),
    ],
)
def test_invalid_settings_are_errors_at_construction(make, message):
    before = program_cache.totals()
    with pytest.raises((ValueError, TypeError), match=message):
        make()
    assert program_cache.totals() == before


@pytest.mark.parametrize("path", ["./nothing", "/nothing/at/all", "some/model"])
def test_a_missing_directory_is_an_error(path):
    with pytest.raises(FileNotFoundError, match=f"{path} is not a directory"):
        magicjax.load(path)


def test_the_largest_valid_request_is_accepted():
    """The limits in the messages are the true ones."""
    options = dict(max_new_tokens=LIMIT - 3, eos_token_id=[])
    output = magicjax.generate(tiny.model(), [np.array([1, 2, 3])], **options)
    assert output.lengths.tolist() == [LIMIT - 3]
    with pytest.raises(ValueError, match="needs 513 positions"):
        magicjax.generate(tiny.model(), [np.array([1, 2, 3, 4])], **options)
