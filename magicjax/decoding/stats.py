"""Statistics of a run: acceptance, counts, times and bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one call, over all rows.

    Times are wall-clock seconds; `prefill_s`, `decode_s` and `plan_s` exclude compilation. Counts
    are those of the loop, which can run some rounds after a stop string.

    Attributes:
      tau: mean acceptance length τ: emitted tokens per target pass and row, bonus token included.
        Every pass has the same weight.
      tau_by_request: τ of each row, averaged; every row has the same weight.
      acceptance_rate: accepted tokens divided by depth times rounds, the number that a perfect
        drafter would have accepted.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, … tokens. Acceptance counts
        the verifier's result, even where a row's end truncates its last round; tau and emitted
        count emitted tokens.
      acceptance_if_reached: of the rounds that accepted at least 0, 1, … tokens, the share that
        accepted the next one.
      histogram: number of rounds that accepted 0, 1, … tokens.
      histogram_by_request: the same per row; its sum is the row's number of rounds.
      acceptance_by_rank: per depth, the share of the rounds that reached it and continued with the
        node's 1st, 2nd, … try (the last: that or, in merged trees, a later one).
        `magicjax.optimal` takes it; its cumulative sum is the success rate of the draft's top 1,
        2, … choices.
      target_passes: summed over rows until they end.
      rounds: of the batch, which are those of the longest-running row; decode_s / rounds is the
        time of one.
      emitted: tokens of the decoding loop, all rows; prefill emits the first token of each row.
      drafted: proposed nodes without roots and padding.
      nodes_per_round: of a row, the root included.
      accepted: accepted drafted tokens.
      prefill_s, decode_s: of prefill, including the first token, and of the decoding loop.
      compile_s: spent compiling in this call.
      compilations: programs compiled in this call.
      tokens_per_s: emitted / decode_s.
      kv_bytes_target, kv_bytes_draft: allocated keys and values.
      attention_backend: the backend of attention and products.
      plan_s: with `drafter="auto"` in `generate`: spent on trials and the comparison.
      depths: with `drafter="auto"`: the depth of the tree in each call of the loop; 0: plain.
    """

    tau: float
    tau_by_request: float
    acceptance_rate: float
    acceptance_by_depth: tuple[float, ...]
    acceptance_if_reached: tuple[float, ...]
    acceptance_by_rank: tuple[tuple[float, ...], ...]
    histogram: tuple[int, ...]
    histogram_by_request: tuple[tuple[int, ...], ...]
    target_passes: int
    rounds: int
    emitted: int
    drafted: int
    nodes_per_round: float
    accepted: int
    prefill_s: float
    decode_s: float
    compile_s: float
    compilations: int
    tokens_per_s: float
    kv_bytes_target: int
    kv_bytes_draft: int
    attention_backend: str
    plan_s: float = 0.0
    depths: tuple[int, ...] = ()


def acceptance(
    emitted: Int[np.ndarray, "B"],
    histogram: Int[np.ndarray, "B A"],
    ranks: Int[np.ndarray, "B A W"],
    nodes: Int[np.ndarray, "B"],
    calls: Sequence[tuple[int, Int[np.ndarray, "B A"]]] = (),
) -> dict[str, Any]:
    """Returns the counted fields of `Stats`.

    Args:
      emitted: tokens of each row, the first (prefill's) included.
      histogram: number of rounds of each row that accepted 0, 1, … A-1 tokens.
      ranks: number of rounds of each row that continued, at each depth, with the 1st, 2nd, … try.
      nodes: nodes proposed in each row, roots excluded.
      calls: depth of the tree and histogram of each call of the loop, if trees differed.
    """
    by_count = np.asarray(histogram).sum(0)
    passes, deepest = int(by_count.sum()), len(by_count) - 1
    accepted = int((by_count * np.arange(deepest + 1)).sum())
    per_row, rounds_per_row = np.asarray(emitted) - 1, np.asarray(histogram).sum(1)
    ran = rounds_per_row > 0
    at_least = _at_least(by_count)
    tried, perfect = np.zeros(deepest, int), 0  # rounds that could continue; accepted at best
    for depth, call_histogram in calls or [(deepest, histogram)]:
        call_counts = np.asarray(call_histogram).sum(0)
        tried[:depth] += _at_least(call_counts)[:depth]
        perfect += depth * int(call_counts.sum())
    reached = np.maximum(tried, 1)
    by_rank = np.asarray(ranks).sum(0)[:-1] / reached[:, None]
    return {
        "tau": int(per_row.sum()) / passes if passes else 0.0,
        "tau_by_request": float((per_row[ran] / rounds_per_row[ran]).mean()) if passes else 0.0,
        "acceptance_rate": accepted / perfect if perfect else 0.0,
        "acceptance_by_depth": tuple(float(n) / max(passes, 1) for n in at_least[1:]),
        "acceptance_if_reached": tuple(float(n) for n in at_least[1:] / reached),
        "acceptance_by_rank": tuple(tuple(map(float, row)) for row in by_rank),
        "histogram": tuple(map(int, by_count)),
        "histogram_by_request": tuple(tuple(map(int, row)) for row in np.asarray(histogram)),
        "target_passes": passes,
        "rounds": int(rounds_per_row.max()),
        "emitted": int(per_row.sum()),
        "drafted": int(np.asarray(nodes).sum()),
        "nodes_per_round": 1 + int(np.asarray(nodes).sum()) / passes if passes else 1.0,
        "accepted": accepted,
    }


def _at_least(by_count: Int[np.ndarray, "A"]) -> Int[np.ndarray, "A"]:
    """Returns the number of rounds that accepted at least 0, 1, … tokens."""
    return by_count[::-1].cumsum()[::-1]
