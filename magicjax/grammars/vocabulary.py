"""The bytes of a tokenizer's tokens."""

import dataclasses
import functools
import json
import re
from typing import Any

import numpy as np
from jaxtyping import Int

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
DECODERS = "ByteLevel, ByteFallback or Metaspace"


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a tokenizer that stand for text.

    Attributes:
      ids: int32 [K], the ids of the tokens; special tokens are omitted.
      texts: uint8 [K, L], their bytes, padded with zeros.
      lengths: int32 [K], at least 1.
    """

    ids: Int[np.ndarray, "K"]
    texts: Int[np.ndarray, "K L"]
    lengths: Int[np.ndarray, "K"]


@functools.lru_cache(maxsize=4)
def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Returns the tokens of a fast tokenizer of transformers.

    Raises:
      ValueError: its decoder is not one whose tokens have bytes of their own.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("a grammar requires a fast tokenizer, which has a tokenizer.json")
    found = decoders_of(backend)
    if not found & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(
            f"a grammar requires a tokenizer with one of the decoders {DECODERS}, and this one has "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    to_bytes = bytes_of_byte_level if "ByteLevel" in found else _of_byte_fallback
    special = {*tokenizer.all_special_ids, *special_tokens(backend)}
    texts = {}
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token not in special and (encoded := to_bytes(text)):
            texts[token] = encoded
    ids = sorted(texts)
    lengths = np.array([len(texts[token]) for token in ids], np.int32)
    padded = np.zeros((len(ids), lengths.max()), np.uint8)
    for row, token in zip(padded, ids, strict=True):
        row[: len(texts[token])] = np.frombuffer(texts[token], np.uint8)
    return Vocabulary(np.array(ids, np.int32), padded, lengths)


def decoders_of(backend: Any) -> set[str]:
    """Returns the types of the decoders of a tokenizer of the package `tokenizers`."""
    if backend.decoder is None:
        return set()
    described = json.loads(backend.decoder.__getstate__())
    return {each["type"] for each in (described, *described.get("decoders", ()))}


def special_tokens(backend: Any) -> dict[int, str]:
    """Returns the tokens of a tokenizer of the package `tokenizers` that stand for no text."""
    added = backend.get_added_tokens_decoder()
    return {token: each.content for token, each in added.items() if each.special}


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character of GPT-2's byte-level vocabulary.

    Printable bytes are their own characters; the others follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


def bytes_of_byte_level(token: str) -> bytes:
    """Returns the bytes of a token of a byte-level vocabulary, as the decoder ByteLevel does."""
    table = _bytes_of_characters()
    known = all(character in table for character in token)
    return bytes(table[character] for character in token) if known else token.encode()


def byte_of_fallback(token: str) -> bytes | None:
    """Returns the byte of a token such as "<0xE2>", as the decoder ByteFallback does, else None."""
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


def _of_byte_fallback(text: str) -> bytes:
    return byte_of_fallback(text) or text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
