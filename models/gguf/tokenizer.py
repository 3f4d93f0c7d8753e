"""Tokenizers from the metadata of GGUF files.

Normalizers and pre-tokenizers are those of the models' own `tokenizer.json`. (The conversion in
transformers 5 splits digits of `smollm` files differently, and merges tokens of `llama-bpe` files
that the original takes whole.)
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

# GGUF's names.
SPECIAL_TOKEN_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
SPACE = "▁"  # SentencePiece's


class TokenType(enum.IntEnum):
    """Types of tokens in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


def unsupported(key: str, value: Any, known: Iterable[str]) -> ValueError:
    """Returns the error for metadata with an unknown value."""
    return ValueError(
        f"{key}={value!r} is not supported: it must be one of {', '.join(known)}; load another "
        "file, or the model's Hugging Face directory"
    )


# Steps of pre-tokenizers: into bytes alone, after GPT-2's split into words, and into digits.
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def _sequence(*steps: str | pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Returns the steps one after the other; a pattern isolates what it matches."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step
            for step in steps
        ]
    )


def _word_pattern(digits: str, marks: str = "") -> str:
    """Returns the pattern of Llama 3, Qwen 2 and Qwen 3.5.

    They differ in the number of digits, and in the characters of a word besides letters.
    """
    letters = r"\p{L}" + marks
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|"
        + digits
        + rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_word_pattern(contraction: str, digits: str) -> str:
    """Returns the pattern of o200k and Tekken, which splits words before a capital letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = (f"{start}{upper}*{lower}+{contraction}", f"{start}{upper}+{lower}*{contraction}")
    rest = (digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
    return "|".join((*words, *rest))


def _character_class(ranges: str) -> str:
    """Returns the pattern of one or more characters of ranges, which are hexadecimal."""
    ends = (each.split("-") for each in ranges.split())
    return "[" + "".join("-".join(chr(int(end, 16)) for end in each) for each in ends) + "]+"


# The letters with case in the pre-tokenizer of DeepSeek LLM, which is older than some of Unicode.
CASED_LETTERS = """
    41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386
    388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba
    1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59
    1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec
    1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139
    213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b
    a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f
    104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943
