"""Bad input is refused before anything is compiled, by value, limit and remedy."""

import dataclasses

import numpy as np
import pytest

import magicjax
import models
from magicjax import compilation
from tests.magicjax import tiny

LIMIT = tiny.config().max_positions  # 512


class FakeTokenizer:
    """As much of a tokenizer as the checks look at."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


def short_model(**changes) -> magicjax.Model:
    """Returns a model of another shape; checks look at its config only."""
    return magicjax.Model(models.build(tiny.config(**changes)), tiny.model().params)


def with_tokenizer(*words) -> magicjax.Model:
    return dataclasses.replace(tiny.model(), tokenizer=FakeTokenizer(*words))


def small(**changes):
    return dict(drafter=magicjax.SmallModel(short_model(**changes)))


def budget(slots, sinks=2):
    return magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=sinks), budget=slots)


REFUSED = {
    # prompts
    "one text": (dict(prompts="a text"), TypeError, "single text: pass a list"),
    "no prompt": (dict(prompts=[]), ValueError, "prompts is empty: give at least one"),
    "empty prompt": (dict(prompts=[[1], []]), ValueError, "prompt 1 is empty: .* at least 1 token"),
    "text without tokenizer": (
        dict(prompts=["a"]),
        ValueError,
        "prompt 0 is text and the target 'target' has no tokenizer: pass token ids",
    ),
    "no batch": (dict(prompts=[1, 2]), ValueError, r"prompt 0 has shape \(\).*list of token ids"),
    "floats": (dict(prompts=[[0.5]]), ValueError, "dtype float64: it must be text or a list"),
    "token too large": (
        dict(prompts=[[1], [0, tiny.VOCAB]]),
        ValueError,
        "prompt 1 has token 48, outside the target's vocabulary: .* between 0 and 47",
    ),
    "negative token": (dict(prompts=[[-1]]), ValueError, "prompt 0 has token -1, outside"),
    "prompt too long": (
        dict(prompts=[[1], [0] * 489], max_new_tokens=24),
        ValueError,
        "prompt 1 has 489 tokens; with 24 new ones it needs 513 positions, and the "
        "target has 512: shorten the prompt or max_new_tokens",
    ),
    "output too long": (dict(max_new_tokens=511), ValueError, "with 511 new ones .* needs 51"),
    # lengths and ends
    "no new token": (dict(max_new_tokens=0), ValueError, "max_new_tokens=0: .* at least 1"),
    "one row without": (
        dict(prompts=[[1], [2]], max_new_tokens=[3, 0]),
        ValueError,
        "max_new_tokens=0: it must be at least 1",
    ),
    "limits of other rows": (
        dict(max_new_tokens=[3, 4]),
        ValueError,
        r"max_new_tokens has shape \(2,\) for 1 prompts: give one int, or one a row",
    ),
    "half a token": (dict(max_new_tokens=2.5), TypeError, "max_new_tokens=2.5 must be an int"),
    "eos outside": (
        dict(eos_token_id=[3, 48]),
        ValueError,
        r"eos_token_id=48 lies outside .* between 0 and 47; pass \[\] to never stop early",
    ),
    "pad outside": (dict(pad_token_id=-1), ValueError, "pad_token_id=-1 must lie between 0 and 47"),
    # options
    "sampling": (dict(do_sample=True), ValueError, "do_sample=True is not supported: only greedy"),
    "unknown option": (dict(temperature=0.7), TypeError, "temperature"),
    "unknown backend": (
        dict(backend="triton"),
        ValueError,
        r"backend='triton' is unknown: use one of \['reference', 'xla'\], or None",
    ),
    "another target": (dict(target="gpt"), TypeError, "target is a str: pass what magicjax.load"),
    # trees and drafters
    "tree alone": (
        dict(tree=magicjax.chain(2)),
        ValueError,
        "a tree needs a drafter: pass drafter=..., or leave the tree out",
    ),
    "tree of a root": (
        dict(drafter=budget(12), tree=magicjax.TokenTree((-1,))),
        ValueError,
        "the tree speculates nothing: give it a child, or leave the drafter out",
    ),
    "branches for a tree": (
        dict(drafter=budget(12), tree=(2, 2, 1)),
        TypeError,
        r"tree is a tuple: make one with magicjax.chain, magicjax.expansion or .*from_parents",
    ),
    "more children than tokens": (
        dict(drafter=budget(12), tree=magicjax.expansion((49,))),
        ValueError,
        "a node has 49 children and the vocabulary 48 tokens: .* at most 48",
    ),
    "model for a drafter": (
        dict(drafter=tiny.model("near")),
        TypeError,
        r"drafter is a Model: .* magicjax.SmallModel\(model\)",
    ),
    "small budget": (
        dict(drafter=budget(6), tree=magicjax.chain(4)),
        ValueError,
        r"budget=6 leaves too small a ring: it must be at least sinks \(2\) \+ tree depth \(4\) "
        r"\+ 1 = 7",
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
        r"tokenizer differs from the target's in 2 tokens, such as 'b' \(2 against 1\)",
    ),
}


@pytest.mark.parametrize("call", [magicjax.generate, magicjax.stream])
@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_before_anything_is_compiled(what, call):
    options, error, message = REFUSED[what]
    options = dict(target=tiny.model(), prompts=[[1, 2, 3]], max_new_tokens=4) | options
    before = compilation.count()
    with pytest.raises(error, match=message):
        call(options.pop("target"), options.pop("prompts"), **options)
    assert compilation.count() == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: magicjax.StreamingLLM(sinks=0), "sinks=0: .* at least 1"),
        (
            lambda: magicjax.SelfSpeculation("streamin"),
            "policy='streamin' is unknown: did you mean 'streaming'",
        ),
        (lambda: magicjax.load("opt-125"), "preset 'opt-125' does not exist: .* 'opt-125m'"),
    ],
)
def test_a_name_or_number_that_cannot_be_is_refused_at_once(make, message):
    before = compilation.count()
    with pytest.raises(ValueError, match=message):
        make()
    assert compilation.count() == before


@pytest.mark.parametrize("path", ["./nothing", "/nothing/at/all", "some/model"])
def test_a_directory_that_is_not_there_is_named(path):
    with pytest.raises(FileNotFoundError, match=f"{path} is no directory"):
        magicjax.load(path)


def test_what_just_fits_is_accepted():
    """The limits in the messages are the true ones."""
    options = dict(max_new_tokens=LIMIT - 3, eos_token_id=[])
    output = magicjax.generate(tiny.model(), [np.array([1, 2, 3])], **options)
    assert output.lengths.tolist() == [LIMIT - 3]
    with pytest.raises(ValueError, match="needs 513 positions"):
        magicjax.generate(tiny.model(), [np.array([1, 2, 3, 4])], **options)
