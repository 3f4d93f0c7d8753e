"""The settings of an experiment, its cells, and the layout of its results."""
