"""Measures the engine: python -m experiments.studies.serving."""
