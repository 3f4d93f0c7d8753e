"""Notebooks that show the parts at work, what draws their pictures, and what keeps them runnable.

`python -m experiments.notebooks` runs all of them and stores them with their outputs.
"""
