"""Statistics of a run: acceptance, counts, times and bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from magicjax.checks import counted
from magicjax.decoding.counts import Counts, tau_by_request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(Counts):
    """Statistics of one call, with the counts and rates of `Counts` over all rows.

    Times are wall-clock seconds; `prefill_s`, `decode_s` and `plan_s` exclude compilation. Counts
    are those of the loop, which can run some rounds after a stop string.

    Attributes:
      by_request: the counts of each row.
      rounds: rounds of the batch, equal to those of the longest-running row; decode_s / rounds is
        the time of one.
      prefill_s, decode_s: seconds of prefill, including the first token, and of the decoding loop.
      compile_s: spent compiling in this call.
      compilations: programs compiled in this call.
      kv_bytes_target, kv_bytes_draft: allocated keys and values, with scales and positions of
        pinned entries.
      attention_backend: the backend of attention and products.
      plan_s: with `drafter="auto"` in `generate`: spent on trials and the comparison.
      depths: with `drafter="auto"`: the depth of the tree in each call of the loop; 0: plain.
    """

    by_request: tuple[Counts, ...]
    rounds: int
    prefill_s: float
    decode_s: float
    compile_s: float
    compilations: int
    kv_bytes_target: int
    kv_bytes_draft: int
    attention_backend: str
    plan_s: float = 0.0
    depths: tuple[int, ...] = ()

    @property
    def tau_by_request(self) -> float:
        """τ of each row, averaged; every row has the same weight."""
        return tau_by_request(self.by_request)

    @property
    def histogram_by_request(self) -> tuple[tuple[int, ...], ...]:
        """The histogram of each row; its sum is the row's number of rounds."""
        return tuple(row.histogram for row in self.by_request)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens divided by `decode_s`."""
        return self.emitted / self.decode_s if self.decode_s else 0.0

    def __str__(self) -> str:
        """Returns rates and times as a few lines of text."""
        lines = []
        if self.rounds:
            lines.append(
                f"decoding {counted(self.emitted, 'token')}: {self.decode_s:.3f} s, "
                f"{self.tokens_per_s:.1f} tokens/s, {counted(self.rounds, 'round')}"
            )
        if self.rounds and self.acceptance_by_depth:
            lines += [
                f"tau {self.tau:.2f} tokens per round, {self.nodes_per_round:.1f} nodes per round",
                f"acceptance by depth  {_by_depth(self.acceptance_by_depth)}",
                f"  if reached         {_by_depth(self.acceptance_if_reached)}",
            ]
        lines += [
            f"prefill {self.prefill_s:.3f} s, compilation {self.compile_s:.1f} s "
            f"({counted(self.compilations, 'program')})",
            f"KV cache: target {self.kv_bytes_target / 1e6:.1f} MB, "
            f"draft {self.kv_bytes_draft / 1e6:.1f} MB",
        ]
        return "\n".join(lines)


def _by_depth(shares: Sequence[float]) -> str:
    return "  ".join(f"{depth}: {share:.2f}" for depth, share in enumerate(shares, 1))


def summed(by_request: tuple[Counts, ...]) -> dict[str, Any]:
    """Returns the counted fields of `Stats`, which are sums over the rows."""
    return vars(sum(by_request, Counts())) | {"by_request": by_request}
