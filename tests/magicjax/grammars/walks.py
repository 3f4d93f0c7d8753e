"""Texts of grammars over single bytes, by random walks; whether a grammar has a text."""

import functools
import random

import numpy as np
import tokenizers
import transformers

import magicjax
from magicjax.decoding.token_bytes import bytes_of_characters
from magicjax.grammars.grammar import Grammar
from magicjax.grammars.matcher import Matcher
from tests.magicjax import tiny

END = "<end>"
SPECIAL = b'"\\}]@.'  # which walks prefer


@functools.cache
def bytes_target() -> magicjax.Model:
    """Returns a model whose token i is the byte i; token 256 is EOS."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(bytes_of_characters() | {END: 256}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    module = tiny.model().module.clone(config=tiny.config(vocab_size=257))
    return magicjax.Model(module, None, tokenizer, "bytes", (256,))


def matcher_of(grammar: Grammar) -> Matcher:
    return Matcher(bytes_target(), grammar, (256,))


def allowed(matcher: Matcher) -> np.ndarray:
    """Returns the tokens that may follow."""
    words = np.zeros(9, np.uint32)
    matcher.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:257]
    return np.flatnonzero(bits)


def texts(grammar: Grammar, count: int = 20, length: int = 60, seed: int = 0) -> list[str]:
    """Returns texts of random walks, which end where they may after `length` bytes.

    A walk that does not end within ten times as many is dropped.
    """
    rng, found = random.Random(seed), []
    for _ in range(count):
        matcher, text = matcher_of(grammar), bytearray()
        while len(text) < 10 * length:
            choices = allowed(matcher).tolist()
            assert choices, bytes(text)
            if 256 in choices and (len(choices) == 1 or len(text) >= length or rng.random() < 0.3):
                found.append(text.decode())
                break
            choices = [byte for byte in choices if byte != 256]
            special = [byte for byte in choices if byte in SPECIAL]
            if special and (len(text) >= length or rng.random() < 0.4):
                choices = special
            byte = rng.choice(choices)
            matcher.push([byte])
            text.append(byte)
    return found


def accepts(grammar: Grammar, text: str) -> bool:
    """Returns whether a grammar has a text."""
    matcher = matcher_of(grammar)
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        matcher.push([byte])
    return 256 in allowed(matcher)


def language(grammar: Grammar, most: int = 10_000) -> set[str]:
    """Returns all texts of a grammar that have no blanks between tokens of JSON."""
    found, open_ = set(), [b""]
    while open_:
        text = open_.pop()
        matcher = matcher_of(grammar)
        matcher.push([*text])
        for byte in allowed(matcher).tolist():
            if byte == 256:
                found.add(text.decode())
            elif byte != ord(" "):
                open_.append(text + bytes([byte]))
        assert len(open_) + len(found) < most
    return found
