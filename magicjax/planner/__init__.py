"""Predicts the fastest drafter, budget and tree from costs and measured acceptance."""

from magicjax.planner.planning import (
    MAX_DEPTH,
    Candidate,
    Plan,
    Prediction,
    break_even,
    chain_speedups,
    check_fits,
    cost_of,
    free_memory,
    inflection,
    max_speedup,
    plan,
    predictions,
    required_acceptance,
)

__all__ = [
    "MAX_DEPTH",
    "Candidate",
    "Plan",
    "Prediction",
    "break_even",
    "chain_speedups",
    "check_fits",
    "cost_of",
    "free_memory",
    "inflection",
    "max_speedup",
    "plan",
    "predictions",
    "required_acceptance",
]
