"""Prints the steps of a run with the elapsed seconds, and the text that is being decoded."""

import time

QUIET_S = 10.0  # the longest time without a line, where `tick` is called


class Steps:
    """Prints a line when a step begins, and further ones while it lasts if `tick` is called."""

    def __init__(self) -> None:
        self._began = self._printed = time.monotonic()
        self._step = ""
        self._line_is_open = False

    def __call__(self, step: str) -> None:
        """Begins a step."""
        self._step = step
        self._print(step)

    def tick(self) -> None:
        """Prints that the step lasts if nothing was printed for a while."""
        if time.monotonic() - self._printed >= QUIET_S:
            self._print(f"{self._step}, continued")

    def text(self, piece: str) -> None:
        """Prints a piece of a text without ending its line."""
        print(piece, end="", flush=True)
        self._line_is_open = not piece.endswith("\n") if piece else self._line_is_open
        self._printed = time.monotonic()

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        end_of_text = "\n" * self._line_is_open
        self._line_is_open = False
        seconds = self._printed - self._began
        print(f"{end_of_text}[{seconds:4.0f} s] {line}", flush=True)
