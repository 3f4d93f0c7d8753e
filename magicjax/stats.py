"""What a run did: acceptance, counts, times, bytes."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one call, over all rows.

    Times are wall-clock seconds; compiling is not part of the others.

    Attributes:
      tau: mean acceptance length: tokens emitted per target pass and row, bonus included.
      acceptance_rate: accepted tokens over depth times rounds: of the tokens that a perfect
        drafter would have seen accepted, the share that was.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, … tokens. Acceptance is
        counted as the verifier decided it, also in a row's last round, which the row's end may
        cut; tau and emitted count what was emitted.
      rounds: target passes, summed over rows (a row counts until it ends).
      emitted: tokens of the decoding loop, all rows; the first of each row is prefill's.
      drafted: nodes scored besides roots.
      accepted: speculated tokens accepted.
      prefill_s, decode_s: of prefill (first token included), of the loop.
      compile_s: spent compiling in this call.
      compilations: programs compiled in this call.
      tokens_per_s: emitted / decode_s.
      kv_bytes_target, kv_bytes_draft: allocated keys and values.
      attention_backend: which backend computed the attention.
    """

    tau: float
    acceptance_rate: float
    acceptance_by_depth: tuple[float, ...]
    rounds: int
    emitted: int
    drafted: int
    accepted: int
    prefill_s: float
    decode_s: float
    compile_s: float
    compilations: int
    tokens_per_s: float
    kv_bytes_target: int
    kv_bytes_draft: int
    attention_backend: str


def acceptance(
    histogram: Int[np.ndarray, "B A"], emitted: Int[np.ndarray, "B"], nodes: int
) -> dict[str, Any]:
    """Returns the fields of `Stats` that follow from counting.

    Args:
      histogram: rounds of each row that accepted 0, 1, … A-1 tokens.
      emitted: tokens of each row, the first (prefill's) included.
      nodes: N.
    """
    by_count = np.asarray(histogram).sum(0)
    rounds, depth = int(by_count.sum()), len(by_count) - 1
    accepted = int((by_count * np.arange(depth + 1)).sum())
    of_loop = int((np.asarray(emitted) - 1).sum())
    at_least = by_count[::-1].cumsum()[::-1][1:]
    return {
        "tau": of_loop / rounds if rounds else 0.0,
        "acceptance_rate": accepted / (rounds * depth) if rounds * depth else 0.0,
        "acceptance_by_depth": tuple(float(n) / max(rounds, 1) for n in at_least),
        "rounds": rounds,
        "emitted": of_loop,
        "drafted": rounds * (nodes - 1),
        "accepted": accepted,
    }
