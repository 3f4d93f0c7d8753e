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
    decoder = json.dumps(json.loads(backend.to_str())["decoder"])
    byte_level = '"ByteLevel"' in decoder
    if not byte_level and not any(f'"{kind}"' in decoder for kind in ("ByteFallback", "Metaspace")):
        raise ValueError(
            f"a grammar requires a tokenizer with one of the decoders {DECODERS}, and this one has "
            f"{decoder}"
        )
    to_bytes = _of_byte_level if byte_level else _of_byte_fallback
    added = backend.get_added_tokens_decoder()
    special = set(tokenizer.all_special_ids)
    texts = {}
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token in special or (token in added and added[token].special):
            continue
        encoded = text.encode() if token in added else to_bytes(text)
        if encoded:
            texts[token] = encoded
    ids = sorted(texts)
    lengths = np.array([len(texts[token]) for token in ids], np.int32)
    padded = np.zeros((len(ids), lengths.max()), np.uint8)
    for row, token in zip(padded, ids, strict=True):
        row[: len(texts[token])] = np.frombuffer(texts[token], np.uint8)
    return Vocabulary(np.array(ids, np.int32), padded, lengths)


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


def _of_byte_level(text: str) -> bytes:
    table = _bytes_of_characters()
    return bytes(table[char] for char in text) if all(char in table for char in text) else b""


def _of_byte_fallback(text: str) -> bytes:
    if match := BYTE_TOKEN.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
