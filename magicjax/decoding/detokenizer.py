"""The text of a row while its tokens arrive, cut before the first stop string, and of one token."""

import codecs
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from magicjax.decoding.reasoning import overlap, split_after
from magicjax.decoding.token_bytes import (
    byte_of_fallback,
    bytes_of_byte_level,
    decoders_of,
    special_tokens,
)
from magicjax.grammars.grammar import Grammar

CHARACTER_BYTES = 4  # at most, in UTF-8
FIRST_SURROGATE = 0xD800  # no text has surrogates: UTF-8 does not encode them


class Detokenizer:
    """Detokenizes the text after a prompt incrementally. All texts are made here.

    The text of the prompt and the new text are together that of all tokens: a tokenizer like
    Llama 2's drops the space before the first word of a prompt only. Special tokens have no text. A
    character that spans several tokens is returned when it is complete. Bytes that never become a
    character are replaced by U+FFFD as Unicode recommends: once for each longest beginning of a
    character. The end of the text is held back while it may be the beginning of a stop string.

    Reasoning is apart from the text (`reasoning.py`).

    Attributes:
      tokens: the new tokens so far; end with the one that completed a stop string.
      stopped: whether a stop string has been found.
      reasoning: the reasoning so far; stop strings do not end it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        ends: Iterable[int] = (),
        grammar: Grammar | None = None,
        split: bool = True,
    ):
        """Starts an empty text.

        Args:
          tokenizer: a fast tokenizer of transformers.
          stop: strings before which the text ends. Special tokens in them stand for themselves.
          prompt: the tokens before the text.
          ends: tokens that end the text, such as EOS; they have no text.
          grammar: constrains the text; None for any text.
          split: whether reasoning is apart, if the model marks it.
        """
        self.tokens: list[int] = []
        self.stopped, self.reasoning = False, ""
        self._read = _reader(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._previous: list[int] = []  # the newest token that has text
        self._marks: dict[int, str] = {}  # of special tokens in stop strings, a surrogate each
        self._ends = frozenset[int]()
        self._text, self._returned = "", 0  # with marks; characters
        for token in self._read.newest(prompt):
            self._step(token)  # its text is the prompt's; an incomplete character is not
        special = self._read.special
        self._split = split_after(tokenizer, special, prompt, grammar) if split else None
        self._ends = frozenset(ends)
        names = {name: token for token, name in special.items()}
        marked = [*stop]
        for name in sorted(names, key=len, reverse=True) if stop else ():
            if any(name in string for string in marked):
                self._marks[names[name]] = mark = chr(FIRST_SURROGATE + len(self._marks))
                marked = [string.replace(name, mark) for string in marked]
        self._stop = tuple(dict.fromkeys([*stop, *marked]))  # also where its text is spelled

    @property
    def text(self) -> str:
        """The text so far; ends before the stop string once it has been found."""
        return self._visible(self._text)

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Returns how many of the tokens belong to the text, and the new text.

        The tokens after the one that completes a stop string do not.
        """
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self._append(self._answer_of(token))
            if self.stopped:
                return count, self._new(len(self._text))
        return len(tokens), self._new(len(self._text) - self._held_back())

    def finish(self) -> str:
        """Returns the rest of the text: what was held back, and an incomplete last character."""
        if not self.stopped:
            self._append(self._answer(self._utf8.decode(b"", final=True)))
        if self._split is not None and not self.stopped:
            self._append(self._apart(*self._split.finish()))
        return self._new(len(self._text))

    def _append(self, chunk: str) -> None:
        """Adds to the text up to a stop string."""
        before = len(self._text)
        self._text += chunk
        if chunk and (end := self._first_stop(before)) is not None:
            self._text, self.stopped = self._text[:end], True

    def _answer_of(self, token: int) -> str:
        """Returns what a token adds to the text."""
        name = self._read.special.get(token)
        if self._split is None or token in self._marks or name not in self._split.markers:
            return self._answer(self._step(token))
        rest = self._answer(self._utf8.decode(b"", final=True))
        return rest + self._apart(*self._split.mark(name))

    def _answer(self, chunk: str) -> str:
        """Returns what belongs to the text of a chunk of all text; the rest is reasoning."""
        return chunk if self._split is None else self._apart(*self._split.push(chunk))

    def _apart(self, reasoning: str, answer: str) -> str:
        if reasoning:
            self.reasoning += self._visible(reasoning)
        return answer

    def _step(self, token: int) -> str:
        """Returns the text that a token adds: complete characters, or the mark of a token."""
        if token in self._marks:
            return self._utf8.decode(b"", final=True) + self._marks[token]
        new = b"" if token in self._ends else self._read.bytes_of(token)
        if new == b"":
            return ""
        is_first_space = new == b" " and not self._previous
        if new is None or is_first_space:  # decoders strip it, and join pieces of words
            before = self._read.decode(self._previous)
            new = self._read.decode([*self._previous, token])[len(before) :].encode()
        self._previous = [token]
        return self._utf8.decode(new)

    def _new(self, end: int) -> str:
        new, self._returned = self._text[self._returned : end], max(self._returned, end)
        return self._visible(new)

    def _visible(self, text: str) -> str:
        """Returns a text without marks."""
        return text.translate({ord(mark): None for mark in self._marks.values()})

    def _first_stop(self, before: int) -> int | None:
        """Returns where the first stop string begins that ends beyond `before` characters."""
        starts = (self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        return min((start for start in starts if start >= 0), default=None)

    def _held_back(self) -> int:
        """Returns the length of the longest end of the text that begins a stop string."""
        return max((overlap(self._text, stop) for stop in self._stop), default=0)


@dataclasses.dataclass(frozen=True)
class _TokenReader:
    """What a tokenizer knows about its tokens.

    Attributes:
      special: the tokens without text.
      bytes_of: the bytes of a token, b"" without text; None if they depend on the token before.
      decode: the text of some tokens alone.
    """

    special: Mapping[int, str]
    bytes_of: Callable[[int], bytes | None]
    decode: Callable[[list[int]], str]

    def newest(self, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the newest tokens of a prompt with text, which may end within a character."""
        visible = (token for token in reversed(prompt) if self.bytes_of(token) != b"")
        return [*itertools.islice(visible, CHARACTER_BYTES)][::-1]


class TokenText(NamedTuple):
    r"""A token within a text.

    Attributes:
      name: its text; of a part of a character its bytes, as OpenAI writes them: "bytes:\xe4\xbd".
      encoded: its UTF-8 in the text; special tokens have none.
    """

    name: str
    encoded: bytes


TokenTexts = Callable[[int], TokenText]


def token_texts(tokenizer: Any) -> TokenTexts:
    """Returns the function from a token to its text."""
    bytes_of = _reader(tokenizer).bytes_of

    @functools.lru_cache(maxsize=2**16)
    def text(token: int) -> TokenText:
        encoded = bytes_of(token)
        if encoded:
            try:
                return TokenText(encoded.decode(), encoded)
            except UnicodeDecodeError:
                return TokenText("bytes:" + "".join(f"\\x{x:02x}" for x in encoded), encoded)
        # A tokenizer may drop the space before the first token of a text.
        once, twice = (
            tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2)
        )
        name = twice[len(once) :] if twice.startswith(once) else once
        return TokenText(name, name.encode() if encoded is None else b"")

    return text


@functools.lru_cache(maxsize=4)
def _reader(tokenizer: Any) -> _TokenReader:
    backend = tokenizer.backend_tokenizer
    special, decoders = special_tokens(backend), decoders_of(backend)

    @functools.lru_cache(maxsize=2**17)
    def bytes_of(token: int) -> bytes | None:
        text = None if token in special else backend.id_to_token(token)
        if not text:  # embeddings can have more tokens than the tokenizer
            return b""
        if "ByteLevel" in decoders:
            return bytes_of_byte_level(text)
        return byte_of_fallback(text) if "ByteFallback" in decoders else None

    decode = functools.partial(backend.decode, skip_special_tokens=True)
    return _TokenReader(special, bytes_of, decode)
