"""The bytes of a tokenizer's tokens, and which of them are special."""

import functools
import json
import re
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def decoders_of(backend: Any) -> set[str]:
    """Returns the types of the decoders of a tokenizer of the package `tokenizers`."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {decoder["type"] for decoder in (state, *state.get("decoders", ()))}


def special_tokens(backend: Any) -> dict[int, str]:
    """Returns the tokens of a tokenizer of the package `tokenizers` that stand for no text."""
    added = backend.get_added_tokens_decoder()
    return {i: token.content for i, token in added.items() if token.special}


@functools.cache
def bytes_of_characters() -> dict[str, int]:
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
    table = bytes_of_characters()
    known = all(character in table for character in token)
    return bytes(table[character] for character in token) if known else token.encode()


def byte_of_fallback(token: str) -> bytes | None:
    """Returns the byte of a token such as "<0xE2>", as the decoder ByteFallback does, else None."""
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None
