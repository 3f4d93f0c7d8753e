"""Which drafter, budget and tree pay most, or that none does: by costs and measured acceptance."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from magicjax.cost_model import (
    Draft,
    Machine,
    RoundCost,
    Sizes,
    check_heads,
    kv_shards,
    memory_bytes,
    round_cost,
)
from magicjax.trees.sequoia import checked_acceptance, expected_tokens, optimal
from magicjax.trees.token_tree import TokenTree, chain

MAX_DEPTH = 16
# Sizes and depths of the optimal trees that are tried; costs change little between them.
TREE_NODES = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
TREE_DEPTHS = (1, 2, 3, 4, 6, 8, 12)

Acceptance = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to draft, and how often what it drafts is accepted.

    Attributes:
      name: as commands write it.
      draft: what it costs.
      acceptance: [depths, ranks], as `magicjax.optimal` takes it.
      deepest: the deepest tree that it can draft.
      shared: it is the target itself, so its weights are there already.
      tokens: measured ones of a round of a chain, by its depth from 1 on; of deeper chains and of
        trees, or if there are none, they follow from `acceptance`.
      scale: measured time of a round, over what the cost model foretells.
    """

    name: str
    draft: Draft
    acceptance: Acceptance
    deepest: int = MAX_DEPTH
    shared: bool = True
    tokens: tuple[float, ...] = ()
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a candidate with a tree is foretold to do.

    Attributes:
      drafter: the candidate's name.
      tree: what it drafts.
      tokens: expected of a round and row, the bonus token included.
      cost: seconds of the round and its parts.
      batch: B.
    """

    drafter: str
    tree: TokenTree
    tokens: float
    cost: RoundCost
    batch: int

    @property
    def speed_up(self) -> float:
        return self.cost.speed_up(self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Of all rows together."""
        return self.batch * self.tokens / self.cost.total

    @property
    def seconds_per_token(self) -> float:
        """Between two tokens of a row, on average."""
        return self.cost.total / self.tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """The planner's answer.

    Attributes:
      best: the fastest prediction, also where it does not pay.
      runner_up: the best of the other candidates; of one candidate, its next tree.
      break_even: the lowest acceptance of each token of a chain at which the best candidate is no
        slower than plain decoding; None: not even if every token were accepted.
      target: T_target, seconds.
      too_large: candidates left out because they do not fit into memory.
    """

    best: Prediction
    runner_up: Prediction | None
    break_even: float | None
    target: float
    too_large: tuple[str, ...] = ()

    @property
    def pays(self) -> bool:
        """Whether speculation is faster than plain decoding."""
        return self.best.speed_up > 1


def plan(
    target: Sizes,
    candidates: Sequence[Candidate],
    machine: Machine,
    batch: int,
    context: int,
) -> Plan:
    """Returns what is foretold to be fastest.

    Chains are tried of every depth; candidates with acceptance of several ranks also draft optimal
    trees (`magicjax.optimal`).

    Args:
      target: the model whose output is kept.
      candidates: ways to draft.
      machine: what all run on.
      batch, context: B, and the tokens of each row's cache.

    Raises:
      ValueError: no candidate, a batch or context below 1, heads that the machine does not divide,
        acceptance that is none, or more bytes than the devices have.
    """
    if not candidates:
        raise ValueError("no candidate to plan with: give at least one drafter with its acceptance")
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    left = check_fits(target, machine, batch, context)
    fit = [c for c in candidates if c.draft.memory(machine, batch, context, c.shared) <= left]
    too_large = tuple(c.name for c in candidates if c not in fit)
    if not fit:
        raise ValueError(
            f"no draft fits beside the target: {', '.join(too_large)} need more than the "
            f"{left / 1e9:.1f} GB left of each device; use fewer rows, smaller budgets or more "
            "devices"
        )
    of_each = [
        sorted(predictions(target, c, machine, batch, context), key=lambda p: -p.speed_up)
        for c in fit
    ]
    of_each.sort(key=lambda found: -found[0].speed_up)
    best = of_each[0][0]
    others = [found[0] for found in of_each[1:]] or of_each[0][1:]
    winner = next(c for c in fit if c.name == best.drafter)
    return Plan(
        best=best,
        runner_up=next(iter(others), None),
        break_even=break_even(target, winner, machine, batch, context),
        target=best.cost.target,
        too_large=too_large,
    )


def predictions(
    target: Sizes,
    candidate: Candidate,
    machine: Machine,
    batch: int,
    context: int,
) -> Iterator[Prediction]:
    """Yields a prediction for every tree that is tried; see `plan`."""
    for tree, tokens in _trees(candidate.acceptance, candidate.deepest):
        if tree.depth <= len(candidate.tokens) and tree == chain(tree.depth):
            tokens = candidate.tokens[tree.depth - 1]
        cost = cost_of(target, candidate, machine, batch, context, tree)
        yield Prediction(candidate.name, tree, tokens, cost, batch)


