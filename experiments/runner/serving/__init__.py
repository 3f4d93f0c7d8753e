"""Cells with slots: an engine serves requests that arrive over time."""
