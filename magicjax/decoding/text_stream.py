"""Text of a row while its tokens arrive, cut before the first stop string."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Detokenizes one text incrementally.

    A character that spans several tokens is returned when it is complete. The end of the text is
    held back while it may be the beginning of a stop string.

    Attributes:
      tokens: the tokens so far; end with the one that completed a stop string.
      text: the text so far; ends before the stop string once it has been found.
      stopped: whether a stop string has been found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        """Starts an empty text; `tokenizer` is a fast tokenizer of transformers."""
        self.tokens: list[int] = []
        self.text, self.stopped = "", False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._returned = 0  # characters

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Returns how many of the tokens belong to the text, and the new text.

        The tokens after the one that completes a stop string do not.
        """
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            chunk = self._step(token)
            if not chunk:
                continue
            before = len(self.text)
            self.text += chunk
            if (end := self._first_stop(before)) is not None:
                self.text, self.stopped = self.text[:end], True
                return count, self._new(len(self.text))
        return len(tokens), self._new(len(self.text) - self._held())

    def _step(self, token: int) -> str:
        """Returns the text that a token, the last one of `tokens`, adds."""
        backend = self._tokenizer.backend_tokenizer
        try:
            return self._decoder.step(backend, token) or ""
        except Exception as error:  # tokenizers has no narrower class for it
            if "Invalid prefix" not in str(error):
                raise
        # A byte token that belongs to no character: the stream cannot continue after it.
        self._decoder = DecodeStream(skip_special_tokens=True)
        chunk = self._decoder.step(backend, token) or ""
        whole = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        return whole[len(self.text) :] if whole.startswith(self.text) else chunk

    def finish(self) -> str:
        """Returns the rest of the text: what was held back, and an incomplete last character."""
        if not self.stopped:
            whole = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
            self.text = whole if whole.startswith(self.text) else self.text
        return self._new(len(self.text))

    def _new(self, end: int) -> str:
        new, self._returned = self.text[self._returned : end], max(self._returned, end)
        return new

    def _first_stop(self, before: int) -> int | None:
        """Returns where the first stop string begins that ends beyond `before` characters."""
        found = (self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        return min((start for start in found if start >= 0), default=None)

    def _held(self) -> int:
        """Returns the length of the longest end of the text that begins a stop string."""
        return max((_overlap(self.text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that begins, but is not, a string."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