def cost_of(
    target: Sizes,
    candidate: Candidate,
    machine: Machine,
    batch: int,
    context: int,
    tree: TokenTree,
) -> RoundCost:
    """Returns what a round of a candidate costs, set right by the candidate's `scale`."""
    where = machine, batch, context
    width = tree.levels.shape[1]
    cost = round_cost(target, candidate.draft, *where, tree.num_nodes, tree.depth, width)
    return cost.scaled(1.0, candidate.scale)


@functools.lru_cache(maxsize=256)
def _trees(acceptance: Acceptance, deepest: int) -> tuple[tuple[TokenTree, float], ...]:
    """Returns the trees that are tried, each with its expected tokens."""
    table = checked_acceptance(acceptance)
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
    target: Sizes,
    candidate: Candidate,
    machine: Machine,
    batch: int,
    context: int,
) -> float | None:
    """Returns the lowest acceptance at which some chain is no slower than plain decoding.

    None if none is, even where every token is accepted.
    """
    found = []
    for depth in range(1, candidate.deepest + 1):
        cost = cost_of(target, candidate, machine, batch, context, chain(depth))
        rate = rate_of(cost.total / cost.target, depth)
        if rate is not None:
            found.append(rate)
    return min(found, default=None)


def rate_of(tokens: float, depth: int) -> float | None:
    """Returns the acceptance at which a chain emits so many tokens a round; None: at none.

    It solves tokens = 1 + rate + ... + rate^depth; 0 where fewer than 1 are wanted.
    """
    if tokens > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        below = sum(middle**i for i in range(depth + 1)) < tokens
        low, high = (middle, high) if below else (low, middle)
    return high


def most_speed_up(
    target: Sizes, candidate: Candidate, machine: Machine, batch: int, context: int
) -> float:
    """Returns the speed-up of its best chain if every token that it drafts were right."""
    where = machine, batch, context
    return max(
        cost_of(target, candidate, *where, chain(depth)).speed_up(depth + 1)
        for depth in range(1, candidate.deepest + 1)
    )


def left_of_device(target: Sizes, machine: Machine, batch: int, context: int) -> float:
    """Returns the bytes that the target leaves free on each device; negative: it does not fit."""
    return machine.device.memory - memory_bytes(target, machine, batch, context, target.kv_bytes)


def check_fits(target: Sizes, machine: Machine, batch: int, context: int) -> float:
    """Returns the bytes that the target leaves free on each device.

    Raises ValueError if it does not fit at all, with the most rows that do, or cannot be divided.
    """
    check_heads(target, machine)
    if (left := left_of_device(target, machine, batch, context)) >= 0:
        return left
    memory = machine.device.memory
    weights = memory_bytes(target, machine, batch, 0, 0)
    shards = kv_shards(target, machine)
    rows = math.floor((memory - weights) * shards / (context * target.kv_bytes))
    remedy = (
        f"at most {rows * machine.data} rows fit; use a smaller batch or more devices"
        if rows > 0
        else "not one row fits; use more devices"
    )
    raise ValueError(
        f"batch={batch} at context={context} needs {(memory - left) / 1e9:.1f} GB on each of "
        f"{machine.devices} {machine.device.name}, which have {memory / 1e9:.0f} GB: {remedy}"
    )


def inflection(
    target: Sizes,
    candidate: Candidate,
    machine: Machine,
    depth: int,
    batches: tuple[int, int],
    contexts: tuple[int, int] = (128, 131072),
) -> float | None:
    """Returns the context from which more rows make speculation pay more, not less.

    It is where the speed-up of the larger batch overtakes that of the smaller one; tokens of a
    round are the same at both, so acceptance does not matter. None if it is not in the range.

    Source: MagicDec (arXiv 2408.11049), section 3.

    Args:
      target, candidate, machine: as for `plan`.
      depth: gamma, of a chain.
      batches: the smaller and the larger.
      contexts: where to look, from and to.
    """

    def gain(context: float) -> float:
        one, many = (
            round_cost(target, candidate.draft, machine, b, round(context), depth + 1, depth)
            for b in batches
        )
        return many.speed_up(1.0) - one.speed_up(1.0)

    low, high = map(float, contexts)
    if gain(low) > 0 or gain(high) < 0:
        return None
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


def chain_speed_ups(
    target: Sizes, candidate: Candidate, machine: Machine, batch: int, context: int
) -> dict[int, float]:
    """Returns the speed-up of a chain by its depth."""
    table = np.array(candidate.acceptance)
    return {
        depth: round_cost(
            target, candidate.draft, machine, batch, context, depth + 1, depth
        ).speed_up(expected_tokens(chain(depth), table))
        for depth in range(1, candidate.deepest + 1)
    }
