"""Searches drafters, budgets and trees for the highest predicted speedup."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from scipy.optimize import bisect

from magicjax.prediction.cost_model import (
    Draft,
    Machine,
    RoundCost,
    Sizes,
    round_cost,
)
from magicjax.trees.sequoia import expected_tokens, optimal, validated_acceptance
from magicjax.trees.token_tree import TokenTree, chain

MAX_DEPTH = 16
# Sizes and depths of the optimal trees in the search; costs change little between them.
TREE_NODES = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 128, 256)
TREE_DEPTHS = (1, 2, 3, 4, 6, 8, 12)

Acceptance = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A drafter with its cost and its measured acceptance.

    Attributes:
      name: its spec.
      draft: its cost.
      acceptance: [depths, ranks], see `magicjax.optimal`.
      deepest: maximum depth of a tree.
      memory: bytes of its weights and caches on each device.
    """

    name: str
    draft: Draft
    acceptance: Acceptance
    deepest: int = MAX_DEPTH
    memory: int = 0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for a candidate with a tree.

    Attributes:
      drafter: name of the candidate.
      tree: what it drafts.
      tokens: expected tokens per round and row, including the bonus token.
      cost: seconds of a round and its parts.
      batch: B, the rows.
    """

    drafter: str
    tree: TokenTree
    tokens: float
    cost: RoundCost
    batch: int

    @property
    def speedup(self) -> float:
        return self.cost.speedup(self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all rows."""
        return self.batch * self.tokens / self.cost.total

    @property
    def seconds_per_token(self) -> float:
        """Mean time between two tokens of a row."""
        return self.cost.total / self.tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of the planner.

    Attributes:
      best: the fastest prediction, even if it is slower than plain decoding.
      runner_up: the best of the other candidates; with one candidate, its second-best tree.
      break_even: lowest acceptance of a chain's tokens at which the best candidate is not slower
        than plain decoding; None if it is slower even at acceptance 1.
      target: T_target in seconds.
      too_large: candidates that do not fit into memory.
    """

    best: Prediction
    runner_up: Prediction | None
    break_even: float | None
    target: float
    too_large: tuple[str, ...] = ()

    @property
    def speculate(self) -> bool:
        """Whether speculation is faster than plain decoding."""
        return self.best.speedup > 1


def plan(
    target: Sizes,
    candidates: Sequence[Candidate],
    machine: Machine,
    batch: int,
    context: int,
    free: float = math.inf,
) -> Plan:
    """Returns the plan with the highest predicted speedup.

    The search covers chains of every depth and, for candidates with acceptance of several ranks,
    optimal trees (`magicjax.optimal`).

    Args:
      target: the model whose output is kept.
      candidates: drafters to compare.
      machine: runs all models.
      batch, context: B, and the tokens of each row's cache.
      free: bytes of each device beside the target (`candidates.free_memory`).

    Raises:
      ValueError: no candidate, a batch or context below 1, heads that do not divide over the
        machine, invalid acceptance, or no candidate that fits the memory.
    """
    if not candidates:
        raise ValueError("no candidate: pass at least one drafter with its acceptance")
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    fitting = [candidate for candidate in candidates if candidate.memory <= free]
    too_large = tuple(c.name for c in candidates if c not in fitting)
    if not fitting:
        raise ValueError(
            f"no draft fits beside the target: {', '.join(too_large)} need more than the "
            f"{free / 1e9:.1f} GB free on each device; use fewer rows, smaller budgets or more "
            "devices"
        )
    ranked = [predictions(target, c, machine, batch, context) for c in fitting]
    ranked.sort(key=lambda trees: -trees[0].speedup)
    best = ranked[0][0]
    others = [trees[0] for trees in ranked[1:]] or ranked[0][1:]
    winner = next(c for c in fitting if c.name == best.drafter)
    return Plan(
        best=best,
        runner_up=next(iter(others), None),
        break_even=break_even(target, winner, machine, batch, context),
        target=best.cost.target,
        too_large=too_large,
    )


def predictions(
    target: Sizes, candidate: Candidate, machine: Machine, batch: int, context: int
) -> list[Prediction]:
    """Returns a prediction for every tree of the search, the fastest first; see `plan`."""
    results = []
    for tree, tokens in _trees(candidate.acceptance, candidate.deepest):
        cost = cost_of(target, candidate, machine, batch, context, tree)
        results.append(Prediction(candidate.name, tree, tokens, cost, batch))
    return sorted(results, key=lambda prediction: -prediction.speedup)


def cost_of(
    target: Sizes, candidate: Candidate, machine: Machine, batch: int, context: int, tree: TokenTree
) -> RoundCost:
    """Returns the cost of a candidate's round."""
    width = tree.levels.shape[1]
    return round_cost(
        target, candidate.draft, machine, batch, context, tree.num_nodes, tree.depth, width
    )


@functools.lru_cache(maxsize=256)
def _trees(acceptance: Acceptance, deepest: int) -> tuple[tuple[TokenTree, float], ...]:
    """Returns the trees of the search, each with its expected tokens per round."""
    table = validated_acceptance(acceptance)
    trees = [chain(depth) for depth in range(1, deepest + 1)]
    if table.shape[1] > 1:
        trees += [
            optimal(table, nodes, depth)
            for nodes in TREE_NODES
            for depth in TREE_DEPTHS
            if depth <= deepest
        ]
    return tuple((tree, expected_tokens(tree, table)) for tree in dict.fromkeys(trees))


def break_even(
    target: Sizes, candidate: Candidate, machine: Machine, batch: int, context: int
) -> float | None:
    """Returns the lowest acceptance at which some chain is not slower than plain decoding.

    Returns None if all are slower even at acceptance 1.
    """
    rates = []
    for depth in range(1, candidate.deepest + 1):
        cost = cost_of(target, candidate, machine, batch, context, chain(depth))
        rate = required_acceptance(cost.total / cost.target, depth)
        if rate is not None:
            rates.append(rate)
    return min(rates, default=None)


def required_acceptance(tokens: float, depth: int) -> float | None:
    """Returns the acceptance at which a chain emits this many tokens per round.

    It solves tokens = 1 + rate + ... + rate^depth. It is 0 for fewer than 1 token, and None for
    more than depth + 1.
    """
    if tokens > depth + 1:
        return None
    if tokens <= 1:
        return 0.0
    return float(bisect(lambda rate: sum(rate**i for i in range(depth + 1)) - tokens, 0.0, 1.0))


def inflection(
    target: Sizes,
    candidate: Candidate,
    machine: Machine,
    depth: int,
    batches: tuple[int, int],
    contexts: tuple[int, int] = (128, 131072),
) -> float | None:
    """Returns the context from which a larger batch increases the speedup instead of reducing it.

    There, the speedup of the larger batch overtakes that of the smaller one. Acceptance cancels,
    because both emit the same tokens per round.

    Source: MagicDec (arXiv 2408.11049), section 3.

    Args:
      target, candidate, machine: what runs, and on which devices.
      depth: gamma of a chain.
      batches: the smaller and the larger batch.
      contexts: range of the search; None is returned if the context is outside.
    """

    def gain(context: float) -> float:
        small, large = (
            round_cost(target, candidate.draft, machine, b, round(context), depth + 1, depth)
            for b in batches
        )
        return large.speedup(1.0) - small.speedup(1.0)

    if gain(contexts[0]) > 0 or gain(contexts[1]) < 0:
        return None
    return float(bisect(gain, *contexts, xtol=0.5))
