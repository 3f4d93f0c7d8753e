"""Predicts the fastest drafter, budget and tree from costs and measured acceptance."""

from magicjax.prediction.planner.planning import (
    MAX_DEPTH,
    Candidate,
    Plan,
    Prediction,
    break_even,
    checked_free_memory,
    cost_of,
    free_memory,
    inflection,
    plan,
    predictions,
)
