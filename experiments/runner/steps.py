"""Prints the steps of a run with the elapsed seconds, and the text that is being decoded."""

import time

BEGAN = time.monotonic()  # of the process, as this module imports nothing
QUIET_S = 10.0  # the longest time without a line, where `tick` is called


class Steps:
    """Prints a line when a step begins, and further ones while it lasts if `tick` is called.

    Attributes:
      stopped: whether no further step may begin.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._printed = BEGAN
        self._step = ""
        self._line_is_open = False

    def __call__(self, step: str) -> str:
        """Begins a step; returns the one before. Raises KeyboardInterrupt if the user stopped."""
        if self.stopped:
            raise KeyboardInterrupt
        before, self._step = self._step, step
        self._print(step)
        return before

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
        seconds = self._printed - BEGAN
        print(f"{end_of_text}[{seconds:4.0f} s] {line}", flush=True)