"""
PUNCTUATION = _character_class("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
ASIAN = _character_class("4e00-9fa5 800-4e00 ac00-d7ff")
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
LLAMA3 = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "pixtral",
)  # one pre-tokenizer by five names
# "default" of byte-level files is llama.cpp's replacement for an unknown one, not any model's.
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "mpt"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _sequence(DIGITS, GPT2)),
    "falcon": _sequence(
        pre_tokenizers.Punctuation("contiguous"),
        GPT2,
        pre_tokenizers.Digits(individual_digits=False),
        "[0-9][0-9][0-9]",
    ),
    **dict.fromkeys((*LLAMA3, "smaug-bpe", "dbrx"), _sequence(_word_pattern(r"\p{N}{1,3}"), BYTES)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _sequence(_word_pattern(r"\p{N}"), BYTES)),
    "qwen35": _sequence(_word_pattern(r"\p{N}", r"\p{M}"), BYTES),
    "tekken": _sequence(_cased_word_pattern("", r"\p{N}"), BYTES),
    "gpt-4o": _sequence(
        _cased_word_pattern(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"), BYTES
    ),
    "deepseek-llm": _sequence(
        *("[\r\n]", r"\s?" + _character_class(CASED_LETTERS), r"\s?" + PUNCTUATION, r"\s+$", ASIAN),
        *(DIGITS, BYTES),
    ),
    "deepseek-coder": _sequence("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, DIGITS, BYTES),
    "deepseek-v3": _sequence(
        r"\p{N}{1,3}", _character_class("4e00-9fa5 3040-309f 30a0-30ff"), DEEPSEEK_V3, BYTES
    ),
}
IGNORE_MERGES = (
    *LLAMA3,
    "smaug-bpe",
    "tekken",
    "gpt-4o",
)  # a word that is a token is not merged from parts
NFC_NORMALIZED = ("mpt", "qwen2", "qwen35", "deepseek-r1-qwen")
ADD_BOS = (*LLAMA3, "tekken")  # if the file does not say


def read_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Returns a file's tokenizer and the contents of tokenizer_config.json; None if it has none.

    Raises ValueError for an unknown kind of tokenizer or pre-tokenizer.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    readers = {
        "gpt2": _read_byte_level,
        "llama": _read_sentencepiece,
        "gemma4": _read_sentencepiece_merges,
    }
    if model not in readers:
        raise unsupported("tokenizer.ggml.model", model, readers)
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise ValueError(
            "tokenizer.ggml.precompiled_charsmap is set, and SentencePiece's normalization is not "
            "supported: load the model's Hugging Face directory"
        )
    tokens: list[str] = _require(metadata, "tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        if token and vocab[token] != i:  # empty ones have no text
            raise ValueError(
                f"tokenizer.ggml.tokens has {token!r} with the ids {i} and {vocab[token]}: the "
                "file is damaged; load another file, or the model's Hugging Face directory"
            )
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    tokenizer = readers[model](tokens, types, metadata)
    for special, token_type in ((True, TokenType.CONTROL), (False, TokenType.USER_DEFINED)):
        named = [token for token, each in zip(tokens, types) if each == token_type]
        added = [AddedToken(token, special=special, normalized=False) for token in named]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in SPECIAL_TOKEN_KEYS.items()
    }
    for name, index in ids.items():
        if index is not None and index >= len(tokens):
            raise ValueError(
                f"tokenizer.ggml.{SPECIAL_TOKEN_KEYS[name]}_token_id={index} exceeds the "
                f"vocabulary of {len(tokens)} tokens: the file is damaged"
            )
    _add_post_processor(tokenizer, metadata, model, tokens, ids)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
    }
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return tokenizer, settings


def _require(metadata: Mapping[str, Any], name: str) -> Any:
    if (key := f"tokenizer.ggml.{name}") not in metadata:
        raise ValueError(f"{key} is missing: the file is damaged, or too old")
    return metadata[key]


def _read_byte_level(
    tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]
) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise unsupported("tokenizer.ggml.pre", pre, PRE_TOKENIZERS)
    merges = [tuple(merge.split(" ", 1)) for merge in _require(metadata, "merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in IGNORE_MERGES))
    if pre in NFC_NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_sentencepiece_merges(
    tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]
) -> Tokenizer:
    """Returns the tokenizer of a file that has the merges (Gemma 4)."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in _require(metadata, "merges")]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    options: Any = dict(unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, **options))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    spaces = decoders.Replace(SPACE, " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _read_sentencepiece(
    tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]
) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(tokens, types, _require(metadata, "scores"))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    spaces = decoders.Replace(SPACE, " ")
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Returns the merges of SentencePiece's BPE, in the order of the merged tokens' scores.

    Control, unknown and byte tokens take no part. The order of equal scores is that of
    transformers, which made the published `tokenizer.json` of Llama models.
    """
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    score = {t: s for t, s, token_type in zip(tokens, scores, types) if token_type in mergeable}
    splits = ((token[:i], token[i:]) for token in score for i in range(1, len(token)))
    merges = [(left, right) for left, right in splits if left in score and right in score]
    return sorted(merges, key=lambda m: (score[m[0] + m[1]], len(m[0])), reverse=True)


def _add_post_processor(
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    model: str,
    tokens: Sequence[str],
    ids: Mapping[str, int | None],
) -> None:
    """Adds the BOS and EOS tokens that the file requests; defaults are llama.cpp's."""
    bos_by_default = model == "llama" or metadata.get("tokenizer.ggml.pre") in ADD_BOS
    adds = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", bos_by_default),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    named = {name: tokens[index] for name, index in ids.items() if index is not None}
    first, last = ([named[name]] if adds[name] and name in named else [] for name in adds)
    if first or last:
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B", *last],
            special_tokens=[(token, tokens.index(token)) for token in {*first, *last}],
        )
