"""Which drafter, budget and tree is predicted to be fastest, from costs and measured acceptance."""

from magicjax.planner.planning import (
    MAX_DEPTH,
    Candidate,
    Plan,
    Prediction,
    break_even,
    chain_speed_ups,
    check_fits,
    cost_of,
    inflection,
    left_of_device,
    most_speed_up,
    plan,
    predictions,
    rate_of,
)

__all__ = [
    "MAX_DEPTH",
    "Candidate",
    "Plan",
    "Prediction",
    "break_even",
    "chain_speed_ups",
    "check_fits",
    "cost_of",
    "inflection",
    "left_of_device",
    "most_speed_up",
    "plan",
    "predictions",
    "rate_of",
]
