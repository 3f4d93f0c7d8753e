"""Printed text, which `generate` and `chat` share."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from magicjax.decoding.detokenizer import token_texts
from magicjax.decoding.output import Output
from magicjax.decoding.text import NewTokens
from magicjax.verification.logprobs import LogProbs

DIM, NORMAL = "\x1b[2m", "\x1b[22m"  # of ANSI terminals


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets; a second Ctrl-C interrupts the process."""
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def print_stream(
    rounds: Generator[list[NewTokens], bool | None, Output],
    interrupted: Callable[[], bool] = lambda: False,
) -> Output:
    """Prints a text as it is generated, and returns the output of the generator.

    After a round in which `interrupted` returns True, the generator ends (`magicjax.stream`).
    """
    ends: bool | None = None  # a generator starts with None
    display, reasoning, text = Display(), "", ""
    while True:
        try:
            (new,) = rounds.send(ends)
        except StopIteration as end:
            (result,) = end.value.results  # of an interrupted text, some was held back
            rest = result.text.removeprefix(text)
            print(display.add(result.reasoning.removeprefix(reasoning), rest), flush=True)
            return end.value
        print(display.add(new.reasoning, new.text or ""), end="", flush=True)
        reasoning, text = reasoning + new.reasoning, text + (new.text or "")
        ends = interrupted()


class Display:
    """What is printed of an answer as it arrives: the text, and at a terminal dim reasoning."""

    def __init__(self):
        """Starts an empty answer."""
        self._has_reasoning = sys.stdout.isatty()
        self._in_reasoning = False

    def add(self, reasoning: str, text: str) -> str:
        """Returns what is printed for new reasoning and the new text after it."""
        if not self._has_reasoning:
            return text
        shown = f"{DIM}{reasoning}{NORMAL}" if reasoning else ""
        self._in_reasoning |= bool(reasoning)
        if text and self._in_reasoning:
            self._in_reasoning, shown = False, f"{shown}\n\n"
        return shown + text


def log_prob_lines(tokenizer: Any, tokens: Int[np.ndarray, "T"], logprobs: LogProbs) -> str:
    """Returns a line per token: its log-probability and text, then those of the alternatives.

    A token that is part of a character is shown by its bytes.
    """
    texts = token_texts(tokenizer)

    def described(log: float, token: int) -> str:
        name, encoded = texts(int(token))
        return f"{log:8.3f} {encoded if encoded and name.encode() != encoded else name!r}"

    alternatives = zip(logprobs.top, logprobs.top_tokens, strict=True)
    lines = [
        "  ".join([described(log, token), *map(described, *others)])
        for log, token, others in zip(logprobs.chosen, tokens, alternatives, strict=True)
    ]
    return "\n".join(["log-probabilities:", *lines])
