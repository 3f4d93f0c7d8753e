"""Counts of drafted, accepted and emitted tokens, and the rates that follow from them."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

Histogram = Int[np.ndarray, "*B A"]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of the rounds of a row, or of several; `a + b` has the rounds of both.

    Attributes:
      histogram: number of rounds that accepted 0, 1, … drafted tokens; empty without rounds.
      emitted: tokens of the rounds, bonus tokens included; prefill emits the first token of a row.
      drafted: proposed nodes without roots and padding.
      tried: number of rounds that could accept a token at depth 1, 2, …: they accepted all tokens
        before it, and their tree was as deep.
      perfect: the number of tokens that a perfect drafter would have accepted, depth times rounds.
      ranks: per depth, the number of rounds that continued with the node's 1st, 2nd, … try (the
        last: that or, in merged trees, a later one).
    """

    histogram: tuple[int, ...] = ()
    emitted: int = 0
    drafted: int = 0
    tried: tuple[int, ...] = ()
    perfect: int = 0
    ranks: tuple[tuple[int, ...], ...] = ()

    def __add__(self, other: "Counts") -> "Counts":
        ranks = itertools.zip_longest(self.ranks, other.ranks, fillvalue=())
        return Counts(
            histogram=_sum(self.histogram, other.histogram),
            emitted=self.emitted + other.emitted,
            drafted=self.drafted + other.drafted,
            tried=_sum(self.tried, other.tried),
            perfect=self.perfect + other.perfect,
            ranks=tuple(itertools.starmap(_sum, ranks)),
        )

    @property
    def target_passes(self) -> int:
        """Rounds, summed over rows until they end."""
        return sum(self.histogram)

    @property
    def at_least(self) -> tuple[int, ...]:
        """Number of rounds that accepted at least 0, 1, … tokens."""
        return tuple(_at_least(np.array(self.histogram, int)).tolist())

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens.

        Acceptance is the verifier's result, even where a row's end truncates its last round; `tau`
        and `emitted` count emitted tokens.
        """
        return sum(self.at_least[1:])

    @property
    def tau(self) -> float:
        """Mean acceptance length τ: emitted tokens per target pass and row, bonus token included.

        Every pass has the same weight.
        """
        return self.emitted / self.target_passes if self.target_passes else 0.0

    @property
    def block_efficiency(self) -> float:
        """Accepted tokens and the bonus token per target pass and row."""
        return 1 + self.accepted / max(self.target_passes, 1)

    @property
    def nodes_per_round(self) -> float:
        """Nodes per target pass and row, the root included."""
        return 1 + self.drafted / max(self.target_passes, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens divided by those that a perfect drafter would have accepted."""
        return self.accepted / self.perfect if self.perfect else 0.0

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Share of rounds that accepted at least 1, 2, … tokens."""
        return tuple(n / max(self.target_passes, 1) for n in self.at_least[1:])

    @property
    def acceptance_if_reached(self) -> tuple[float, ...]:
        """Of the rounds that accepted at least 0, 1, … tokens, the share that accepted the next."""
        pairs = zip(self.at_least[1:], self.tried, strict=True)
        return tuple(n / max(tried, 1) for n, tried in pairs)

    @property
    def acceptance_by_rank(self) -> tuple[tuple[float, ...], ...]:
        """Per depth, the share of rounds that reached it and continued with the 1st, 2nd, … try.

        `magicjax.optimal` takes it; its cumulative sum is the success rate of the draft's top 1,
        2, … choices.
        """
        pairs = zip(self.ranks, self.tried, strict=True)
        return tuple(tuple(n / max(tried, 1) for n in row) for row, tried in pairs)


def by_row(
    emitted: Int[np.ndarray, "B"],
    histogram: Int[np.ndarray, "B A"],
    ranks: Int[np.ndarray, "B A W"],
    nodes: Int[np.ndarray, "B"],
    calls: Sequence[tuple[int, Int[np.ndarray, "B A"]]] = (),
    speculative: Sequence[bool] | None = None,
) -> tuple[Counts, ...]:
    """Returns the counts of each row.

    Args:
      emitted: tokens of each row, the first (prefill's) included.
      histogram: number of rounds of each row that accepted 0, 1, … A-1 tokens.
      ranks: number of rounds of each row that continued, at each depth, with the 1st, 2nd, … try.
      nodes: nodes proposed in each row, roots excluded.
      calls: depth of the tree and histogram of each call of the loop, if trees differed.
      speculative: whether each row accepts drafted tokens; None: all do.
    """
    histogram = np.asarray(histogram)
    tried, perfect = np.zeros_like(histogram[:, 1:]), np.zeros(len(histogram), int)
    drafts = np.ones(len(histogram), bool) if speculative is None else np.array(speculative)
    for depth, call_histogram in calls or [(tried.shape[1], histogram)]:
        drafted_rounds = np.where(drafts[:, None], call_histogram, 0)
        tried += tried_and_accepted(drafted_rounds, depth, tried.shape[1])[0]
        perfect += depth * drafted_rounds.sum(1)
    ranks = np.asarray(ranks)[:, :-1]
    return tuple(
        Counts(
            histogram=tuple(histogram[row].tolist()),
            emitted=int(emitted[row]) - 1,
            drafted=int(nodes[row]),
            tried=tuple(tried[row].tolist()),
            perfect=int(perfect[row]),
            ranks=tuple(map(tuple, ranks[row].tolist())),
        )
        for row in range(len(histogram))
    )


def tau_by_request(counts: Iterable[Counts]) -> float:
    """Returns the mean τ of rows: every row with rounds has the same weight."""
    taus = [row.tau for row in counts if row.target_passes]
    return statistics.fmean(taus) if taus else 0.0


def tried_and_accepted(
    histogram: Histogram, depth: int, deepest: int
) -> tuple[Int[np.ndarray, "*B D"], Int[np.ndarray, "*B D"]]:
    """Returns how many rounds tried, and how many accepted, the token at depth 1, 2, ...

    Args:
      histogram: [*B, A], rounds that accepted 0, 1, ... tokens.
      depth: the depth of the tree that ran.
      deepest: D; deeper tokens than `depth` have counts of 0.
    """
    at_least = _at_least(np.asarray(histogram))
    tried, accepted = np.zeros((2, *at_least.shape[:-1], deepest), at_least.dtype)
    tried[..., :depth], accepted[..., :depth] = at_least[..., :depth], at_least[..., 1 : depth + 1]
    return tried, accepted


def _at_least(histogram: Histogram) -> Histogram:
    """Returns the number of rounds that accepted at least 0, 1, … tokens."""
    return histogram[..., ::-1].cumsum(-1)[..., ::-1]


def _sum(*counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
