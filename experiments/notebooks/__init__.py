"""Example notebooks; `python -m experiments.notebooks` runs them and stores their outputs."""
