"""Predicts the fastest drafter, budget and tree from costs and measured acceptance."""

from magicjax.prediction.planner.planning import (
    MAX_DEPTH,
    Candidate,
    Plan,
    Prediction,
    break_even,
    inflection,
    plan,
    predictions,
)
