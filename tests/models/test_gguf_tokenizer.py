"""Pre-tokenizers of GGUF files: ids of the models' own tokenizers."""

import json

import pytest
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from models.gguf.tokenizer import PRE_TOKENIZERS, read_tokenizer
from tests import gguf_cases as cases
from tests.models.tokenizer_texts import texts

TEXTS = texts()

# Pre-tokenizers and normalizers in the models' tokenizer.json.
DIGITS = {"type": "Digits", "individual_digits": True}
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = GPT2 | {"use_regex": False}
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def split(pattern):
    pattern = {"Regex": pattern}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def steps(*pretokenizers, ignore_merges=False):
    """The tokenizer of a tokenizer.json without a normalizer."""

    def of(vocab, merges):
        model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges}
        pre = {"type": "Sequence", "pretokenizers": pretokenizers}
        parts = {"added_tokens": [], "normalizer": None, "pre_tokenizer": pre}
        parts |= {"post_processor": None, "decoder": None, "model": model}
        return Tokenizer.from_str(json.dumps({"version": "1.0", **parts}))

    return of


def pattern_of(pre, **settings):
    """The tokenizer of the pattern that transformers has for files of this name."""
    return steps(split(GGUF_PRE_TOKENIZER_SPLITS[pre]), BYTES, **settings)


def of_class(name):
    """The tokenizer of a class of transformers."""
    made = getattr(transformers, name)
    return lambda vocab, merges: made(vocab=vocab, merges=merges).backend_tokenizer


LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe")
REFERENCES = {
    "gpt-2": of_class("GPT2Tokenizer"),
    "mpt": of_class("GPTNeoXTokenizer"),
    **dict.fromkeys(("smollm", "starcoder", "refact"), steps(DIGITS, GPT2)),
    "falcon": steps(  # tiiuae/falcon-7b
        {"type": "Punctuation", "behavior": "Contiguous"},
        GPT2,
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ),
    **{pre: pattern_of(pre, ignore_merges=True) for pre in LLAMA3},
    "dbrx": pattern_of("dbrx"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), of_class("Qwen2Tokenizer")),
    "qwen35": of_class("Qwen3_5Tokenizer"),
    "tekken": pattern_of("tekken", ignore_merges=True),
    "gpt-4o": pattern_of("gpt-4o", ignore_merges=True),
    # deepseek-ai/deepseek-llm-7b-base lists ranges of letters with a case instead of classes.
    "deepseek-llm": steps(
        *(split("[\r\n]"), split(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+")),
        *(split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), split(r"\s+$")),
        *(split("[一-龥ࠀ-一가-\ud7ff]+"), DIGITS, BYTES),
    ),
    "deepseek-coder": steps(
        *(split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+")),
        *(split("[一-龥ࠀ-一가-\ud7ff]+"), DIGITS, BYTES),
    ),
    "deepseek-v3": steps(
        split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), BYTES
    ),
}


@pytest.fixture(scope="module")
def vocabulary():
    """Returns (vocab, merges) of words across all boundaries, some of which no merges reach."""
    across = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model = cases.trained(across, "".join(TEXTS + texts(100, seed=1)), size=1500)
    merges = [merge for i, merge in enumerate(model["merges"]) if i % 9 != 8]
    return model["vocab"], [tuple(merge) for merge in merges]


def ids(tokenizer):
    return tuple(tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS)


def read(pre, vocab, merges):
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": sorted(vocab, key=vocab.get),
        "merges": [" ".join(merge) for merge in merges],
    }
    tokenizer, _ = read_tokenizer({f"tokenizer.ggml.{key}": x for key, x in metadata.items()})
    return tokenizer


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_are_those_of_the_published_tokenizer(pre, vocabulary):
    assert ids(read(pre, *vocabulary)) == ids(REFERENCES[pre](*vocabulary))


def test_other_rules_give_other_ids(vocabulary):
    groups = {}
    for pre in PRE_TOKENIZERS:
        groups.setdefault(ids(read(pre, *vocabulary)), []).append(pre)
    several = [["smollm", "starcoder", "refact"], [*LLAMA3], ["qwen2", "deepseek-r1-qwen"]]
    assert [group for group in groups.values() if len(group) > 1] == several


def test_words_of_gpt_4o_begin_at_capital_letters_and_keep_contractions():
    split = PRE_TOKENIZERS["gpt-4o"].pre_tokenize_str("HelloWorld don't ABCdef 12345!/\n\n  x")
    found = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in split]
    expected = ["Hello", "World", " don't", " ABCdef", " ", "123", "45", "!/\n\n", " ", " x"]
    assert found == expected


def test_merges_of_gemma_4_give_the_ids_of_its_class():
    """Pieces and merges of SentencePiece, with bytes for characters that no piece has."""
    model = cases.trained(None, "".join(TEXTS[:60]).replace(" ", "▁"), size=400)
    merges = [tuple(merge) for merge in model["merges"]]
    pieces = [piece for piece in model["vocab"] if piece != "<s>"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    named = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [3, 3, 3, 2, *[6] * 256, *[1] * len(pieces)],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
    }
    tokenizer, _ = read_tokenizer({f"tokenizer.ggml.{key}": x for key, x in named.items()})
    vocab = {token: i for i, token in enumerate(tokens)}
    expected = transformers.GemmaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    assert ids(tokenizer) == ids(expected)
    for text in TEXTS:
        found = tokenizer.encode(text).ids
        assert found[:1] == [2] and tokenizer.decode(found) == text
