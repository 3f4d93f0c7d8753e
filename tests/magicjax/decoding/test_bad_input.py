"""Invalid arguments raise before compilation; errors name the value, the limit, the remedy."""

import dataclasses
import re

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
    "no batch": (dict(prompts=[1, 2]), TypeError, r"a list of numbers: .* ids: \[\[5, 6, 7\]\]"),
    "floats": (dict(prompts=[[0.5]]), TypeError, "dtype float64: it must be text or a list"),
    "booleans": (dict(prompts=[[True, 2]]), TypeError, "prompt 0 has booleans: it must be text"),
    "nested lists": (dict(prompts=[[[1, 2], [3]]]), TypeError, "prompt 0 is a nested list"),
    "bytes": (dict(prompts=b"def"), TypeError, "single text: pass a list"),
    "a generator": (dict(prompts=iter([[1]])), TypeError, "prompts has type list_iterator: pass a"),
    "a dict": (dict(prompts={"text": [[1]]}), TypeError, "a prompt is a dict of text: pass texts"),
    "one encoded text": (
        dict(prompts={"input_ids": [1, 2], "attention_mask": [1, 1]}),
        TypeError,
        r"the token ids of a single text: tokenize a list, tokenizer\(\[text\]\)",
    ),
    "several encoded texts as one prompt": (
        dict(prompts=[{"input_ids": [[1], [2]]}]),
        ValueError,
        "prompt 0 has the token ids of 2 texts: pass them as the prompts, not as one of them",
    ),
    "a mask with holes": (
        dict(prompts={"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}),
        ValueError,
        r"attention_mask=\[1, 0, 1\]: it must be 1 for the tokens of a text and 0 for the padding",
    ),
    "a mask of another shape": (
        dict(prompts={"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}),
        ValueError,
        "attention_mask has another shape than input_ids",
    ),
    "padding only": (
        dict(prompts={"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}),
        ValueError,
        "prompt 0 is empty",
    ),
    "a list of texts as one prompt": (
        dict(prompts=[["a"]]),
        TypeError,
        "prompt 0 is a list of texts: pass each text as one prompt",
    ),
    "an array of texts": (
        dict(prompts=np.array(["a", "b"])),
        ValueError,
        "prompt 0 is text and the target 'target' has no tokenizer",
    ),
    "one message": (
        dict(prompts={"role": "user", "content": "hello"}),
        TypeError,
        r"a prompt is a single message: pass a list of messages, \[message\]",
    ),
    "a body of messages": (
        dict(prompts={"messages": []}),
        TypeError,
        "a prompt is a dict of messages: pass the list of its messages alone",
    ),
    "messages without a template": (
        dict(prompts=[{"role": "user", "content": "hello"}]),
        ValueError,
        "the tokenizer has no chat template: pass the prompt as text",
    ),
    "a message without content": (
        dict(prompts=[[{"role": "user"}]]),
        TypeError,
        "message {'role': 'user'} of a conversation: it must be a dict of a role and a content",
    ),
    "token too large": (
        dict(prompts=[[1], [0, tiny.VOCAB]]),
        ValueError,
        "prompt 1 has token 48, outside the target's vocabulary of 48 tokens: .* between 0 and 47",
    ),
    "prompt too long": (
        dict(prompts=[[1], [0] * 489], params=magicjax.SamplingParams(max_tokens=24)),
        ValueError,
        "prompt 1 has 489 tokens; with max_tokens=24 it needs 513 positions, and the target "
        r"has 512: shorten the prompt \(to at most 488 tokens\) or reduce max_tokens",
    ),
    "output too long": (
        dict(params=magicjax.SamplingParams(max_tokens=511)),
        ValueError,
        "with max_tokens=511 .* needs 51",
    ),
    # lengths and ends
    "no room for new tokens": (
        dict(prompts=[[1], [0] * LIMIT], params=magicjax.SamplingParams(max_tokens=None)),
        ValueError,
        "prompt 1 has 512 tokens, and the 512 positions of the target leave no room for new ones: "
        "shorten the prompt to at most 511 tokens",
    ),
    "no new tokens": (
        dict(params=magicjax.SamplingParams(max_tokens=0)),
        ValueError,
        "max_tokens=0: it must be at least 1; only a request of magicjax.Engine can have 0",
    ),
    "eos outside": (
        dict(eos_token_id=[3, 48]),
        ValueError,
        r"eos_token_id=48 must lie between 0 and 47; to disable early stopping, pass \[\]",
    ),
    "a boolean as eos": (dict(eos_token_id=True), TypeError, "eos_token_id=True is not a token id"),
    "pad outside": (dict(pad_token_id=-1), ValueError, "pad_token_id=-1 must lie between 0 and 47"),
    # options
    "unknown option": (dict(dratfer="self"), TypeError, "did you mean 'drafter'"),
    # parameters, of which tests/magicjax/test_sampling_params.py has the values
    "a dict of parameters": (
        dict(params={"temperature": 0.7}),
        TypeError,
        r"params has type dict: pass magicjax.SamplingParams\(...\), or a list of one per prompt",
    ),
    "a list with something else": (
        dict(params=[0.7]),
        TypeError,
        r"params has type float: pass magicjax.SamplingParams\(...\)",
    ),
    "parameters of other rows": (
        dict(params=[magicjax.SamplingParams()] * 2),
        ValueError,
        "2 SamplingParams for 1 prompts: pass one, or one per prompt",
    ),
    "a parameter as an argument": (
        dict(temperature=0.7),
        TypeError,
        r"temperature=0.7 is not an argument of .*: use magicjax.SamplingParams\(temperature=",
    ),
    "an argument of transformers": (
        dict(max_new_tokens=7),
        TypeError,
        r"max_new_tokens=7 is not an argument of .*: use magicjax.SamplingParams\(max_tokens=...\)",
    ),
    "greedy decoding of transformers": (dict(do_sample=False), TypeError, "temperature=0, the def"),
    "beam search": (dict(num_beams=4), TypeError, "beam search is not supported: decode greedily"),
    "a draft model of transformers": (
        dict(assistant_model="PATH"),
        TypeError,
        r"pass drafter=magicjax.SmallModel\(magicjax.load\(PATH\)\) to magicjax.generate",
    ),
    "devices of vLLM": (
        dict(tensor_parallel_size=2),
        TypeError,
        r"pass mesh=magicjax.make_mesh\(model=...\)",
    ),
    "a mask of padding": (
        dict(prompts=np.array([[0, 1]]), attention_mask=[[0, 1]]),
        TypeError,
        "attention_mask=.* is not an argument of .*: pass what the tokenizer returned, with",
    ),
    "more alternatives than tokens": (
        dict(target=short_model(vocab_size=8), params=magicjax.SamplingParams(logprobs=9)),
        ValueError,
        "logprobs=9: it must be at most 8, the vocabulary",
    ),
    "more alternatives of the prompt than tokens": (
        dict(target=short_model(vocab_size=8), params=magicjax.SamplingParams(prompt_logprobs=9)),
        ValueError,
        "prompt_logprobs=9: it must be at most 8, the vocabulary",
    ),
    # verifiers
    "unknown verifier": (
        dict(params=magicjax.SamplingParams(temperature=1), drafter=budget(12), verifier="mms"),
        ValueError,
        "verifier='mms' is unknown: use one of greedy, naive, mss",
    ),
    "sampling verifier without sampling": (
        dict(drafter=budget(12), verifier="mss"),
        ValueError,
        "verifier='mss' requires sampling: pass a temperature above 0 or omit verifier",
    ),
    "greedy verifier with sampling": (
        dict(drafter=budget(12), params=magicjax.SamplingParams(temperature=1), verifier="greedy"),
        ValueError,
        "accepts only the most likely token, which does not follow the target's distribution",
    ),
    "verifier without drafter": (
        dict(params=magicjax.SamplingParams(temperature=1), verifier="mss"),
        ValueError,
        "verifier='mss' has no effect without a drafter: pass one or omit verifier",
    ),
    "dynamic tree of draws": (
        dict(
            drafter=budget(12, draw="with_replacement"),
            tree=magicjax.DynamicTree(4, 2, 2),
            params=magicjax.SamplingParams(temperature=1),
        ),
        ValueError,
        "children drawn with_replacement in a dynamic tree would be pruned .* use draw='top'",
    ),
    "dynamic tree of draws in an ensemble": (
        dict(
            drafter=magicjax.Ensemble(
                [budget(12, draw="with_replacement")], [magicjax.DynamicTree(4, 2, 2)]
            ),
            params=magicjax.SamplingParams(temperature=1),
        ),
        ValueError,
        "children drawn with_replacement in a dynamic tree would be pruned",
    ),
    "mixed draws": (
        dict(
            drafter=magicjax.Ensemble(
                [budget(12, draw="with_replacement"), budget(12, draw="without_replacement")]
            ),
            params=magicjax.SamplingParams(temperature=1),
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
        dict(params=magicjax.SamplingParams(max_tokens=2**32 + 5)),
        ValueError,
        "prompt 0 has 3 tokens; with max_tokens=4294967301 it needs 4294967304 positions",
    ),
    "prompt lookup of a bush": (
        dict(drafter=magicjax.PromptLookup(), tree=magicjax.expansion((2, 2))),
        ValueError,
        "prompt lookup proposes chains, and this tree branches below the root",
    ),
    "suffix lookup of a bush": (
        dict(drafter=magicjax.SuffixLookup(), tree=magicjax.expansion((2, 2))),
        ValueError,
        "suffix lookup proposes chains and dynamic trees, and this is another tree: use chain:2,",
    ),
    "a tree deeper than any match allows": (
        dict(drafter=magicjax.SuffixLookup(2), tree=magicjax.chain(5)),
        ValueError,
        "depth of 5 exceeds max_factor=2.0 × max_match=2 = 4: use a tree of at most this depth",
    ),
    "a store of another vocabulary": (
        dict(drafter=magicjax.SuffixLookup(store_tokens=8).remember([tiny.VOCAB])),
        ValueError,
        "the store has token 48, outside the target's vocabulary: .* ids are 0 to 47",
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
        "the drafter's vocabulary has 50 rows and the target's 48: they may differ only in padding",
    ),
    "short drafter": (
        dict(params=magicjax.SamplingParams(max_tokens=30)) | small(max_positions=32),
        ValueError,
        "prompt and new tokens need 33 positions and the drafter has 32: use a drafter with",
    ),
    "other tokenizer": (
        dict(
            target=with_tokenizer("a", "b", "c"),
            drafter=magicjax.SmallModel(with_tokenizer("a", "c", "b")),
        ),
        ValueError,
        r"differs from that of the target 'target' in 2 tokens, such as 'b' \(id 2 and 1\)",
    ),
}


@pytest.mark.parametrize("call", [magicjax.generate, magicjax.stream])
@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_are_errors_before_compilation(what, call):
    options, error, message = REFUSED[what]
    options = dict(target=tiny.model(), prompts=[[1, 2, 3]]) | options
    before = program_cache.totals()
    with pytest.raises(error, match=message):
        call(options.pop("target"), options.pop("prompts"), **options)
    assert program_cache.totals() == before


ENSEMBLE, ROOT = magicjax.Ensemble([budget(12)], [magicjax.chain(2)]), magicjax.TokenTree((-1,))
HALF_BYTE = sparse(opt(num_heads=16), policy="h2o", budget=64, kv_dtype="int4")
ALSO_REFUSED = [
    (
        dict(drafter=magicjax.SuffixLookup(), tree=magicjax.DynamicTree(40, 2, 8)),
        "has 40 nodes, and suffix lookup drafts at most 16 of each depth: use at most 33 nodes",
    ),
    (
        dict(drafter=magicjax.SuffixLookup(), tree=magicjax.DynamicTree(9, 4, 3, min_prob=0.5)),
        "min_prob=0.5: suffix lookup counts texts instead of computing probabilities: omit it",
    ),
    (
        dict(drafter=magicjax.SuffixLookup(documents="a.txt")),
        "documents='a.txt': the target 'target' has no tokenizer; give token ids to",
    ),
    (
        dict(drafter=magicjax.SuffixLookup(documents="a.txt"), target=with_tokenizer("a")),
        "documents='a.txt' cannot be read: .* give a text file in UTF-8",
    ),
    (dict(prompts=[[-1]]), "prompt 0 has token -1, outside"),
    (dict(eos_token_id="</s>"), "eos_token_id='</s>' .* pass target.token"),
    (dict(pad_token_id=1.5), "pad_token_id=1.5 is not a token id: pass an"),
    (dict(target="gpt"), "target has type str: pass the model that"),
    (dict(drafter=magicjax.Ensemble([budget(12)], [ROOT])), "member's tree has only a root"),
    (dict(drafter=ENSEMBLE, tree=magicjax.chain(3)), "already has a tree for each drafter"),
    (dict(drafter=magicjax.Ensemble([budget(200)] * 5), tree=magicjax.chain(60)), "301 nodes in"),
    (
        dict(drafter=magicjax.Ensemble([budget(12), *small(vocab_size=50).values()])),
        "has 50 rows",
    ),
    (
        dict(drafter=magicjax.PromptLookup(), tree=magicjax.expansion((65,))),
        "65 chains: at most 64",
    ),
    (dict(drafter=budget(12), tree=ROOT), "tree has only a root: add a child, or omit drafter and"),
    (dict(drafter=budget(12), tree=magicjax.expansion((49,))), "49 children .* node at most 48"),
    (dict(drafter=budget(LIMIT + 1)), rf"budget={LIMIT + 1} is larger than the context of the mod"),
    (sparse(policy="h2o", budget=16) | dict(tree=magicjax.chain(4)), r"8 slots .* 2 x tree depth"),
    (HALF_BYTE, "even head dimension, not 1: use int8"),
]


@pytest.mark.parametrize(("options", "message"), ALSO_REFUSED)
def test_other_invalid_arguments_are_errors(options, message):
    options = dict(target=tiny.model(), prompts=[[1, 2, 3]]) | options
    with pytest.raises((TypeError, ValueError), match=message):
        magicjax.generate(options.pop("target"), options.pop("prompts"), **options)


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
            lambda: magicjax.SmallModel(tiny.model(), budget=64),
            "budget=64: with policy 'full' the draft keeps all of its cache; use another policy",
        ),
        (
            lambda: magicjax.SmallModel(tiny.model(), policy="snapkv", sink_positions="in_cache"),
            "sink_positions='in_cache' needs policy 'streaming' .* not policy=SnapKV",
        ),
        (
            lambda: magicjax.SmallModel(None),
            "model=None: pass the model that magicjax.load",
        ),
        (lambda: magicjax.SmallModel("path"), "model='path': pass the model that magicjax.load"),
        (lambda: magicjax.make_mesh(model="4"), "model='4': it must be a whole number of devices"),
        (lambda: magicjax.load(None), "source=None: pass the path of a directory or a"),
        (lambda: magicjax.SelfSpeculation(kv_dtype="int2"), "kv_dtype='int2': .* int8 or int4"),
        (lambda: magicjax.SelfSpeculation(draw="beam"), "draw='beam': it must be with_replacement"),
        (lambda: magicjax.SelfSpeculation(budget=True), "budget=True: it must be an integer"),
        (lambda: policies.SnapKV(scaled=1), "scaled=1: it must be true or false"),
        (lambda: magicjax.SelfSpeculation(budget=-1), "budget=-1: a draft cache needs at least 1"),
        (lambda: magicjax.SelfSpeculation(refresh_every=4), "always pins the first tokens; omit r"),
        (lambda: sparse(policy="streaming", sink_positions="x"), "it must be text or in_cache"),
        (lambda: policies.SnapKV(kernel=2), "kernel=2: it must be odd, 1 or more"),
        (lambda: policies.SnapKV(recent=0), "recent=0: the ring needs at least 1 slot"),
        (lambda: magicjax.StreamingLLM(recent=8), "recent=8: the ring of a streaming cache is the"),
        (lambda: magicjax.Ensemble([ENSEMBLE]), "an ensemble within an ensemble: list all"),
        (lambda: magicjax.Ensemble([budget(12)], [ROOT] * 2), "2 trees for 1 drafters: give one"),
        (lambda: magicjax.DynamicTree(1, 2, 2), "nodes=1: it must be an integer of at least 2"),
        (lambda: magicjax.DynamicTree(300, 9, 9), "nodes=300: at most 256 are supported"),
        (lambda: magicjax.load("opt-125"), r"did you mean 'opt-125m'\?"),
        (lambda: magicjax.Ensemble([]), "an ensemble of 0 drafters: give 1 to 64"),
        (lambda: magicjax.PromptLookup(min_ngram=0), "min_ngram=0 and max_ngram=4: .* at least 1"),
        (lambda: magicjax.SuffixLookup(15), "max_match=15: it must be an integer from 1 to 14"),
        (
            lambda: magicjax.SuffixLookup(store_tokens=-1),
            "store_tokens=-1: it must be an integer of at least 0",
        ),
        (lambda: magicjax.SuffixLookup(max_factor=0), "max_factor=0: it must be a number above 0"),
        (
            lambda: magicjax.SuffixLookup(min_score=2),
            "min_score=2: it must be a number from 0 to 1",
        ),
        (
            lambda: magicjax.SuffixLookup(documents="a.txt", store_tokens=0),
            "documents='a.txt' with store_tokens=0: omit one of them",
        ),
        (lambda: magicjax.SuffixLookup().remember("a text"), "pass the token ids of one text, su"),
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


@pytest.mark.parametrize(
    ("source", "kv_dtype", "message"),
    [
        ("experiments/zoo/target", "fp8", "kv_dtype='fp8' is not supported: use 'int8', or omit"),
        ("tests/models/golden/mpt", "int8", "kv_dtype='int8' rounds the positions"),
        ("tests/models/golden_eagle/eagle31", "int8", "is a learned head: omit kv_dtype"),
    ],
)
def test_a_cache_that_cannot_be_in_8_bits_is_an_error(source, kv_dtype, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        magicjax.load(source, kv_dtype=kv_dtype)


def of_rows(rows: int, *more: str) -> magicjax.Model:
    """Returns a model with a tokenizer of 48 shared tokens, and more; it has rows for some."""
    tokenizer = FakeTokenizer(*(f"word {i}" for i in range(tiny.VOCAB)), *more)
    return dataclasses.replace(short_model(vocab_size=rows), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("drafter", "target"),
    [
        ((48, "x"), (48,)),
        ((48,), (48, "x")),
        ((48, "x"), (48, "y", "x")),
        ((50, "x"), (48, "y")),
        ((48, "x"), (50, "y", "z")),
    ],
)
def test_tokens_beyond_one_of_the_embeddings_may_differ(drafter, target):
    magicjax.SmallModel(of_rows(*drafter)).check(of_rows(*target), magicjax.chain(2), 2, 8)


@pytest.mark.parametrize(("target", "number"), [((50,), 1), ((49, "y"), 2), ((50, "y", "x"), 2)])
def test_other_tokens_may_not(target, number):
    drafter = magicjax.SmallModel(of_rows(49, "x"))
    with pytest.raises(ValueError, match=rf"in {number} tokens, such as 'x' \(id 48 and "):
        drafter.check(of_rows(*target), magicjax.chain(2), 2, 8)


def test_the_largest_valid_request_is_accepted():
    """The limits in the messages are the true ones."""
    for max_tokens in (LIMIT - 3, None):
        params = magicjax.SamplingParams(max_tokens=max_tokens)
        output = magicjax.generate(tiny.model(), [np.array([1, 2, 3])], params, eos_token_id=[])
        assert output.lengths.tolist() == [LIMIT - 3]
    params = magicjax.SamplingParams(max_tokens=LIMIT - 3)
    with pytest.raises(ValueError, match="needs 513 positions"):
        magicjax.generate(tiny.model(), [np.array([1, 2, 3, 4])], params)
