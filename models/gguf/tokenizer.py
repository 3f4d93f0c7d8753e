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

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # GGUF's names
SPACE = "▁"  # SentencePiece's


class Type(enum.IntEnum):
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


def _byte_level(pattern: str | None = None) -> pre_tokenizers.PreTokenizer:
    """Returns a split into bytes, after one by a pattern; None: GPT-2's."""
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, whole])


def _words(digits: str) -> str:
    """Returns the pattern of Llama 3 and Qwen 2, which differ in the number of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words() -> str:
    """Returns the pattern of o200k (gpt-oss), which splits words before a capital letter."""
    start, contraction = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = (f"{start}{upper}*{lower}+{contraction}", f"{start}{upper}+{lower}*{contraction}")
    rest = (r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
    return "|".join((*words, *rest))


# "default" of byte-level files is llama.cpp's replacement for an unknown one, not any model's.
PRE_TOKENIZERS = {
    "gpt-2": _byte_level(),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _byte_level()]),
    "llama-bpe": _byte_level(_words(r"\p{N}{1,3}")),
    "qwen2": _byte_level(_words(r"\p{N}")),
    "gpt-4o": _byte_level(_cased_words()),
}
WHOLE_WORDS = ("llama-bpe", "gpt-4o")  # whose words that are tokens are not merged from parts


def read_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Returns a file's tokenizer and the contents of tokenizer_config.json; None if it has none.

    Raises ValueError for an unknown kind of tokenizer or pre-tokenizer.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    readers = {"gpt2": _read_byte_level, "llama": _read_sentencepiece}
    if kind not in readers:
        raise unsupported("tokenizer.ggml.model", kind, readers)
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise ValueError(
            "tokenizer.ggml.precompiled_charsmap is set, and SentencePiece's normalization is not "
            "supported: load the model's Hugging Face directory"
        )
    tokens: list[str] = _need(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [Type.NORMAL] * len(tokens)
    tokenizer = readers[kind](tokens, types, metadata)
    for special, token_type in ((True, Type.CONTROL), (False, Type.USER_DEFINED)):
        named = [token for token, each in zip(tokens, types) if each == token_type]
        added = [AddedToken(token, special=special, normalized=False) for token in named]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL.items()}
    for name, index in ids.items():
        if index is not None and index >= len(tokens):
            raise ValueError(
                f"tokenizer.ggml.{SPECIAL[name]}_token_id={index} exceeds the vocabulary of "
                f"{len(tokens)} tokens: the file is damaged"
            )
    _add_template(tokenizer, metadata, kind, tokens, ids)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
    }
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return tokenizer, settings


def _need(metadata: Mapping[str, Any], name: str) -> Any:
    if (key := f"tokenizer.ggml.{name}") not in metadata:
        raise ValueError(f"{key} is missing: the file is damaged, or too old")
    return metadata[key]


def _read_byte_level(
    tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]
) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise unsupported("tokenizer.ggml.pre", pre, PRE_TOKENIZERS)
    merges = [tuple(merge.split(" ", 1)) for merge in _need(metadata, "merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_sentencepiece(
    tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]
) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(tokens, types, _need(metadata, "scores"))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
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
    takes_part = (Type.NORMAL, Type.USER_DEFINED)
    score = {t: s for t, s, kind in zip(tokens, scores, types) if kind in takes_part}
    splits = ((token[:i], token[i:]) for token in score for i in range(1, len(token)))
    merges = [(left, right) for left, right in splits if left in score and right in score]
    return sorted(merges, key=lambda m: (score[m[0] + m[1]], len(m[0])), reverse=True)


def _add_template(
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    kind: str,
    tokens: Sequence[str],
    ids: Mapping[str, int | None],
) -> None:
    """Adds the BOS and EOS tokens that the file requests; defaults are llama.cpp's."""
    bos_by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
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
