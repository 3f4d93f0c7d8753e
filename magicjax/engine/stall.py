"""How many rounds and prompt tokens run between two deliveries of text, given the longest pause."""

import dataclasses

SMOOTHING = 0.3  # weight of the newest time
MARGIN = 0.85  # times vary


@dataclasses.dataclass
class StallBudget:
    """Divides the longest pause between two texts of a request into rounds and prefill.

    While prompts wait, rounds take at most half of it, and prefill what is left.

    Attributes:
      max_s: the longest pause; None: it is not bounded.
      round_s: seconds of a round of the loop, smoothed; 0 before the first one.
      token_s: seconds per prompt token in steps of the smallest chunk, smoothed; 0 before the first
        one.
    """

    max_s: float | None
    round_s: float = 0.0
    token_s: float = 0.0

    def rounds(self, most: int, prompts_wait: bool) -> int:
        """Returns the rounds of the next call of the loop, 1 to `most`."""
        if self.max_s is None:
            return most
        if not self.round_s:
            return 1
        return max(1, min(most, int(MARGIN * self.max_s / self.round_s / (1 + prompts_wait))))

    def prompt_tokens(self, rounds: int, chunk: int) -> int | None:
        """Returns the prompt tokens that may follow so many rounds, a multiple of `chunk`.

        At least one chunk, so that prompts make progress; None: no limit.
        """
        if self.max_s is None:
            return None
        if not self.token_s:
            return chunk
        left = MARGIN * self.max_s - rounds * self.round_s
        return max(1, int(left / self.token_s / chunk)) * chunk

    def count_rounds(self, rounds: int, seconds: float) -> None:
        """Adds the times of a call of the loop."""
        if rounds:
            self.round_s = _smoothed(self.round_s, seconds / rounds)

    def count_tokens(self, tokens: int, seconds: float) -> None:
        """Adds the time of a piece of a prompt."""
        self.token_s = _smoothed(self.token_s, seconds / tokens)


def _smoothed(before: float, new: float) -> float:
    return before + SMOOTHING * (new - before) if before else new
