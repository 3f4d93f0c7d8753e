"""Measures everything that needs a GPU: python -m experiments.studies.gpu."""
