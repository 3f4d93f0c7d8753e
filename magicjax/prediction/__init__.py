"""Predicted times and memory, and what they choose: plans, drafters, programs for absent GPUs."""
