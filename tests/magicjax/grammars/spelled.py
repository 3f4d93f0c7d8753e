"""Tokenizers of a few given texts, and an oracle of grammars by the package `regex`."""

import dataclasses
import functools
import itertools

import numpy as np
import regex
import tokenizers
import transformers

import magicjax
from tests.magicjax import oracle, tiny

END = "<end>"


def tokenizer(texts: tuple[str, ...]) -> transformers.PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer whose token i is the text i; `END` is EOS."""
    model = tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, [])
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


@functools.cache
def tiny_texts() -> tuple[str, ...]:
    """Returns texts of one to three letters for the tokens of `tiny.model`; NEVER is EOS."""
    pairs = ["".join(pair) for pair in itertools.product("abcde", "abcd")]
    return (*"abcdefghijklmnopqrstuvwxyz", *pairs, "xyz", END)


@functools.cache
def target() -> magicjax.Model:
    """Returns the tiny target with a tokenizer."""
    assert len(tiny_texts()) == tiny.VOCAB
    return dataclasses.replace(
        tiny.model(), tokenizer=tokenizer(tiny_texts()), eos_token_ids=(tiny.NEVER,)
    )


@functools.cache
def thinking_texts(markers: str) -> tuple[str, ...]:
    """Returns texts for the tokens of `tiny.model`, whole markers of reasoning among them or not.

    Args:
      markers: "text": only their parts are tokens; otherwise they are tokens, too.
    """
    whole = ("x", "y") if markers == "text" else ("<think>", "</think>")
    parts = ("<", "<think", "</", "</think", "think", ">", ">a", ">z", "\n", "\n\n", "\na", "/")
    letters = (*"abcdefghijklm", *(a + b for a in "abc" for b in "abcdef"))
    return (*whole, *parts, *letters, "zzz", "{", END)


@functools.cache
def thinking_target(markers: str) -> magicjax.Model:
    """Returns the tiny target with a tokenizer whose chat template marks reasoning.

    Args:
      markers: "text": of several tokens; "added": tokens with text; "special": without.
    """
    texts = thinking_texts(markers)
    assert len(texts) == tiny.VOCAB
    made = tokenizer(tuple(text.replace("\n", "Ċ") for text in texts))
    if markers != "text":
        special = markers == "special"
        added = [tokenizers.AddedToken(text, special=special) for text in texts[:2]]
        made.backend_tokenizer.add_tokens(added)
    made.chat_template = "{# </think> #}"
    return dataclasses.replace(tiny.model(), tokenizer=made, eos_token_ids=(tiny.NEVER,))


@functools.cache
def allowed(pattern: str, texts: tuple[str, ...], tokens: tuple[int, ...]) -> np.ndarray:
    """Returns which tokens may follow others, by `regex`, which can match beginnings.

    All of them after a text that begins no match. What follows `END` is not emitted.

    Args:
      pattern: a regular expression.
      texts: of the tokens, one of which is `END`.
      tokens: those so far.
    """
    text = "".join(texts[token] for token in tokens).replace(END, "")
    if not regex.fullmatch(pattern, text, partial=True):
        return np.ones(len(texts), bool)
    may_end = regex.fullmatch(pattern, text) is not None
    return np.array(
        [
            may_end if new == END else bool(regex.fullmatch(pattern, text + new, partial=True))
            for new in texts
        ]
    )


def greedy(pattern: str, prompt, new_tokens: int) -> np.ndarray:
    """Returns the text of the tiny target under a pattern, by plain greedy decoding."""
    text: list[int] = []
    while len(text) < new_tokens and tiny.NEVER not in text:
        logits = oracle.logits(target(), [*prompt, *text])[-1]
        may_follow = allowed(pattern, tiny_texts(), tuple(text))
        text.append(int(np.where(may_follow, logits, -np.inf).argmax()))
    return np.array(text, np.int32)
