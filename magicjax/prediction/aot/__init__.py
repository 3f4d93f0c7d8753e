"""Ahead-of-time compilation for GPUs that are absent, and the memory and text of its programs."""
