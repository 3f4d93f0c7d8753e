"""Runs the cells of a grid: launchers, worker processes, measurement and provenance."""
