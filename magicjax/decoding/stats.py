"""What a run did: acceptance, counts, times, bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one call, over all rows.

    Times are wall-clock seconds; compiling is not part of the others.

    Attributes:
      tau: mean acceptance length: tokens emitted per target pass and row, bonus included; every
        pass counts the same (weighted by token).
      tau_by_request: the same for each row, then averaged; every row counts the same.
      acceptance_rate: accepted tokens over depth times rounds: of the tokens that a perfect
        drafter would have seen accepted, the share that was.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, … tokens. Acceptance is
        counted as the verifier decided it, also in a row's last round, which the row's end may
        cut; tau and emitted count what was emitted.
      acceptance_if_reached: share of the rounds whose path reached depth 0, 1, … that went on.
      histogram: how many rounds accepted 0, 1, … tokens.
      histogram_by_request: the same of each row; its sum is the row's rounds.
      acceptance_by_rank: for each depth, the share of the rounds that reached it which went on
        with the node's 1st, 2nd, … try (the last: that one or, in merged trees, a later one). It
        is what `magicjax.optimal` makes a tree of; its cumulated sum is the success rate of the
        draft's top 1, 2, … choices.
      rounds: target passes, summed over rows (a row counts until it ends).
      steps: rounds of the whole batch: of the row that took most. decode_s / steps is the time of
        one.
      emitted: tokens of the decoding loop, all rows; the first of each row is prefill's.
      drafted: nodes proposed besides roots; padding is none.
      nodes_per_round: of a row, the root included.
      accepted: speculated tokens accepted.
      prefill_s, decode_s: of prefill (first token included), of the loop.
      compile_s: spent compiling in this call.
      compilations: programs compiled in this call.
      tokens_per_s: emitted / decode_s.
      kv_bytes_target, kv_bytes_draft: allocated keys and values.
      attention_backend: which backend computed the attention.
      plan_s: of `drafter="auto"` in `generate`: spent on trials and the run-off, compiling aside.
      depths: of `drafter="auto"`: the depth of the tree in each call of the loop; 0: plain.
    """

    tau: float
    tau_by_request: float
    acceptance_rate: float
    acceptance_by_depth: tuple[float, ...]
    acceptance_if_reached: tuple[float, ...]
    acceptance_by_rank: tuple[tuple[float, ...], ...]
    histogram: tuple[int, ...]
    histogram_by_request: tuple[tuple[int, ...], ...]
    rounds: int
    steps: int
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
    """Returns the fields of `Stats` that follow from counting.

    Args:
      emitted: tokens of each row, the first (prefill's) included.
      histogram: rounds of each row that accepted 0, 1, … A-1 tokens.
      ranks: how often each row's path went on, from each depth, with the 1st, 2nd, … try.
      nodes: proposed in each row, roots aside.
      calls: (depth of the tree, histogram) of each part of the run, where trees differed.
    """
    by_count = np.asarray(histogram).sum(0)
    rounds, deepest = int(by_count.sum()), len(by_count) - 1
    accepted = int((by_count * np.arange(deepest + 1)).sum())
    of_rows, rounds_of_rows = np.asarray(emitted) - 1, np.asarray(histogram).sum(1)
    ran = rounds_of_rows > 0
    at_least = _at_least(by_count)
    tried, perfect = np.zeros(deepest, int), 0  # rounds that could go on; what all would accept
    for depth, counted in calls or [(deepest, histogram)]:
        of_call = np.asarray(counted).sum(0)
        tried[:depth] += _at_least(of_call)[:depth]
        perfect += depth * int(of_call.sum())
    reached = np.maximum(tried, 1)
    by_rank = np.asarray(ranks).sum(0)[:-1] / reached[:, None]
    return {
        "tau": int(of_rows.sum()) / rounds if rounds else 0.0,
        "tau_by_request": float((of_rows[ran] / rounds_of_rows[ran]).mean()) if rounds else 0.0,
        "acceptance_rate": accepted / perfect if perfect else 0.0,
        "acceptance_by_depth": tuple(float(n) / max(rounds, 1) for n in at_least[1:]),
        "acceptance_if_reached": tuple(float(n) for n in at_least[1:] / reached),
        "acceptance_by_rank": tuple(tuple(map(float, row)) for row in by_rank),
        "histogram": tuple(map(int, by_count)),
        "histogram_by_request": tuple(tuple(map(int, row)) for row in np.asarray(histogram)),
        "rounds": rounds,
        "steps": int(rounds_of_rows.max()),
        "emitted": int(of_rows.sum()),
        "drafted": int(np.asarray(nodes).sum()),
        "nodes_per_round": 1 + int(np.asarray(nodes).sum()) / rounds if rounds else 1.0,
        "accepted": accepted,
    }


def _at_least(by_count: Int[np.ndarray, "A"]) -> Int[np.ndarray, "A"]:
    """Returns how many rounds accepted at least 0, 1, … tokens."""
    return by_count[::-1].cumsum()[::-1]
