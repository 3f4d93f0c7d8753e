"""Measures everything that needs a GPU or TPU: `python -m experiments.studies.accelerator`."""
