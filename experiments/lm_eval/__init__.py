"""The adapter for lm-evaluation-harness."""
